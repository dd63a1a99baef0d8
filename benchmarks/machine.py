"""Describes the machine on which figures were measured."""

from __future__ import annotations

import os
import platform
from importlib.metadata import version
from pathlib import Path

PACKAGES = ("openvino", "openvino-genai", "grpcio", "numpy", "uvicorn")


def describe() -> str:
    """One line with processor, cores, memory, Python and the versions of the main packages."""
    cpuinfo = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in cpuinfo if line.startswith("model name")), "unknown CPU")
    flags = next((line for line in cpuinfo if line.startswith("flags")), "")
    kinds = [kind for kind in ("avx2", "avx512f", "avx512_bf16", "amx_tile") if f" {kind}" in flags]
    memory_kb = int(Path("/proc/meminfo").read_text().split()[1])
    packages = ", ".join(f"{package} {version(package)}" for package in PACKAGES)
    return (
        f"{model} ({', '.join(kinds)}), {len(os.sched_getaffinity(0))} CPUs, {memory_kb >> 20} GiB, "
        f"Python {platform.python_version()}, {packages}"
    )
