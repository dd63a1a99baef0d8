"""Whether decode steps of few sequences get a graph of their own, which holds the weights once more.

On CPUs with AMX, OpenVINO's products of compressed weights decompress them to bfloat16 tiles, for few rows as for many.
That is what makes prompts fast, but for few rows most of the time goes into it; the kernels for CPUs without AMX,
which multiply 8-bit integers, take two thirds of the time. They come with a graph that computes in float32 otherwise.
docs/decisions/0029 has the measurements.
"""

from __future__ import annotations

from pathlib import Path

from headrace.worker.config import ConfigurationError

# Sequences up to which it gains: at 24 it takes 0.92 of the time, at 32 0.96.
SMALL_DECODE = 24
# Part of the available memory that the weights may take once more where nothing is said of it.
_MOST_MEMORY = 0.1
# Of the KV cache, what graphs of both precisions read alike.
_SHARED_PRECISION = "u8"


def wants_decode_graph(
    asked: bool | None,
    model_dir: Path,
    *,
    kv_precision: str,
    execution_mode: str,
    available: int,
    root: Path = Path("/"),
) -> bool:
    """What was asked, or None for what is good here. `available` memory in bytes; `root` is "/" but in tests. Raises
    ConfigurationError for what does not go together."""
    fits = execution_mode == "performance" and kv_precision == _SHARED_PRECISION
    if asked and not fits:
        raise ConfigurationError(
            f"--decode-graph on does not go with --kv-precision {kv_precision} and --execution-mode {execution_mode}: "
            f"it takes --execution-mode performance and --kv-precision {_SHARED_PRECISION}"
        )
    if asked is not None:
        return asked
    return fits and has_amx(root) and _weight_bytes(model_dir) <= _MOST_MEMORY * available


def has_amx(root: Path = Path("/")) -> bool:
    """Whether the CPU has tiles."""
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return False
    return any(line.startswith("flags") and "amx_tile" in line.split() for line in lines)


def _weight_bytes(model_dir: Path) -> int:
    return (model_dir / "openvino_model.bin").stat().st_size
