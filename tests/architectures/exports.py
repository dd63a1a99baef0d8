"""The exported models. A separate environment exports them once, and the cache keeps them."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
from collections.abc import Sequence
from pathlib import Path

from headrace.cli.models.model_cache import cache_directory

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PYTHON = ROOT / ".make/architectures/bin/python"
_MADE_BY = ("requirements.txt", "export.py", "families.py")


def exported(names: Sequence[str]) -> Path:
    """The directory with one directory per model. Missing models are exported."""
    return _made(names, "export", _MADE_BY)


def exported_adapters(names: Sequence[str]) -> Path:
    """The directory with one directory of adapters per model. Missing ones are created."""
    return _made(names, "adapters", (*_MADE_BY, "adapters.py"))


def written_checkpoints(names: Sequence[str]) -> Path:
    """The directory with one checkpoint in safetensors form per model. Missing ones are written."""
    return _made(names, "checkpoints", (*_MADE_BY, "checkpoints.py"))


def exported_encoders(names: Sequence[str]) -> Path:
    """The directory that holds a directory for each of the encoders. Those that are missing are exported."""
    return _made(names, "encoders", ("requirements.txt", "encoder_requirements.txt", "encoders.py", "texts.py"))


def exported_small_encoders(names: Sequence[str]) -> Path:
    """The directory with one directory per encoder with random weights. Missing ones are exported."""
    return _made(names, "small_encoders", ("requirements.txt", "small_encoders.py"))


def _made(names: Sequence[str], module: str, made_by: Sequence[str]) -> Path:
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in made_by)).hexdigest()[:16]
    root = cache_directory() / "test-architectures" / digest
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing = [name for name in names if not (root / name).is_dir()]
        if missing:
            command = [PYTHON, "-m", f"tests.architectures.{module}", root, *missing]
            made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
            assert made.returncode == 0, made.stderr[-3000:]
    return root
