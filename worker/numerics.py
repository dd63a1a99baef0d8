"""Names everything except the model that the bytes of KV blocks depend on. Only blocks with the same name are taken
back from memory or a disk, and exchanged with other workers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from headrace.common.kernel_files import ROOT, cpu_flags
from headrace.worker.model.step_limits import StepLimits

if TYPE_CHECKING:
    from headrace.worker.model.runner import OpenVINOModelRunner

# Raise it whenever keys or values get other bits from the same model and OpenVINO: with a changed transformation of the
# graph (worker/model, worker/weights), other properties for OpenVINO, or other rules for steps with
# prompts. tests/worker/test_numerics_version.py notices changes of the graph and of the properties only.
KV_NUMERICS_VERSION = 1
# OpenVINO chooses kernels by these. The name of a CPU does not tell which it has: hypervisors hide some, and give
# different CPUs the same name.
_X86_EXTENSIONS = {
    *("avx2", "avx_vnni", "avx_vnni_int8", "avx_ne_convert"),
    *("avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16", "avx512_fp16"),
    *("amx_tile", "amx_int8", "amx_bf16", "amx_fp16"),
}
_ARM_EXTENSIONS = {"asimd", "asimdhp", "asimddp", "sve", "sve2", "i8mm", "bf16", "svei8mm", "svebf16"}


def kv_numerics(runner: OpenVINOModelRunner, limits: StepLimits) -> str:
    """The name, for a model in steps of these limits. No size of exact steps changes a bit. If prompts are not exact,
    the bits of a block depend on the other tokens of its steps. With adapters, they depend on whether a request of the
    same step had one (docs/decisions/adapters.md#one-batch)."""
    parts = [runner.numerics, vector_extensions(), f"version {KV_NUMERICS_VERSION}"]
    if runner.adapters is not None:
        parts.append("adapters")
    if not limits.is_exact:
        parts.append("inexact")
    return ", ".join(parts)


def vector_extensions(root: Path = ROOT) -> str:
    """The CPU's extensions by which kernels are chosen, in alphabetical order."""
    return " ".join(sorted((_X86_EXTENSIONS | _ARM_EXTENSIONS) & cpu_flags(root)))
