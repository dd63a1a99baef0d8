"""The weights of a GGUF file as constants of a graph, with the numbers of the file.

A quantised weight is `scale * integer`, or `scale * integer + minimum`, with a scale and a minimum for 16 or 32
neighbours of a row. OpenVINO's products are fast if weights are integers with scales and nothing else: then the states
are quantised too, and integers multiplied. So a minimum does not become a zero point, which would not be an integer.
Instead, it multiplies the sum of its neighbours' states in a separate small product (docs/decisions/models.md#gguf).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
from gguf import GGMLQuantizationType as Type
from gguf import ReaderTensor
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import IQ4_NL, MXFP4, Q4_K, dequantize
from openvino import opset13

_Array = npt.NDArray[Any]
_FLOATS = {Type.F32: np.float32, Type.F16: np.float16}
_LARGEST_ZERO_POINT = 60_000.0


class Groups(NamedTuple):
    """Quantised weights of a matrix: `integers` i8 [rows, groups, size], `scales` and, unless they are 0, `minima`
    [rows, groups, 1], f16 or f32. `is_4_bit`: the integers are from -8 to 7."""

    integers: _Array
    scales: _Array
    minima: _Array | None = None
    is_4_bit: bool = False


class Weights(NamedTuple):
    """A matrix [rows, columns]: `groups`, or else `floats` in f32, f16 or (as u16) bf16."""

    shape: tuple[int, int]
    groups: Groups | None = None
    floats: _Array | None = None


def read_weights(kind: Type, data: _Array) -> Weights:
    """The matrix in `data`, which has a row of bytes or floats for each row of the matrix, as GGUFReader returns it."""
    rows = data.shape[0]
    if kind in _FLOATS or kind == Type.BF16:
        floats = data.view(np.uint16) if kind == Type.BF16 else data
        return Weights((rows, floats.shape[1]), floats=floats)
    block_bytes = GGML_QUANT_SIZES[kind][1]
    groups = _READERS[kind](data.reshape(-1, block_bytes)) if kind in _READERS else _to_8_bits(kind, data)
    groups = _by_row(groups, rows)
    return Weights((rows, groups.integers.shape[1] * groups.integers.shape[2]), groups)


def with_rows(weights: Weights, order: _Array) -> Weights:
    """The matrix with its rows in another order."""
    if weights.groups is None:
        assert weights.floats is not None
        return weights._replace(floats=weights.floats[order])
    integers, scales, minima, is_4_bit = weights.groups
    minima = None if minima is None else minima[order]
    return weights._replace(groups=Groups(integers[order], scales[order], minima, is_4_bit))


def product_of(states: ov.Output, weights: Weights, sums: Callable[[int], ov.Output]) -> tuple[ov.Node, ov.Output]:
    """The product of states [..., columns] with the transposed matrix: the node of the large product, and the result.
    `sums` gives the sums of this many neighbouring states, [..., groups]."""
    groups = weights.groups
    if groups is None or groups.minima is None:
        product = opset13.matmul(states, matrix_of(weights), False, True)
        return product, product.output(0)
    without = weights._replace(groups=groups._replace(minima=None))
    product = opset13.matmul(states, matrix_of(without), False, True)
    minima = opset13.constant(np.ascontiguousarray(groups.minima[..., 0]))
    of_minima = opset13.matmul(sums(groups.integers.shape[2]), opset13.convert(minima, "f32"), False, True)
    return product, opset13.add(product, of_minima).output(0)


def matrix_of(weights: Weights) -> ov.Output:
    """A node that gives the whole matrix in f32, for products. Minima become zero points in f32."""
    if weights.groups is None:
        return _converted_floats(weights)
    integers, scales, minima, is_4_bit = weights.groups
    if minima is not None:
        integers, scales, points = _with_zero_points(weights.groups)
    stored = _constant(_packed(integers), integers.shape, ov.Type.i4) if is_4_bit else opset13.constant(integers)
    values = opset13.convert(stored, "f16" if scales.dtype == np.float16 else "f32")
    if minima is not None:
        values = opset13.subtract(values, opset13.constant(points))
    values = opset13.multiply(values, opset13.constant(scales))
    matrix = opset13.reshape(values, opset13.constant(np.array(weights.shape)), False)
    return matrix.output(0) if scales.dtype == np.float32 else opset13.convert(matrix, "f32").output(0)


def rows_of(weights: Weights, indices: ov.Output) -> ov.Output:
    """A node that gives some rows of the matrix in f32: [..., columns] for indices [...]. Only these are converted."""
    axis = opset13.constant(np.int64(0))
    if weights.groups is None:
        return opset13.gather(_converted_floats(weights), indices, axis).output(0)
    integers, scales, minima, _is_4_bit = weights.groups
    values = opset13.convert(opset13.gather(opset13.constant(integers), indices, axis), "f32")
    values = opset13.multiply(values, _gathered(scales, indices, axis))
    if minima is not None:
        values = opset13.add(values, _gathered(minima, indices, axis))
    shape = opset13.constant(np.array([0, 0, weights.shape[1]]))
    return opset13.reshape(values, shape, True).output(0)


def _with_zero_points(groups: Groups) -> tuple[_Array, _Array, _Array]:
    """Integers, scales and zero points in f32 of groups with minima. If the scale is negligible beside the minimum, the
    whole group becomes one number."""
    scales = groups.scales.astype(np.float32)
    minima = np.asarray(groups.minima, np.float32)
    with np.errstate(divide="ignore", invalid="ignore"):
        points = -minima / scales
    is_flat = ~(np.abs(points) < _LARGEST_ZERO_POINT)
    integers = np.where(is_flat, np.int8(0), groups.integers)
    return integers, np.where(is_flat, 1, scales), np.where(is_flat, -minima, points)


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
    flat = integers.reshape(-1).view(np.uint8)
    packed: _Array = (flat[0::2] & 15) | (flat[1::2] << 4)
    return packed


def _by_row(groups: Groups, rows: int) -> Groups:
    integers = groups.integers.reshape(rows, -1, groups.integers.shape[-1])
    minima = None if groups.minima is None else groups.minima.reshape(rows, -1, 1)
    return Groups(integers, groups.scales.reshape(rows, -1, 1), minima, groups.is_4_bit)


def _centred(integers: _Array, middle: int) -> _Array:
    """Unsigned integers as i8, shifted so that `middle` becomes 0."""
    return integers.astype(np.int8) - np.int8(middle)


def _with_minimum(integers: _Array, scales: _Array, minima: _Array, *, is_4_bit: bool) -> Groups:
    """Weights of the form `scale * q + minimum`, with unsigned q; scales and minima are f32 [groups, 1]."""
    middle = 8 if is_4_bit else 16
    return Groups(_centred(integers, middle), scales, minima + middle * scales, is_4_bit)


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
    return Groups(_centred(_nibbles(blocks[:, 2:]), 8), _stored_half(blocks[:, :2]), is_4_bit=True)


def _q4_1(blocks: _Array) -> Groups:
    return _with_minimum(_nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4]), is_4_bit=True)


def _q5_0(blocks: _Array) -> Groups:
    integers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return Groups(_centred(integers, 16), _stored_half(blocks[:, :2]))


def _q5_1(blocks: _Array) -> Groups:
    integers = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _with_minimum(integers, _half(blocks[:, :2]), _half(blocks[:, 2:4]), is_4_bit=False)


def _q8_0(blocks: _Array) -> Groups:
    return Groups(np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _stored_half(blocks[:, :2]))


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
    integers = _centred(low.reshape(-1, 256) | (high.reshape(-1, 256) << 4), 32)
    scales = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8).astype(np.float32) * _half(blocks[:, 208:])
    return Groups(integers.reshape(-1, 16), scales.reshape(-1, 1))


def _q3_k(blocks: _Array) -> Groups:
    low = (blocks[:, 32:96].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)) & 3
    high = (blocks[:, :32].reshape(-1, 1, 32) >> np.arange(8, dtype=np.uint8).reshape(1, 8, 1)) & 1
    integers = _centred(low.reshape(-1, 256) | (high.reshape(-1, 256) << 2), 4)
    of_groups = blocks[:, 96:104].reshape(-1, 1, 8) >> np.array([0, 4], np.uint8).reshape(1, 2, 1)
    highest = blocks[:, 104:108].reshape(-1, 1, 4) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 4, 1)
    scales = _centred((of_groups.reshape(-1, 16) & 15) | ((highest.reshape(-1, 16) & 3) << 4), 32)
    scales = scales.astype(np.float32) * _half(blocks[:, 108:])
    return Groups(integers.reshape(-1, 16), scales.reshape(-1, 1), is_4_bit=True)


def _q2_k(blocks: _Array) -> Groups:
    integers = (blocks[:, 16:80].reshape(-1, 2, 1, 32) >> np.array([0, 2, 4, 6], np.uint8).reshape(1, 1, 4, 1)) & 3
    scales = (blocks[:, :16] & 15).astype(np.float32) * _half(blocks[:, 80:82])
    minima = (blocks[:, :16] >> 4).astype(np.float32) * -_half(blocks[:, 82:84])
    return Groups(integers.reshape(-1, 16).view(np.int8), scales.reshape(-1, 1), minima.reshape(-1, 1), is_4_bit=True)


def _of_codes(table: Sequence[int], raw: _Array) -> _Array:
    """The integers for which the halves of bytes stand, 16 bytes a group: [groups, 32]."""
    found: _Array = np.array(table, np.int8)[_nibbles(raw.reshape(-1, 16))]
    return found


def _iq4_nl(blocks: _Array) -> Groups:
    return Groups(_of_codes(IQ4_NL.kvalues, blocks[:, 2:]), _stored_half(blocks[:, :2]))


def _iq4_xs(blocks: _Array) -> Groups:
    low = blocks[:, 4:8].reshape(-1, 4, 1) >> np.array([0, 4], np.uint8)
    high = np.ascontiguousarray(blocks[:, 2:4]).view(np.uint16) >> np.arange(0, 16, 2, dtype=np.uint16)
    scales = _centred((low.reshape(-1, 8) & 15) | ((high & 3) << 4).astype(np.uint8), 32)
    scales = scales.astype(np.float32) * _half(blocks[:, :2])
    return Groups(_of_codes(IQ4_NL.kvalues, blocks[:, 8:]), scales.reshape(-1, 1))


def _mxfp4(blocks: _Array) -> Groups:
    scales = MXFP4.e8m0_to_fp32_half(blocks[:, :1])
    return Groups(_of_codes(MXFP4.kvalues, blocks[:, 1:]), scales)


def _to_8_bits(kind: Type, data: _Array) -> Groups:
    """Quantise types whose groups are unknown here to 8 bits, with a scale for 32 neighbours. The error is at most a
    254th of the largest."""
    values = dequantize(data, kind).reshape(-1, 32)
    scales = (np.abs(values).max(axis=1, keepdims=True) / 127).astype(np.float32)
    integers = np.rint(values / np.where(scales, scales, 1)).astype(np.int8)
    return Groups(integers, scales)


_READERS: dict[Type, Callable[[_Array], Groups]] = {
    Type.Q4_0: _q4_0,
    Type.Q4_1: _q4_1,
    Type.Q5_0: _q5_0,
    Type.Q5_1: _q5_1,
    Type.Q8_0: _q8_0,
    Type.Q4_K: _q4_k,
    Type.Q5_K: _q5_k,
    Type.Q6_K: _q6_k,
    Type.Q3_K: _q3_k,
    Type.Q2_K: _q2_k,
    Type.IQ4_NL: _iq4_nl,
    Type.IQ4_XS: _iq4_xs,
    Type.MXFP4: _mxfp4,
}


class Matrices(Mapping[str, Weights]):
    """The matrices by name. A matrix is read at each request and not kept: the graph has a copy."""

    def __init__(self, tensors: Mapping[str, ReaderTensor]) -> None:
        self._tensors = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) == 2}
        self._of_experts = {name: tensor for name, tensor in tensors.items() if len(tensor.shape) == 3}

    def __getitem__(self, name: str) -> Weights:
        tensor = self._tensors[name]
        return read_weights(tensor.tensor_type, tensor.data)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def num_experts(self, name: str) -> int:
        """How many experts have a matrix in this tensor."""
        return len(self._of_experts[name].data)

    def experts(self, name: str) -> Iterator[Weights]:
        """The matrices of the experts of a layer, which the file has as one tensor."""
        tensor = self._of_experts[name]
        return (read_weights(tensor.tensor_type, data) for data in tensor.data)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def vectors_of(tensors: Mapping[str, ReaderTensor]) -> dict[str, npt.NDArray[Any]]:
    """Norms, biases and factors by name, in f32."""
    return {
        name: dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        for name, tensor in tensors.items()
        if len(tensor.shape) == 1
    }
