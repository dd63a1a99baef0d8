"""Runs the exporter in a separate process, with the packages of the extra `export`."""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

from headrace.cli.export.exporter import TEXT
from headrace.cli.export.weights import ExportedWeights, why_unreadable
from headrace.common import launch
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.host_memory import GIB
from headrace.common.model_files.score_cap import WITHOUT_SCORE_CAP, needs_score_cap

_EXPORTER = Path(__file__).with_name("exporter.py")
_INTERVAL_S = 5.0
_PIECE_BYTES = 1 << 12
_LACKS_PACKAGES = 3
# Memory that an export leaves to the machine.
_SPARE_BYTES = 512 << 20
# Why workers cannot serve some model types of config.json. They judge the exported graph by themselves
# (`headrace.worker.model.paging`); these are refused before the download. tests/architectures compares them with the
# families that are exported there.
_RECURRENT = "has only recurrent layers, which OpenVINO cannot page"
_ALIBI = "uses ALiBi for positions, which OpenVINO loses when it pages its attention"
_WINDOW = "has layers that see a window of the context only, which OpenVINO loses when it pages their attention"
_OVER_A_STEP = "computes positions over all tokens of a step, so one request would change the answers of others"
_CODE = "needs code from its repository, which headrace does not run"
_REFUSED = {
    "falcon_mamba": _RECURRENT,
    "gpt_neo": _WINDOW,
    "mamba": _RECURRENT,
    "minicpm": _CODE,
    "minicpm3": _CODE,
    "mpt": _ALIBI,
    "nemotron_h": "has recurrent layers that optimum-intel cannot export",
    "phimoe": _OVER_A_STEP,
    "zamba2": "has recurrent layers that OpenVINO cannot page",
}


def why_unservable(config: Mapping[str, object]) -> str:
    """Why a model with this config.json cannot be served, as the end of a sentence that begins with the model; empty if
    no reason is known."""
    kind = str(config.get("model_type"))
    reason = _REFUSED.get(kind, "")
    if kind == "falcon" and config.get("alibi"):
        reason = _ALIBI
    return f"cannot be served: its architecture ({kind}) {reason}" if reason else ""


def check_exportable(name: str, config: Mapping[str, object], task: str = TEXT) -> None:
    """Raise CommandError if a checkpoint with this config.json cannot be exported here for the task, or cannot be
    served afterwards. Takes seconds."""
    if task == TEXT and (problem := why_unservable(config)):
        raise CommandError(f"{name} {problem}; choose a model of another architecture")
    if task == TEXT and needs_score_cap(config):
        raise CommandError(f"{name} cannot be served: {WITHOUT_SCORE_CAP}")
    if problem := why_unreadable(config):
        raise CommandError(
            f"the weights of {name} {problem}; pull the model that it was made of with --weights int4, or take an "
            "OpenVINO or GGUF version"
        )
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        _run(name, ["check", folder, task], lambda _line: None)


def export(
    name: str,
    directory: Path,
    out: Path,
    weights: ExportedWeights,
    available_bytes: int,
    say: Callable[[str], None],
    *,
    task: str = TEXT,
    vision_networks: Sequence[str] = (),
) -> None:
    """Export the checkpoint in a directory for a task, with these networks for images. `say` gets a line for each stage
    and every few seconds. The process uses at most the available memory. Raises CommandError."""
    options = {
        "mode": weights.mode,
        "memory_bytes": available_bytes - _SPARE_BYTES,
        "task": task,
        "group_size": weights.group_size,
        "ratio": weights.ratio,
        "awq": weights.awq,
        "scale_estimation": weights.scale_estimation,
        "dataset": None if weights.dataset is None else str(weights.dataset),
        "vision_mode": weights.vision_mode,
        "vision": list(vision_networks),
    }
    _run(name, ["export", str(directory), str(out), json.dumps(options)], lambda line: say(f"{name}: {line}"))


def _run(name: str, arguments: Sequence[str], say: Callable[[str], None]) -> None:
    python = os.environ.get("HEADRACE_EXPORT_PYTHON") or sys.executable
    launcher = launch.with_parent([python, "-I", str(_EXPORTER)])
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen([*launcher, *arguments], stdout=subprocess.PIPE, stderr=errors, env=environment)
        assert process.stdout is not None
        try:
            _follow(process.stdout, process.pid, say)
        finally:
            if sys.exc_info()[0] is not None:
                process.kill()
            status = process.wait()
        errors.seek(0)
        if status:
            raise _failure(name, status, python, errors.read())


def _follow(stages: IO[bytes], pid: int, say: Callable[[str], None]) -> None:
    """Report stages as they arrive, and the time and memory of a long one."""
    stage, start_s = "starting", time.monotonic()
    with selectors.DefaultSelector() as selector:
        selector.register(stages, selectors.EVENT_READ)
        while True:
            if not selector.select(_INTERVAL_S):
                taken = _private_bytes(pid) / GIB
                say(f"{stage} ({time.monotonic() - start_s:.0f} s, {taken:.1f} GiB of memory)")
                continue
            lines = os.read(stages.fileno(), _PIECE_BYTES).decode().splitlines()
            if not lines:
                return
            for stage in lines:
                say(stage)


def _private_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:")), 0)


def _failure(name: str, status: int, python: str, log: str) -> CommandError:
    reasons = [line.removeprefix("error: ") for line in log.splitlines() if line.startswith("error: ")]
    reason = reasons[-1] if reasons else ""
    if status == _LACKS_PACKAGES:
        return CommandError(
            f"{name} has its weights as safetensors, and exporting them needs packages that {python} does not have "
            f"({reason.removeprefix('it lacks ')}); install them with: pip install 'headrace[export]' "
            "(torch and torchvision for CPUs are much smaller: install them first, as their site tells; or set "
            "HEADRACE_EXPORT_PYTHON to a Python with them), or take an OpenVINO or GGUF version of the model"
        )
    if reason:
        return CommandError(f"{name} cannot be exported: {reason}; take an OpenVINO or GGUF version of the model")
    if status < 0:
        return CommandFailed(f"exporting {name} was ended by signal {-status}; is there enough memory?")
    last = (log.strip().splitlines() or ["no reason given"])[-1]
    return CommandFailed(f"exporting {name} ended with status {status}: {last}")
