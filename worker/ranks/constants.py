"""Cuts constant graphs, such as compressed weights with their scales and zero points, along an axis. Nothing is
decompressed.

A part that is contiguous in memory stays where it is: of a mapped file, only its pages are read. Other parts are
copied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.worker.config import ConfigurationError
from headrace.worker.ranks.owners import Share, reshaped
from headrace.worker.weights.file_memory import FileMemory

_Positions = npt.NDArray[np.int64]
_Bytes = npt.NDArray[np.uint8]
_ELEMENTWISE = {
    "Subtract": opset13.subtract,
    "Multiply": opset13.multiply,
    "Add": opset13.add,
    "Divide": opset13.divide,
}
# Groups of weights that have to be split become no smaller than this.
LEAST_GROUP = 16


class ConstantCutter:
    """Cuts the constants of one rank. It must live as long as the model that uses the constants, because some are
    views."""

    def __init__(self, memory: FileMemory) -> None:
        self._memory = memory
        self._made: dict[tuple[str, int, bytes], ov.Output] = {}
        self._sources: list[ov.Node] = []

    def cut(self, output: ov.Output, axis: int, positions: _Positions) -> ov.Output:
        """The `positions` along an axis of a constant value, in ascending order. Along an axis of length 1 the value
        stays as it is. ConfigurationError if an unknown operation computes it."""
        length = int(output.get_shape()[axis])
        if length == 1 or len(positions) == length:
            return output
        key = (output.get_node().get_name(), axis, positions.tobytes())
        if key not in self._made:
            self._made[key] = self._cut(output, axis, positions)
        return self._made[key]

    def _cut(self, output: ov.Output, axis: int, positions: _Positions) -> ov.Output:
        node = output.get_node()
        kind = node.get_type_name()
        if kind == "Constant":
            return self._part(node, axis, positions).output(0)
        sources = node.input_values()
        if kind == "Convert":
            made = opset13.convert(self.cut(sources[0], axis, positions), output.get_element_type().get_type_name())
        elif kind in _ELEMENTWISE:
            rank = len(output.get_shape())
            made = _ELEMENTWISE[kind](*(self._operand(value, axis - rank, positions) for value in sources))
        elif kind == "Transpose":
            order = np.asarray(sources[1].get_node().data).reshape(-1)
            made = opset13.transpose(self.cut(sources[0], int(order[axis]), positions), sources[1])
        elif kind == "Reshape":
            made = self._reshape(output, axis, positions)
        else:
            raise ConfigurationError(
                f"the weights of this model are computed by {kind} {node.get_friendly_name()!r}, which cannot be "
                "divided among ranks; serve it whole"
            )
        made.set_friendly_name(node.get_friendly_name())
        return made.output(0)

    def _operand(self, value: ov.Output, from_right: int, positions: _Positions) -> ov.Output:
        axis = len(value.get_shape()) + from_right
        return value if axis < 0 else self.cut(value, axis, positions)

    def _reshape(self, output: ov.Output, axis: int, positions: _Positions) -> ov.Node:
        source = output.get_node().input_value(0)
        target = list(output.get_shape())
        owners = np.zeros(target[axis], np.int64)
        owners[positions] = 1
        share = reshaped(Share(axis, owners), target, list(source.get_shape()))
        if share is None:
            source, share = self._finer(source, Share(axis, owners), target)
        target[axis] = len(positions)
        part = self.cut(source, share.axis, np.flatnonzero(share.owners))
        return opset13.reshape(part, opset13.constant(np.array(target, np.int64)), False)

    def _finer(self, source: ov.Output, share: Share, target: Sequence[int]) -> tuple[ov.Output, Share]:
        """Weights in smaller groups, so that the part has whole ones. The scale of a group becomes that of each."""
        size = int(source.get_shape()[-1])
        finer = _finest(size, share)
        if finer >= LEAST_GROUP and len(source.get_shape()) > 1:
            made = self._with_groups(source, size // finer)
            found = None if made is None else reshaped(share, target, list(made.get_shape()))
            if made is not None and found is not None:
                return made, found
        raise ConfigurationError(
            f"groups of {size} weights of {source.get_node().get_friendly_name()!r} would be split among ranks; divide "
            "the model among another number of ranks, or serve it whole"
        )

    def _with_groups(self, output: ov.Output, factor: int) -> ov.Output | None:
        """Constants [..., groups, size] as [..., factor * groups, size / factor], or [..., groups, 1] with each
        repeated."""
        node, shape = output.get_node(), list(output.get_shape())
        kind = node.get_type_name()
        if kind == "Convert":
            made = self._with_groups(node.input_value(0), factor)
            name = output.get_element_type().get_type_name()
            return None if made is None else opset13.convert(made, name).output(0)
        if kind in _ELEMENTWISE:
            parts = [self._with_groups(value, factor) for value in node.input_values()]
            return None if None in parts else _ELEMENTWISE[kind](*parts).output(0)
        if kind != "Constant":
            return None
        if len(shape) < 2 or shape[-2:] == [1, 1]:
            return output
        if shape[-1] > 1:
            longer = [*shape[:-2], shape[-2] * factor, shape[-1] // factor]
            self._sources.append(node)
            return _constant(_bytes_of(node), longer, output.get_element_type()).output(0)
        return self._part(node, len(shape) - 2, np.repeat(np.arange(shape[-2]), factor)).output(0)

    def _part(self, constant: ov.Node, axis: int, positions: _Positions) -> ov.Node:
        kind, shape = constant.get_element_type(), list(constant.get_output_shape(0))
        outer, inner = math.prod(shape[:axis]), math.prod(shape[axis + 1 :])
        part = [*shape[:axis], len(positions), *shape[axis + 1 :]]
        if inner * kind.bitwidth % 8:
            numbers = _halves_of(constant).reshape(outer, shape[axis], inner)[:, positions]
            return _constant(self._kept(_packed(numbers.reshape(-1))), part, kind)
        stored = _bytes_of(constant).reshape(outer, shape[axis], inner * kind.bitwidth // 8)
        first, end = int(positions[0]), int(positions[-1]) + 1
        is_range = end - first == len(positions) and bool((np.diff(positions) == 1).all())
        if is_range and outer == 1:
            self._sources.append(constant)
            return _constant(stored[0, first:end].reshape(-1), part, kind)
        made = self._memory.array(outer * len(positions) * stored.shape[2])
        taken = made.reshape(outer, len(positions), stored.shape[2])
        if is_range:
            taken[...] = stored[:, first:end]
        else:
            np.take(stored, positions, axis=1, out=taken)
        return _constant(made, part, kind)

    def _kept(self, values: _Bytes) -> _Bytes:
        made = self._memory.array(values.size)
        made[:] = values
        return made


def keeps_groups(weights: ov.Output, share: Share, least: int = 0) -> bool:
    """Whether constant weights can be divided without splitting a group that has its own scale. With `least`, each part
    must also have at least this many weights."""
    node = weights.get_node()
    kind = node.get_type_name()
    if weights.get_shape()[share.axis] == 1 or kind == "Constant":
        return True
    if kind == "Reshape":
        source = node.input_value(0)
        found = reshaped(share, list(weights.get_shape()), list(source.get_shape()))
        if found is None:
            return bool(least) and _finest(int(source.get_shape()[-1]), share) >= least
        return keeps_groups(source, found, least)
    if kind == "Transpose":
        order = np.asarray(node.input_value(1).get_node().data).reshape(-1)
        return keeps_groups(node.input_value(0), Share(int(order[share.axis]), share.owners), least)
    rank = len(weights.get_shape())
    return all(keeps_groups(value, share, least) for value in node.input_values() if len(value.get_shape()) == rank)


def _finest(size: int, share: Share) -> int:
    """The size of groups, at most `size`, that no border of a share splits."""
    borders = np.flatnonzero(np.diff(share.owners)) + 1
    return math.gcd(size, *borders.tolist())


def _bytes_of(constant: ov.Node) -> _Bytes:
    stored: _Bytes = np.asarray(constant.data).reshape(-1).view(np.uint8)
    return stored


def _halves_of(constant: ov.Node) -> _Bytes:
    """4-bit numbers as bytes."""
    stored = _bytes_of(constant)
    pairs = np.stack((stored & 15, stored >> 4), axis=1).reshape(-1)
    return pairs[: math.prod(constant.get_output_shape(0))]


def _packed(numbers: _Bytes) -> _Bytes:
    padded = np.append(numbers, np.zeros(numbers.size % 2, np.uint8)).reshape(-1, 2)
    packed: _Bytes = padded[:, 0] | padded[:, 1] << np.uint8(4)
    return packed


def _constant(stored: _Bytes, shape: Sequence[int], kind: ov.Type) -> ov.Node:
    return opset13.constant(ov.Tensor(stored, ov.Shape(list(shape)), kind), shared_memory=True)
