"""The config.json of a model. Imports nothing slow: `headrace serve` uses it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def config_in(path: Path) -> dict[str, Any]:
    """The content of a config.json; empty if it is missing or invalid, which the checks of the whole directory
    report."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
