"""Reads safetensors files: a header in JSON, and the numbers in their memory layout."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection
from mmap import mmap
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

_HEADER_BYTES = 8
_MAX_HEADER_BYTES = 64 << 20
_DTYPES: dict[str, np.dtype[Any]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "BOOL": np.dtype("?"),
}
FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsError(Exception):
    """The file cannot be used. The text names it and says why."""


def tensors_of(
    raw: bytes | mmap,
    path: Path,
    kinds: Collection[str] = FLOATS,
    is_wanted: Callable[[str], bool] = lambda _name: True,
) -> dict[str, npt.NDArray[Any]]:
    """The tensors in the content of a file whose names are wanted, as views of it. bfloat16 comes as its bits in
    uint16. SafetensorsError if the content is damaged or has such tensors of other `kinds`."""
    damaged = SafetensorsError(f"{path} is no whole safetensors file; copy it again")
    length = int.from_bytes(raw[:_HEADER_BYTES], "little")
    start = _HEADER_BYTES + length
    if len(raw) < _HEADER_BYTES or length > _MAX_HEADER_BYTES or start > len(raw):
        raise damaged
    try:
        header = json.loads(raw[_HEADER_BYTES:start])
        found = {}
        for key, entry in header.items():
            if key == "__metadata__" or not is_wanted(key):
                continue
            begin, end = entry["data_offsets"]
            if entry["dtype"] not in kinds:
                names = [kind for kind in kinds if kind != "F64"]
                raise SafetensorsError(
                    f"{path} has {key} in {entry['dtype']}; {', '.join(names[:-1])} and {names[-1]} are supported"
                )
            dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
            if not 0 <= begin <= end <= len(raw) - start or end - begin != math.prod(shape) * dtype.itemsize:
                raise damaged
            found[key] = np.frombuffer(raw, dtype, math.prod(shape), start + begin).reshape(shape)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise damaged from None
    return found


def floats(values: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    """Floating-point numbers of any kind as float32. uint16 holds the bits of bfloat16."""
    if values.dtype == np.uint16:
        wide: npt.NDArray[np.uint32] = np.left_shift(values.astype(np.uint32), 16)
        return wide.view(np.float32)
    return values.astype(np.float32, copy=False)
