"""The weights of a GGUF file as constants of a graph, with the numbers that the file has.

A quantised weight is `scale * (q - zero_point)`, with a scale and a zero point for 16 or 32 neighbours of a row. The
integers stay as they are stored. A zero point may lie between two integers: files with a minimum (Q4_1, Q5_1, Q4_K,
Q5_K) have such ones, and rounding them changes log-probabilities by up to 1 (docs/decisions/0047).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
from gguf import GGMLQuantizationType as Type
from gguf.quants import Q4_K, dequantize
from openvino import opset13

_Array = npt.NDArray[Any]
_FLOATS = {Type.F32: np.float32, Type.F16: np.float16}
_LARGEST_ZERO_POINT = 60_000.0


class Groups(NamedTuple):
    """Quantised weights of a matrix: `integers` u8 or i8 [rows, groups, size], `scales` f16 or f32 [rows, groups, 1],
    and `zero_points` f32 of that shape, or one number for all. `is_4_bit`: the integers are below 16."""

    integers: _Array
    scales: _Array
    zero_points: _Array | float
    is_4_bit: bool = False


class Weights(NamedTuple):
    """A matrix [rows, columns]: `groups`, or else `floats` in f32, f16 or (as u16) bf16."""

    shape: tuple[int, int]
    groups: Groups | None = None
    floats: _Array | None = None


def read_weights(kind: Type, data: _Array) -> Weights:
    """The matrix in `data`, which is as GGUFReader gives it: a row of bytes, or of floats, for each row."""
    rows = data.shape[0]
    if kind in _FLOATS or kind == Type.BF16:
        floats = data.view(np.uint16) if kind == Type.BF16 else data
        return Weights((rows, floats.shape[1]), floats=floats)
    groups = _READERS[kind](data.reshape(-1, _BLOCK_BYTES[kind])) if kind in _READERS else _to_8_bits(kind, data)
    groups = _by_row(groups, rows)
    return Weights((rows, groups.integers.shape[1] * groups.integers.shape[2]), groups)


def with_rows(weights: Weights, order: _Array) -> Weights:
    """The matrix with its rows in another order."""
    if weights.groups is None:
        assert weights.floats is not None
        return weights._replace(floats=weights.floats[order])
    integers, scales, zero_points, is_4_bit = weights.groups
    points = zero_points if isinstance(zero_points, float) else zero_points[order]
    return weights._replace(groups=Groups(integers[order], scales[order], points, is_4_bit))


def matrix_of(weights: Weights) -> ov.Output:
    """A node that gives the matrix in f32, for products."""
    if weights.groups is None:
        return _converted_floats(weights)
    integers, scales, zero_points, is_4_bit = weights.groups
    stored = _constant(_packed(integers), integers.shape, ov.Type.u4) if is_4_bit else opset13.constant(integers)
    values = opset13.convert(stored, "f16" if scales.dtype == np.float16 else "f32")
    if not isinstance(zero_points, float):
        values = opset13.subtract(values, opset13.constant(zero_points))
    elif zero_points:
        values = opset13.subtract(values, opset13.constant(np.full((1, 1, 1), zero_points, scales.dtype)))
    values = opset13.multiply(values, opset13.constant(scales))
    matrix = opset13.reshape(values, opset13.constant(np.array(weights.shape)), False)
    return matrix.output(0) if scales.dtype == np.float32 else opset13.convert(matrix, "f32").output(0)


def rows_of(weights: Weights, indices: ov.Output) -> ov.Output:
    """A node that gives some rows of the matrix in f32: [..., columns] for indices [...]. Only these are converted."""
    axis = opset13.constant(np.int64(0))
    if weights.groups is None:
        return opset13.gather(_converted_floats(weights), indices, axis).output(0)
    integers, scales, zero_points, _is_4_bit = weights.groups
    values = opset13.convert(opset13.gather(opset13.constant(integers), indices, axis), "f32")
    if isinstance(zero_points, float):
        values = opset13.subtract(values, opset13.constant(np.float32(zero_points)))
    else:
        values = opset13.subtract(values, _gathered(zero_points, indices, axis))
    values = opset13.multiply(values, _gathered(scales, indices, axis))
    shape = opset13.constant(np.array([0, 0, weights.shape[1]]))
    return opset13.reshape(values, shape, True).output(0)


def _gathered(values: _Array, indices: ov.Output, axis: ov.Node) -> ov.Node:
    return opset13.gather(opset13.convert(opset13.constant(values), "f32"), indices, axis)


def _converted_floats(weights: Weights) -> ov.Output:
    floats = weights.floats
    assert floats is not None
    if floats.dtype == np.uint16:
        constant = _constant(floats, floats.shape, ov.Type.bf16)
    else:
        constant = opset13.constant(np.ascontiguousarray(floats))
    return constant.output(0) if floats.dtype == np.float32 else opset13.convert(constant, "f32").output(0)


def _constant(data: _Array, shape: tuple[int, ...], kind: ov.Type) -> ov.Node:
    """A constant of a type that numpy does not have, over a copy of the bytes."""
    tensor = ov.Tensor(kind, ov.Shape(list(shape)))
    tensor.data.reshape(-1).view(np.uint8)[...] = np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    return opset13.constant(tensor)


def _packed(integers: _Array) -> _Array:
    flat = integers.reshape(-1)
    packed: _Array = flat[0::2] | (flat[1::2] << 4)
    return packed


def _by_row(groups: Groups, rows: int) -> Groups:
    integers = groups.integers.reshape(rows, -1, groups.integers.shape[-1])
    scales, points = groups.scales.reshape(rows, -1, 1), groups.zero_points
    if not isinstance(points, float):
        scales, points = scales.astype(np.float32), points.reshape(rows, -1, 1).astype(np.float32)
    return Groups(integers, scales, points, groups.is_4_bit)


def _with_minimum(integers: _Array, scales: _Array, minima: _Array, *, is_4_bit: bool) -> Groups:
    """Weights of the form `scale * q + minimum`, with scales and minima f32 [groups, 1]. A group whose scale is
    negligible compared to its minimum becomes a single number."""
    with np.errstate(divide="ignore", invalid="ignore"):
        points = -minima / scales
    is_flat = ~(np.abs(points) < _LARGEST_ZERO_POINT)
    integers = np.where(is_flat, np.uint8(0), integers)
    return Groups(integers, np.where(is_flat, 1, scales), np.where(is_flat, -minima, points), is_4_bit)


def _half(raw: _Array) -> _Array:
    """The f16 in each two bytes, as f32 [blocks, 1]."""
    found: _Array = np.ascontiguousarray(raw).view(np.float16).astype(np.float32)
    return found


def _nibbles(raw: _Array) -> _Array:
    """Blocks of 16 bytes as 32 integers: the low halves, then the high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=1)


