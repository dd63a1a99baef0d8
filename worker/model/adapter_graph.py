"""Adds LoRA adapters to a model's graph, as inputs, so that adapters come and go without compiling.

An adapter changes a linear layer's `y = x W` to `y + (x A) B`, with A `[inputs, rank]` and B `[rank, outputs]`.
Adapters are in slots, and each token of a step belongs to one slot or to none. The tokens of a slot are gathered, so
each token is multiplied only with its own adapter:

    x [tokens, inputs] --gather by `adapter_rows`--> [slots, rows, inputs]
                       --multiply with A [slots, inputs, rank], then with B [slots, outputs, rank]-->
                       --gather by `adapter_places`--> [tokens, outputs], added to y

`adapter_rows` `[slots, rows]` has the tokens of each slot, and any token where a slot has fewer. `adapter_places`
`[tokens]` says where each token's result is; for a token without an adapter it lies beyond the end, where a gather
gives zeros. Slots, rows and ranks are dynamic. Layers of the same states share the gathered rows and one A, whose ranks
are those of all of them, side by side. docs/decisions/adapters.md#one-batch has the alternatives and measurements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.model.adapted_linears import source_of
from headrace.worker.model.adapter_memory import UNDIVIDED, AdaptedGroup, AdapterPart, Linear
from headrace.worker.model.fused_projections import NAME_SEPARATOR, bias_of

ROWS = "adapter_rows"
PLACES = "adapter_places"
_FIRST_AXIS = 0


def add_adapters(
    model: ov.Model, linears: Sequence[Linear], *, is_bfloat16: bool, part: AdapterPart = UNDIVIDED[0]
) -> list[AdaptedGroup]:
    """Give the graph inputs for adapters of these layers, of which it has this `part`. Their products may be fused. A
    and B are bfloat16 if the model computes in it, else float32. If a rank has only some of the inputs of a layer, the
    adapter's product is a partial sum like that of the layer, and the following sum over the ranks adds up both."""
    nodes = {node.get_friendly_name(): node for node in model.get_ordered_ops()}
    ends = _ends(nodes)
    kind = ov.Type.bf16 if is_bfloat16 else ov.Type.f32
    rows = _parameter(model, ROWS, [-1, -1], ov.Type.i32)
    places = _parameter(model, PLACES, [-1], ov.Type.i32)
    of_source: dict[tuple[str, int], list[Linear]] = {}
    for linear in linears:
        of_source.setdefault(source_of(ends[linear.product].product), []).append(linear)
    groups = []
    for number, members in enumerate(of_source.values()):
        group = AdaptedGroup(members, f"adapter_a.{number}", [f"adapter_b.{number}.{i}" for i in range(len(members))])
        lengths = [part.cut_of(linear).of_linear(linear) for linear in members]
        _add_group(model, group, lengths, [ends[linear.product] for linear in members], rows, places, kind)
        groups.append(group)
    model.validate_nodes_and_infer_types()
    return groups


class _End(NamedTuple):
    """A product, which may be fused, and the output that has the result of one linear layer."""

    product: ov.Node
    output: ov.Output


def _ends(nodes: dict[str, ov.Node]) -> dict[str, _End]:
    """For the name of each product, fused or not, the place of its result."""
    found = {}
    for name, node in nodes.items():
        if node.get_type_name() == "MatMul":
            bias = bias_of(node)
            found[name] = _End(node, (bias[0] if bias else node).output(0))
        if node.get_type_name() == "VariadicSplit" and NAME_SEPARATOR in name:
            product = node.input_value(0).get_node()
            if product.get_type_name() == "Add":
                product = product.input_value(0).get_node()
            for index, part in enumerate(name.split(NAME_SEPARATOR)):
                found[part] = _End(product, node.output(index))
    return found


def _add_group(
    model: ov.Model,
    group: AdaptedGroup,
    linears: Sequence[Linear],
    ends: Sequence[_End],
    rows: ov.Output,
    places: ov.Output,
    kind: ov.Type,
) -> None:
    """Add the inputs of a group, whose `linears` have the sizes that they have in this graph."""
    num_inputs = linears[0].num_inputs
    states = _as(ends[0].product.input_value(0), kind)
    gathered = opset13.reshape(
        opset13.gather(states, rows, opset13.constant(np.int64(_FIRST_AXIS))),
        opset13.constant(np.array([0, 0, num_inputs])),
        special_zero=True,
    )
    input_a = _parameter(model, group.input_a, [-1, num_inputs, -1], kind)
    reduced = opset13.matmul(gathered, input_a, False, False)
    if len(ends) > 1:
        parts = opset13.split(reduced, opset13.constant(np.int64(2)), len(ends)).outputs()
    else:
        parts = reduced.outputs()
    for linear, name, end, part in zip(linears, group.inputs_b, ends, parts, strict=True):
        input_b = _parameter(model, name, [-1, linear.num_outputs, -1], kind)
        result = opset13.matmul(part, input_b, False, True)
        is_flat = end.output.get_partial_shape().rank.get_length() == 2
        shape = [-1, linear.num_outputs] if is_flat else [-1, 1, linear.num_outputs]
        by_row = opset13.reshape(result, opset13.constant(np.array(shape)), special_zero=False)
        change = opset13.gather(by_row, places, opset13.constant(np.int64(_FIRST_AXIS)))
        targets = list(end.output.get_target_inputs())
        adapted = opset13.add(end.output, _as(change.output(0), ov.Type.f32))
        for target in targets:
            target.replace_source_output(adapted.output(0))


def _as(output: ov.Output, kind: ov.Type) -> ov.Output:
    return output if output.get_element_type() == kind else opset13.convert(output, kind.get_type_name()).output(0)


def _parameter(model: ov.Model, name: str, shape: Sequence[int], kind: ov.Type) -> ov.Output:
    parameter = opset13.parameter(list(shape), kind, name)
    parameter.output(0).get_tensor().set_names({name})
    model.add_parameters([parameter])
    return parameter.output(0)
