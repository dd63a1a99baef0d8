"""The commands that start a planned fleet. Pure."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence

from headrace.plan.fleet import GIB, Fleet


def serve_flags(fleet: Fleet, kv_gb: float) -> list[str]:
    """The flags of `headrace serve` on each host, or of a worker."""
    layout = fleet.kind.calibration.layout
    flags = [*_without_kv(layout.serve_flags), "--kv-cache-gb", f"{kv_gb:.3g}"]
    if fleet.max_num_seqs is not None:
        flags += ["--max-num-seqs", str(fleet.max_num_seqs)]
    if fleet.memory.disk_gb:
        flags += ["--kv-disk", "DIRECTORY", "--kv-disk-gb", f"{fleet.memory.disk_gb:g}"]
    return flags


def kv_gb_of(fleet: Fleet) -> float:
    """GiB of the KV cache of each worker, rounded up to a hundredth."""
    return max(0.01, math.ceil(100 * fleet.kv_bytes_of_worker / GIB) / 100)


def commands(fleet: Fleet, kv_gb: float) -> list[str]:
    """The commands, each a line of a shell. A line that begins with # says where the next ones run."""
    calibration = fleet.kind.calibration
    layout, model = calibration.layout, calibration.model.name
    threads = ["--threads", str(layout.threads)] if layout.threads else []
    flags = serve_flags(fleet, kv_gb)
    if fleet.hosts == 1:
        return [_line("headrace", "serve", model, "--workers", str(layout.workers), *threads, *flags)]
    tls = ["--tls-dir", "DIRECTORY"]
    lines = ["# certificates, once; copy each directory to its host, where it is DIRECTORY below"]
    lines.append(_line("headrace", "certs", "create", "host-1"))
    lines += [
        _line("headrace", "certs", "create", f"host-{number}", "--ca", "host-1") for number in range(2, fleet.hosts + 1)
    ]
    lines.append("# on host-1")
    lines.append(_line("headrace", "router", "--listen", "0.0.0.0:50051", *tls))
    lines.append(_line("headrace", "gateway", "--host", "0.0.0.0", "--router", "host-1:50051", *tls))
    lines.append(f"# on each of the {fleet.hosts} hosts, host-N")
    for number in range(layout.workers):
        where = ["--listen", f"host-N:{50061 + number}", "--router", "host-1:50051"]
        pinned = [] if layout.workers == 1 else ["taskset", "--cpu-list", f"CPUS-OF-WORKER-{number}"]
        lines.append(_line(*pinned, "headrace", "worker", "--model", model, *where, *threads, *flags, *tls))
    return lines


def _line(*words: str) -> str:
    return shlex.join(words)


def _without_kv(flags: Sequence[str]) -> list[str]:
    """The flags with which the host was measured, except the size of the KV cache."""
    kept: list[str] = []
    skip = False
    for flag in flags:
        if skip:
            skip = False
        elif flag == "--kv-cache-gb":
            skip = True
        elif not flag.startswith("--kv-cache-gb="):
            kept.append(flag)
    return kept
