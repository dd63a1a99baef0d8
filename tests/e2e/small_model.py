"""The demo model with only its first layers, for tests that compare texts of two runs and ignore their meaning."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

from headrace.cli.models.model_cache import cache_directory, model_directory
from tests.e2e.serving import MODEL, headrace
from tests.infra.few_layers import write_few_layers

LAYERS = 3


def small_model() -> Path:
    """Its directory, made if it is not there."""
    pulled = headrace("pull", MODEL, timeout_s=600)
    assert pulled.returncode == 0, pulled.stderr
    directory = cache_directory() / "test-models" / f"{MODEL}-{LAYERS}-layers"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            part = directory.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            write_few_layers(model_directory(MODEL), part, LAYERS)
            part.rename(directory)
    return directory
