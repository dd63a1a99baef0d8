"""Decides whether decode steps of few sequences get a second graph, with a second copy of the weights.

On CPUs with AMX, OpenVINO decompresses weights to bfloat16 tiles before it multiplies. This makes prompts fast, but for
few rows most of the time goes into decompression. The kernels for CPUs without AMX multiply 8-bit integers and take two
thirds of the time. OpenVINO uses them in a graph whose precision is float32. docs/decisions/graphs.md has the
measurements.
"""

from __future__ import annotations

from pathlib import Path

from headrace.common.kernel_files import ROOT, cpu_flags
from headrace.common.model_files.networks import weights_in
from headrace.worker.config import ConfigurationError

# The largest number of sequences for which the graph is worth it: with 24 it takes 0.92 of the time, with 32 0.96.
SMALL_DECODE = 24
# By default, the copy of the weights may take at most this share of the available memory.
_MOST_MEMORY = 0.1
# The only precision of the KV cache that both graphs lay out identically.
_SHARED_PRECISION = "u8"


def wants_decode_graph(
    asked: bool | None,
    model_dir: Path,
    *,
    kv_precision: str,
    execution_mode: str,
    available: int,
    root: Path = ROOT,
) -> bool:
    """Whether to make the graph: as `asked`, or if that is None, by the host's properties. `available` is memory in
    bytes. ConfigurationError if the flags contradict each other."""
    fits = execution_mode == "performance" and kv_precision == _SHARED_PRECISION
    if asked and not fits:
        raise ConfigurationError(
            f"--decode-graph on needs --execution-mode performance and --kv-precision {_SHARED_PRECISION}, not "
            f"{execution_mode} and {kv_precision}"
        )
    if asked is not None:
        return asked
    return fits and has_amx(root) and _weight_bytes(model_dir) <= _MOST_MEMORY * available


def has_amx(root: Path = ROOT) -> bool:
    """Whether the CPU has AMX tiles."""
    return "amx_tile" in cpu_flags(root)


def _weight_bytes(model_dir: Path) -> int:
    return sum(path.stat().st_size for path in weights_in(model_dir))
