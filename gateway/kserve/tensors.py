"""Tensors of KServe's protocol: their elements as values, and as bytes (pure).

Bytes are little-endian. An element of BYTES follows its length, four bytes; one of BOOL is a byte.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.checks import invalid, unsupported

# Datatype -> code of one element for `struct`.
_CODES = {
    "BOOL": "?",
    "INT8": "b",
    "INT16": "h",
    "INT32": "i",
    "INT64": "q",
    "UINT8": "B",
    "UINT16": "H",
    "UINT32": "I",
    "UINT64": "Q",
    "FP32": "f",
    "FP64": "d",
}
MAX_ELEMENTS = 65536
MAX_DIMENSIONS = 16


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, flattened. Elements of BYTES are texts."""

    name: str
    datatype: str
    shape: Sequence[int]
    values: Sequence[Any]


def checked(name: str, datatype: str, shape: Sequence[int], values: Sequence[Any]) -> Tensor:
    """A tensor of a request. Raises `StatusError` unless its elements match its shape and type."""
    check_type(name, datatype)
    has_right_shape = len(shape) <= MAX_DIMENSIONS and all(0 <= size < 1 << 63 for size in shape)
    if not has_right_shape or math.prod(shape) != len(values):
        raise invalid(name, f"{name} has {len(values)} elements, and its shape is {list(shape)[:8]}")
    kinds = {"BYTES": str, "BOOL": bool, "FP32": (int, float), "FP64": (int, float)}.get(datatype, int)
    for value in values:
        if not isinstance(value, kinds) or (isinstance(value, bool) and datatype != "BOOL"):  # type: ignore[arg-type]
            raise invalid(name, f"{name}: an element is not of its datatype, {datatype}")
    return Tensor(name, datatype, tuple(shape), tuple(values))


def check_type(name: str, datatype: str) -> None:
    """Raise `StatusError` for a datatype that no input has."""
    if datatype != "BYTES" and datatype not in _CODES:
        raise unsupported(name, f"{name}: the datatype {datatype[:16]} is not supported")


def decoded(name: str, datatype: str, raw: bytes) -> list[Any]:
    """The elements in bytes. Raises `StatusError`."""
    check_type(name, datatype)
    if datatype == "BYTES":
        return _texts(name, raw)
    code = _CODES[datatype]
    size = struct.calcsize(f"<{code}")
    if len(raw) % size or len(raw) // size > MAX_ELEMENTS:
        raise invalid(name, f"{name} has {len(raw)} bytes, which are no elements of {datatype}")
    return list(struct.unpack(f"<{len(raw) // size}{code}", raw))


def encoded(tensor: Tensor) -> bytes:
    """The elements as bytes."""
    if tensor.datatype != "BYTES":
        return struct.pack(f"<{len(tensor.values)}{_CODES[tensor.datatype]}", *tensor.values)
    texts = [text.encode() for text in tensor.values]
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def text_of(name: str, raw: bytes) -> str:
    """An element of BYTES. Raises `StatusError`."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise invalid(name, f"{name}: an element is not UTF-8: {error.reason}") from error


def _texts(name: str, raw: bytes) -> list[str]:
    texts = []
    pos = 0
    while pos < len(raw):
        if pos + 4 > len(raw):
            raise invalid(name, f"{name}: the bytes end within the length of an element")
        (size,) = struct.unpack_from("<I", raw, pos)
        pos += 4
        if pos + size > len(raw):
            raise invalid(name, f"{name}: the bytes end within an element")
        texts.append(text_of(name, raw[pos : pos + size]))
        pos += size
    return texts