def _fifth_bits(raw: _Array) -> _Array:
    """The 32 bits in each 4 bytes, as 0 or 16."""
    bits: _Array = np.unpackbits(np.ascontiguousarray(raw), axis=1, bitorder="little") << 4
    return bits


def _stored_half(raw: _Array) -> _Array:
    """The f16 in each two bytes as it is [blocks, 1]."""
    found: _Array = np.ascontiguousarray(raw).view(np.float16)
    return found


def _q4_0(blocks: _Array) -> Groups:
    return Groups(_nibbles(blocks[:, 2:]), _stored_half(blocks[:, :2]), 8.0, True)


def _q4_1(blocks: _Array) -> Groups:
    return _with_minimum(_nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4]), is_4_bit=True)


def _q5_0(blocks: _Array) -> Groups:
    return Groups(_nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6]), _stored_half(blocks[:, :2]), 16.0)


def _q5_1(blocks: _Array) -> Groups:
    integers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _with_minimum(integers, _half(blocks[:, :2]), _half(blocks[:, 2:4]), is_4_bit=False)


def _q8_0(blocks: _Array) -> Groups:
    return Groups(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _stored_half(blocks[:, :2]), 0.0)


def _scales_and_minima(blocks: _Array) -> tuple[_Array, _Array]:
    """Scales and minima of super-blocks with 8 groups of 32: f32 [groups, 1] each."""
    scales, minima = Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    of_groups = _half(blocks[:, :2]) * scales.astype(np.float32)
    return of_groups.reshape(-1, 1), (-_half(blocks[:, 2:4]) * minima.astype(np.float32)).reshape(-1, 1)


def _low_and_high(raw: _Array) -> _Array:
    """Four times 32 bytes as eight groups of 32: low halves, high halves, and so on. [groups, 32]"""
    parts = raw.reshape(-1, 4, 1, 32) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)
    return (parts & 15).reshape(-1, 32)


def _q4_k(blocks: _Array) -> Groups:
    return _with_minimum(_low_and_high(blocks[:, 16:]), *_scales_and_minima(blocks), is_4_bit=True)


def _q5_k(blocks: _Array) -> Groups:
    high = (blocks[:, 16:48].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    integers = _low_and_high(blocks[:, 48:]) | (high.reshape(-1, 32) << 4)
    return _with_minimum(integers, *_scales_and_minima(blocks), is_4_bit=False)


def _q6_k(blocks: _Array) -> Groups:
    low = (blocks[:, :128].reshape(-1, 2, 1, 64) >> np.array([0, 4], np.uint8).reshape(1, 1, 2, 1)) & 15
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)) & 3
    integers = (low.reshape(-1, 256) | (high.reshape(-1, 256) << 4)).astype(np.int8) - 32
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32) * _half(blocks[:, 208:])
    return Groups(integers.astype(np.int8).reshape(-1, 16), scales.reshape(-1, 1), 0.0)


def _to_8_bits(kind: Type, data: _Array) -> Groups:
    """Types of which groups are not known here: 8 bits for 32 neighbours, off by at most a 254th of the largest."""
    values = dequantize(data, kind).reshape(-1, 32)
    scales = (np.abs(values).max(axis=1, keepdims=True) / 127).astype(np.float32)
    integers = np.rint(values / np.where(scales, scales, 1)).astype(np.int8)
    return Groups(integers, scales, 0.0)


_READERS: dict[Type, Callable[[_Array], Groups]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
}
_BLOCK_BYTES = {
    Type.Q4_0: 18,
    Type.Q4_1: 20,
    Type.Q5_0: 22,
    Type.Q5_1: 24,
    Type.Q8_0: 34,
    Type.Q4_K: 144,
    Type.Q5_K: 176,
    Type.Q6_K: 210,
}
