"""The exported models. A separate environment exports them once, and the cache keeps them."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from headrace.cli.models.model_cache import cache_directory
from tests.architectures.families import FAMILIES, directory_name
from tests.architectures.image_processing import PROCESSING

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
PYTHON = ROOT / ".make/architectures/bin/python"
_MADE_BY = ("requirements.txt", "export.py", "packed_checkpoints.py", "../../cli/export/packed.py")
_FURTHER = ("export_further.py", "../../cli/export/further_types.py")
_WITH_IMAGES = ("image_export.py", "image_files.py", "image_processing.py")


class Job(NamedTuple):
    """What a module makes with a version of transformers, or with the usual one: a directory for each name."""

    module: str
    version: str
    root: Path
    directories: Mapping[str, Path]


def exported(names: Sequence[str]) -> Mapping[str, Path]:
    """The directory of each model. Missing models are exported."""
    return _made(exports(names))


def exported_adapters(names: Sequence[str]) -> Mapping[str, Path]:
    """The directory of adapters of each model. Missing ones are created."""
    return _made(adapters(names))


def beam_searches(names: Sequence[str]) -> Mapping[str, Path]:
    """The directory of what beam searches of each model find. Missing ones are run."""
    return _made(beams(names))


def written_checkpoints(names: Sequence[str]) -> Mapping[str, Path]:
    """The checkpoint of each model in safetensors form. Missing ones are written."""
    return _made(checkpoints(names))


def weights_for_gguf(names: Sequence[str]) -> Path:
    """The directory that holds a directory for each model with its weights and its reference. Missing ones are
    written."""
    return _root_of(gguf_weights(names))


def exported_encoders(names: Sequence[str]) -> Path:
    """The directory that holds a directory for each of the encoders. Those that are missing are exported."""
    return _root_of(encoders(names))


def written_encoders(names: Sequence[str]) -> Path:
    """The directory with one directory per embedder or reranker: its checkpoint, and what transformers computes."""
    return _root_of(encoder_checkpoints(names))


def exported_small_encoders(names: Sequence[str]) -> Path:
    """The directory with one directory per encoder with random weights. Missing ones are exported."""
    return _root_of(small_encoders(names))


def exports(names: Sequence[str]) -> list[Job]:
    """The jobs that export these models."""
    further = [name for name in names if FAMILIES[name].is_further]
    others = [name for name in names if name not in further]
    return [
        *_of_families(others, "export", _MADE_BY),
        *_of_families(further, "export_further", (*_MADE_BY, *_FURTHER)),
    ]


def adapters(names: Sequence[str]) -> list[Job]:
    """The jobs that create adapters of these models."""
    return _of_families(names, "adapters", (*_MADE_BY, "adapters.py"))


def beams(names: Sequence[str]) -> list[Job]:
    """The jobs that run beam searches of these models."""
    return _of_families(names, "beams", (*_MADE_BY, "beams.py"))


def checkpoints(names: Sequence[str]) -> list[Job]:
    """The jobs that write the checkpoints of these models."""
    return _of_families(names, "checkpoints", (*_MADE_BY, "checkpoints.py"))


def gguf_weights(names: Sequence[str]) -> list[Job]:
    """The job that writes the weights of these models for GGUF files."""
    made_by = ("requirements.txt", "export.py", "families.py", "gguf_families.py", "gguf_weights.py")
    return [_job(names, "gguf_weights", made_by)]


def encoders(names: Sequence[str]) -> list[Job]:
    """The job that exports these encoders."""
    return [_job(names, "encoders", ("requirements.txt", "encoder_requirements.txt", "encoders.py", "texts.py"))]


def encoder_checkpoints(names: Sequence[str]) -> list[Job]:
    """The job that writes the checkpoints of these embedders and rerankers."""
    made_by = ("requirements.txt", "export.py", "encoder_checkpoints.py", "random_weights.py", "texts.py")
    return [_job(names, "encoder_checkpoints", made_by)]


def small_encoders(names: Sequence[str]) -> list[Job]:
    """The job that exports these encoders with random weights."""
    return [_job(names, "small_encoders", ("requirements.txt", "small_encoders.py", "random_weights.py"))]


def make(jobs: Sequence[Job]) -> None:
    """Make the directories that are missing, in one process for each version of transformers: its imports take longer
    than most models. Another process that needs one of them waits until the job is done."""
    if not any(_missing(job) for job in jobs):
        return
    with contextlib.ExitStack() as locks:
        held: dict[Path, IO[str]] = {}
        # Always in the same order, so that two processes never wait for each other.
        for root in sorted({job.root for job in jobs}):
            root.mkdir(parents=True, exist_ok=True)
            held[root] = locks.enter_context((root / "lock").open("w"))
            fcntl.flock(held[root], fcntl.LOCK_EX)
        left = Counter(job.root for job in jobs)
        for version in dict.fromkeys(job.version for job in jobs):
            own = [job for job in jobs if job.version == version]
            for job in _run(own, version):
                left[job.root] -= 1
                if not left[job.root]:
                    held[job.root].close()


def _of_families(names: Sequence[str], module: str, made_by: Sequence[str]) -> list[Job]:
    found = []
    for takes_images, files in ((False, made_by), (True, (*made_by, *_WITH_IMAGES))):
        of_kind = [name for name in names if (name in PROCESSING) is takes_images]
        for version in dict.fromkeys(FAMILIES[name].transformers for name in of_kind):
            own = [name for name in of_kind if FAMILIES[name].transformers == version]
            found.append(_job(own, module, files, version, {name: directory_name(name) for name in own}))
    return found


def _job(
    names: Sequence[str],
    module: str,
    made_by: Sequence[str],
    version: str = "",
    directories: Mapping[str, str] | None = None,
) -> Job:
    """The job of a module, in `directories` of the cache, or under the names themselves."""
    digest = hashlib.sha256(b"".join((HERE / name).read_bytes() for name in made_by)).hexdigest()[:16]
    root = cache_directory() / "test-architectures" / digest
    return Job(module, version, root, {name: root / (directories or {}).get(name, name) for name in names})


def _made(jobs: Sequence[Job]) -> Mapping[str, Path]:
    make(jobs)
    return {name: directory for job in jobs for name, directory in job.directories.items()}


def _root_of(jobs: Sequence[Job]) -> Path:
    make(jobs)
    (job,) = jobs
    return job.root


def _missing(job: Job) -> list[str]:
    return [name for name, directory in job.directories.items() if not directory.is_dir()]


def _run(jobs: Sequence[Job], version: str) -> Iterator[Job]:
    """Run jobs in a process, with the packages of another version of transformers in front of the others. Gives each
    job that is done."""
    wanted = [(job, missing) for job in jobs if (missing := _missing(job))]
    yield from (job for job in jobs if not _missing(job))
    if not wanted:
        return
    # Models are small: threads would wait for one another. Nothing is to be downloaded.
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if version:
        packages = ROOT / f".make/transformers-{version}"
        assert packages.is_dir(), f"make .make/transformers-{version}/.done makes what exports this model"
        environment["PYTHONPATH"] = os.pathsep.join((str(packages), environment.get("PYTHONPATH", "")))
    commands = json.dumps([(job.module, str(job.root), *missing) for job, missing in wanted])
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(
            [str(PYTHON), "-m", "tests.architectures.in_one_process", commands],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        with process:
            for (job, _), _line in zip(wanted, process.stdout, strict=False):
                yield job
        errors.seek(0)
        assert process.returncode == 0, errors.read()[-3000:]
