"""The demo model with only its first layers, for tests that compare texts of two runs and ignore their meaning."""

from __future__ import annotations

import fcntl
import functools
import hashlib
import shutil
from pathlib import Path

from headrace.cli.models.model_cache import cache_directory
from tests.e2e.serving import MODEL, pulled_model
from tests.infra.few_layers import write_few_layers

LAYERS = 3


@functools.cache
def small_model() -> Path:
    """Its directory, made if it is not there."""
    whole = pulled_model()
    # The tokenizer's file is in the name: a model that is converted anew has another one.
    tokenizer = hashlib.sha256((whole / "openvino_tokenizer.xml").read_bytes()).hexdigest()[:8]
    directory = cache_directory() / "test-models" / f"{MODEL}-{LAYERS}-layers-{tokenizer}"
    directory.parent.mkdir(parents=True, exist_ok=True)
    with (directory.parent / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            part = directory.with_suffix(".part")
            shutil.rmtree(part, ignore_errors=True)
            write_few_layers(whole, part, LAYERS)
            part.rename(directory)
    return directory
