"""Configurations of workers for tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.worker.__main__ import config_of_arguments
from headrace.worker.config import WorkerConfig


def worker_config(model_dir: Path = Path("m"), **changed: Any) -> WorkerConfig:
    """The configuration without flags, with other values in some fields."""
    return replace(config_of_arguments(["--model", str(model_dir), "--name", "m", "--worker-id", "w"]), **changed)
