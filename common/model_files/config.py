"""The config.json of a model. Imports nothing slow: `headrace serve` uses it."""

from __future__ import annotations

import json
from collections.abc import Mapping
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


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes how a model computes text: of a multimodal model, text_config."""
    nested = config.get("text_config")
    return nested if isinstance(nested, dict) else config
