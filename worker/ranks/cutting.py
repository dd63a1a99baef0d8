"""Reduces a model to the part that one rank computes, as `division` says.

Weights are cut as they are stored. What every rank has, such as norms and embeddings, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.worker.model.fused_projections import is_constant
from headrace.worker.model.rank_sum import Add, RankSum
from headrace.worker.ranks.constants import ConstantCutter
from headrace.worker.ranks.division import (
    BIASES,
    ELEMENTWISE,
    KERNELS,
    RECURRENT,
    SELECTIONS,
    SHORT_CONVOLUTION,
    Division,
    axes_of_weights,
    key_of,
    selected,
)
from headrace.worker.ranks.owners import Owners, positions_of
from headrace.worker.weights.file_memory import FileMemory

_ALIBI_SLOPES = 11
_SINKS = 20


def cut(model: ov.Model, division: Division, rank: int, memory: FileMemory, add: Add) -> ConstantCutter:
    """Reduce the model to the part of a rank: it returns the logits of `division.vocabulary`, and calls `add` for each
    sum in `division.sums`. The model uses memory of the returned object. ConfigurationError if some weights cannot be
    cut."""
    made = _Cut(division, rank, ConstantCutter(memory))
    # Sums come last, because operations may be replaced before.
    nodes = list(model.get_ordered_ops())
    summed = {key: number for number, key in enumerate(division.sums)}
    outputs = {key_of(output): output for node in nodes for output in node.outputs() if key_of(output) in summed}
    for node in nodes:
        outputs |= {key: output for key, output in made.cut(node) if key in summed}
    for parameter in model.get_parameters():
        made.cut_table(parameter)
    for key, number in summed.items():
        _sum_up(outputs[key], number, add)
    model.validate_nodes_and_infer_types()
    return made.cutter


def _sum_up(output: ov.Output, number: int, add: Add) -> None:
    users = list(output.get_target_inputs())
    node = RankSum([output], number=number, add=add)
    node.set_friendly_name(f"{output.get_node().get_friendly_name()}/sum")
    for user in users:
        user.replace_source_output(node.output(0))


class _Cut:
    """Cuts each operation to one rank's part."""

    def __init__(self, division: Division, rank: int, cutter: ConstantCutter) -> None:
        self._division = division
        self._rank = rank
        self.cutter = cutter

    def cut(self, node: ov.Node) -> Iterator[tuple[tuple[str, int], ov.Output]]:
        """Change an operation in place. Yields the outputs that replace others, with the keys of the outputs that they
        replace."""
        kind, name = node.get_type_name(), node.get_name()
        if name in self._division.rows:
            self._cut_weights(node, 0)
        elif name in self._division.columns:
            self._cut_weights(node, 1)
        elif name in self._division.means:
            yield key_of(node.output(0)), self._cut_mean(node)
        elif kind in RECURRENT and name in self._division.heads:
            self._cut_recurrent(node)
        elif name in self._division.heads:
            self._cut_attention(node)
        elif not any(self._division.share_of(value) for value in [*node.outputs(), *node.input_values()]):
            return
        elif kind in ELEMENTWISE or kind == "Concat":
            self._cut_operands(node)
        elif kind == "Reshape":
            self._cut_pattern(node)
        elif kind == SHORT_CONVOLUTION:
            self._cut_convolution(node)
        elif kind in SELECTIONS:
            yield from self._cut_selection(node)

    def cut_table(self, parameter: ov.Node) -> None:
        """Give an input that is a table of states the rank's heads or channels only."""
        share = self._division.share_of(parameter.output(0))
        if share is not None:
            shape = parameter.get_partial_shape()
            shape[share.axis] = ov.Dimension(len(self._positions(share.owners)))
            parameter.set_partial_shape(shape)

    def _positions(self, owners: Owners) -> npt.NDArray[np.int64]:
        return positions_of(owners, self._rank)

    def _cut_weights(self, product: ov.Node, side: int) -> None:
        share = self._division.share_of(product.output(0) if side == 0 else product.input_value(0))
        assert share is not None
        axis = axes_of_weights(product)[side]
        product.input(1).replace_source_output(
            self.cutter.cut(product.input_value(1), axis, self._positions(share.owners))
        )

    def _cut_mean(self, mean: ov.Node) -> ov.Output:
        """The rank's part of a mean over a divided axis."""
        length = self._division.means[mean.get_name()]
        keeps = bool(mean.get_attributes()["keep_dims"])
        total = opset13.reduce_sum(mean.input_value(0), mean.input_value(1), keeps)
        part = opset13.multiply(total, opset13.constant(np.float32(1 / length))).output(0)
        mean.output(0).replace(part)
        return part

    def _cut_attention(self, attention: ov.Node) -> None:
        name = attention.get_name()
        queries, keys = (self._positions(owners[name]) for owners in (self._division.heads, self._division.key_heads))
        for which in ("num_k_heads", "num_v_heads"):
            attention.rt_info[which] = len(keys)
        # Numbers for each query head.
        for index, axis in ((_ALIBI_SLOPES, 0), (_SINKS, 1)):
            if index >= attention.get_input_size():
                continue
            value = attention.input_value(index)
            shape = value.get_partial_shape()
            if shape.is_static and len(shape) > axis and shape[axis].get_length() > 0:
                attention.input(index).replace_source_output(self.cutter.cut(value, axis, queries))

    def _cut_recurrent(self, node: ov.Node) -> None:
        """Cut the constants of an operator of recurrent layers, such as the decay of each head."""
        heads = self._positions(self._division.heads[node.get_name()])
        for port in RECURRENT[node.get_type_name()].own:
            self._cut_constant(node.input(port), heads)

    def _cut_convolution(self, node: ov.Node) -> None:
        share = self._division.share_of(node.output(0))
        assert share is not None
        for port in (KERNELS, BIASES):
            self._cut_constant(node.input(port), self._positions(share.owners))

    def _cut_constant(self, port: ov.Input, positions: npt.NDArray[np.int64]) -> None:
        """Cut an input along its first axis if it is constant and not empty."""
        value = port.get_source_output()
        if is_constant(value) and value.get_shape()[0] > 0:
            port.replace_source_output(self.cutter.cut(value, 0, positions))

    def _cut_operands(self, node: ov.Node) -> None:
        """Cut the constants that an operation combines with divided values."""
        ports = [node.output(0), *node.input_values()]
        share, rank = next(
            (share, len(port.get_partial_shape()))
            for port in ports
            if (share := self._division.share_of(port)) is not None
        )
        for port in node.inputs():
            value = port.get_source_output()
            axis = share.axis - rank + len(value.get_partial_shape())
            if axis >= 0 and is_constant(value):
                port.replace_source_output(self.cutter.cut(value, axis, self._positions(share.owners)))

    def _cut_pattern(self, reshape: ov.Node) -> None:
        """Write the rank's own length into the pattern of a Reshape, unless it follows from the other lengths."""
        share = self._division.share_of(reshape.output(0))
        if share is None:
            return
        count = len(self._positions(share.owners))
        pattern = reshape.input_value(1)
        port, place = reshape.input(1), share.axis
        if pattern.get_node().get_type_name() == "Concat":
            for part in pattern.get_node().inputs():
                length = part.get_source_output().get_shape()[0]
                if place < length:
                    port, pattern = part, part.get_source_output()
                    break
                place -= length
        if not is_constant(pattern):
            return
        numbers = np.asarray(_folded(pattern)).reshape(-1).astype(np.int64)
        if numbers[place] > 0:
            numbers[place] = count
            kind = pattern.get_element_type().get_type_name()
            port.replace_source_output(opset13.convert(opset13.constant(numbers), kind).output(0))

    def _cut_selection(self, node: ov.Node) -> Iterator[tuple[tuple[str, int], ov.Output]]:
        source = node.input_value(0)
        share = self._division.share_of(source)
        axis, parts = selected(node)
        if share is None or axis != share.axis:
            return
        owned = self._positions(share.owners)
        # The place of each position in what the rank has.
        found = [np.searchsorted(owned, part[np.isin(part, owned)]) for part in parts]
        where = opset13.constant(np.int64(axis))
        if node.get_type_name() in ("VariadicSplit", "Split"):
            # The source still has its old shape, which the new lengths do not fit.
            later = opset13.parameter([-1] * len(source.get_partial_shape()), source.get_element_type())
            made = opset13.variadic_split(later, where, opset13.constant(np.array([part.size for part in found])))
            made.input(0).replace_source_output(source)
            outputs = made.outputs()
        else:
            outputs = [_taken(source, found[0], axis)]
        outputs[0].get_node().set_friendly_name(node.get_friendly_name())
        for old, new in zip(node.outputs(), outputs, strict=True):
            key = key_of(old)
            old.replace(new)
            yield key, new


def _taken(source: ov.Output, positions: npt.NDArray[np.int64], axis: int) -> ov.Output:
    steps = np.diff(positions)
    if positions.size and (steps == 1).all():
        start, stop, step, axes = (
            opset13.constant(np.array([number], np.int64)) for number in (positions[0], positions[-1] + 1, 1, axis)
        )
        return opset13.slice(source, start, stop, step, axes).output(0)
    return opset13.gather(source, opset13.constant(positions), opset13.constant(np.int64(axis))).output(0)


def _folded(output: ov.Output) -> npt.NDArray[np.generic]:
    """The value of a small constant graph."""
    node = output.get_node()
    if node.get_type_name() == "Constant":
        return np.asarray(node.data)
    model = ov.Model([opset13.result(output)], [])
    found = [ov.Tensor(model.output(0).element_type, model.output(0).shape)]
    model.evaluate(found, [])
    return np.asarray(found[0].data)
