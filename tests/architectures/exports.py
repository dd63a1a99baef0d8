"""The exported models. A separate environment exports them once, and the cache keeps them."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.cli.models.model_cache import cache_directory
from tests.architectures.families import FAMILIES, directory_name
from tests.architectures.image_processing import PROCESSING

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PYTHON = ROOT / ".make/architectures/bin/python"
_MADE_BY = ("requirements.txt", "export.py", "packed_checkpoints.py", "../../cli/export/packed.py")
_FURTHER = ("export_further.py", "../../cli/export/further_types.py")
_WITH_IMAGES = ("image_export.py", "image_files.py", "image_processing.py")


def exported(names: Sequence[str]) -> Mapping[str, Path]:
    """The directory of each model. Missing models are exported."""
    further = [name for name in names if FAMILIES[name].is_further]
    others = [name for name in names if name not in further]
    return {
        **_of_families(others, "export", _MADE_BY),
        **_of_families(further, "export_further", (*_MADE_BY, *_FURTHER)),
    }


def exported_adapters(names: Sequence[str]) -> Mapping[str, Path]:
    """The directory of adapters of each model. Missing ones are created."""
    return _of_families(names, "adapters", (*_MADE_BY, "adapters.py"))


def beam_searches(names: Sequence[str]) -> Mapping[str, Path]:
    """The directory of what beam searches of each model find. Missing ones are run."""
    return _of_families(names, "beams", (*_MADE_BY, "beams.py"))


def written_checkpoints(names: Sequence[str]) -> Mapping[str, Path]:
    """The checkpoint of each model in safetensors form. Missing ones are written."""
    return _of_families(names, "checkpoints", (*_MADE_BY, "checkpoints.py"))


def weights_for_gguf(names: Sequence[str]) -> Path:
    """The directory that holds a directory for each model with its weights and its reference. Missing ones are
    written."""
    return _made(
        names, "gguf_weights", ("requirements.txt", "export.py", "families.py", "gguf_families.py", "gguf_weights.py")
    )


def exported_encoders(names: Sequence[str]) -> Path:
    """The directory that holds a directory for each of the encoders. Those that are missing are exported."""
    return _made(names, "encoders", ("requirements.txt", "encoder_requirements.txt", "encoders.py", "texts.py"))


def written_encoders(names: Sequence[str]) -> Path:
    """The directory with one directory per embedder or reranker: its checkpoint, and what transformers computes."""
    made_by = ("requirements.txt", "export.py", "encoder_checkpoints.py", "random_weights.py", "texts.py")
    return _made(names, "encoder_checkpoints", made_by)


def exported_small_encoders(names: Sequence[str]) -> Path:
    """The directory with one directory per encoder with random weights. Missing ones are exported."""
    return _made(names, "small_encoders", ("requirements.txt", "small_encoders.py", "random_weights.py"))


def _of_families(names: Sequence[str], module: str, made_by: Sequence[str]) -> Mapping[str, Path]:
    found: dict[str, Path] = {}
    for takes_images, files in ((False, made_by), (True, (*made_by, *_WITH_IMAGES))):
        directories = {name: directory_name(name) for name in names if (name in PROCESSING) is takes_images}
        if directories:
            root = _made(list(directories), module, files, directories)
            found |= {name: root / directory for name, directory in directories.items()}
    return found


def _made(
    names: Sequence[str], module: str, made_by: Sequence[str], directories: Mapping[str, str] | None = None
) -> Path:
    """The directory with what the module makes of each name: in `directories`, or under the names themselves."""
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in made_by)).hexdigest()[:16]
    root = cache_directory() / "test-architectures" / digest
    root.mkdir(parents=True, exist_ok=True)
    with (root / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        missing: dict[str, list[str]] = {}
        for name in names:
            if not (root / (directories or {}).get(name, name)).is_dir():
                version = FAMILIES[name].transformers if directories else ""
                missing.setdefault(version, []).append(name)
        for version, group in missing.items():
            _run([str(PYTHON), "-m", f"tests.architectures.{module}", str(root), *group], version)
    return root


def _run(command: Sequence[str], version: str) -> None:
    """Run a command that exports, with the packages of another version of transformers in front of the others."""
    environment = dict(os.environ)
    if version:
        packages = ROOT / f".make/transformers-{version}"
        assert packages.is_dir(), f"make .make/transformers-{version}/.done makes what exports this model"
        environment["PYTHONPATH"] = os.pathsep.join((str(packages), environment.get("PYTHONPATH", "")))
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
