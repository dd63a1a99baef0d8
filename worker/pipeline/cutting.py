"""Cuts a model with PagedAttention between its layers into the graph of one stage of a pipeline.

    stage 0        tokens -> embeddings -> layers 0 ..                            hidden states of all tokens ->
    stages between       -> hidden states -> layers                               hidden states of all tokens ->
    last stage           -> hidden states -> layers .. end, for the sampled rows  hidden states of these rows ->
    stage 0        hidden states of rows -> product with the vocabulary -> logits

A cut is a value through which alone everything before an attention reaches what follows. It is found in the graph, so
that no architecture need be known. What depends on no attention, such as rotations of positions, every stage computes
from the inputs of the step. Stage 0 has the vocabulary's product because it samples: hidden states of a row are a
hundredth of its logits, and embeddings and that product often share their weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import openvino as ov
from openvino import opset13

from headrace.worker.config import ConfigurationError
from headrace.worker.model.fused_projections import is_constant
from headrace.worker.model.runner import HIDDEN_STATES, Layers, Part
from headrace.worker.model.window_tables import attentions
from headrace.worker.pipeline.ends import StatesEnd

Key = tuple[str, int]


class Cuts(NamedTuple):
    """The places where a model can be cut. `values[i]` is the value that layer i + 1 and all later layers receive from
    the layers before. `costs` has the number of weights in the products of each layer. `head_cost` is half the number
    of weights of the vocabulary's product, because prompt steps do not need that product."""

    values: Sequence[ov.Output]
    costs: Sequence[int]
    head_cost: float

    @property
    def num_layers(self) -> int:
        """The number of layers with an attention."""
        return len(self.costs)


def find_cuts(model: ov.Model) -> Cuts:
    """Find where a model can be cut. Changes nothing. ConfigurationError if it cannot be cut between all layers."""
    if any(name.startswith("la.") for port in model.inputs for name in port.get_names()):
        raise _refused("it has recurrent layers, whose states would have to be divided too")
    nodes = list(model.get_ordered_ops())
    places = {node.get_name(): place for place, node in enumerate(nodes)}
    starts = [places[node.get_name()] for node in attentions(model)]
    values = _values_between(nodes, places, starts)
    head = _head_product(model)
    ends = [*(places[value.get_node().get_name()] for value in values), len(nodes)]
    costs = [0] * len(starts)
    layer = 0
    for place, node in enumerate(nodes):
        while place > ends[layer]:
            layer += 1
        if node.get_name() != head.get_name():
            costs[layer] += _num_weights(node)
    return Cuts(values, costs, _num_weights(head) / 2)


def _values_between(nodes: Sequence[ov.Node], places: dict[str, int], starts: Sequence[int]) -> list[ov.Output]:
    """For each attention but the first, the last value before it through which alone the attentions before it reach
    what follows."""
    found: list[ov.Output] = []
    candidate: ov.Output | None = None
    # Values that depend on an attention and are still needed, with the place of their last use.
    live: dict[Key, tuple[int, ov.Output]] = {}
    depends: set[str] = set()
    numbers = {start: number for number, start in enumerate(starts)}
    for place, node in enumerate(nodes):
        number = numbers.get(place)
        if number:
            if candidate is None:
                raise _refused(f"layer {number} reads more than the hidden states of the layer before it")
            found.append(candidate)
        name = node.get_name()
        if number is not None:
            candidate = None
        elif not any(value.get_node().get_name() in depends for value in node.input_values()):
            continue
        depends.add(name)
        for output in node.outputs():
            uses = [places[user.get_node().get_name()] for user in output.get_target_inputs()]
            live[name, output.get_index()] = (max(uses, default=-1), output)
        live = {key: entry for key, entry in live.items() if entry[0] > place}
        if len(live) == 1:
            ((_, only),) = live.values()
            candidate = only if _is_of_tokens(only) else candidate
    return found


def _is_of_tokens(value: ov.Output) -> bool:
    """Whether a value is f32 and has the tokens along its first axis."""
    shape = value.get_partial_shape()
    if shape.rank.is_dynamic or len(shape) < 2 or shape[0].is_static or shape[len(shape) - 1].is_dynamic:
        return False
    return bool(value.get_element_type() == ov.Type.f32)


def divide(costs: Sequence[float], head_cost: float, speeds: Sequence[float]) -> list[int]:
    """The first layer of each stage but the first, so that the slowest stage is as fast as possible. Each stage has at
    least one layer; the first also has the head. `speeds` are those of the stages. ConfigurationError if there are more
    stages than layers."""
    num_layers, num_stages = len(costs), len(speeds)
    if num_stages > num_layers:
        raise _refused(f"it has {num_layers} layers for {num_stages} stages")
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # For each number of layers, the best time of the slowest of the stages so far, and where the last of them begins.
    best = [(sums[end] + head_cost) / speeds[0] for end in range(num_layers + 1)]
    begins: list[list[int]] = []
    for stage in range(1, num_stages):
        found, first = [float("inf")] * (num_layers + 1), [0] * (num_layers + 1)
        for end in range(stage + 1, num_layers + 1):
            found[end], first[end] = min(
                (max(best[begin], (sums[end] - sums[begin]) / speeds[stage]), begin) for begin in range(stage, end)
            )
        best = found
        begins.append(first)
    chosen: list[int] = []
    end = num_layers
    for first in reversed(begins):
        end = first[end]
        chosen.append(end)
    return chosen[::-1]


def cut_stage(model: ov.Model, cuts: Cuts, layers: Layers) -> Part:
    """Reduce a whole model to the layers of one stage."""
    bfloat16 = layers.bfloat16_states
    head = take_head(model, bfloat16_states=bfloat16)
    end_layer = cuts.num_layers if layers.end is None else layers.end
    keep_layers(model, cuts, layers.first, end_layer, bfloat16_states=bfloat16)
    end = StatesEnd(of_rows=layers.end is None, bfloat16=bfloat16)
    return Part(None, layers=layers, end=end, head=head if layers.first == 0 else None)


def take_head(model: ov.Model, *, bfloat16_states: bool = False) -> ov.Model:
    """Remove the vocabulary's product, and the operations after it, from a whole model. The remaining model returns the
    hidden states of all tokens. Returns the removed part as a model from hidden states to logits. With
    `bfloat16_states`, its hidden states are bfloat16."""
    product = _head_product(model)
    (result,) = model.get_results()
    states = product.input_value(0)
    parameter, given = _input_like(states, bfloat16_states)
    product.input(0).replace_source_output(given)
    model.remove_result(result)
    model.add_results([opset13.result(states)])
    _remove_unused(model)
    return ov.Model([result], [parameter], "head")


def keep_layers(model: ov.Model, cuts: Cuts, first: int, end: int, *, bfloat16_states: bool = False) -> None:
    """Remove all layers from a model without head, except those from `first` up to but not including `end`. With
    `bfloat16_states`, the hidden states that become an input are bfloat16."""
    if end < cuts.num_layers:
        (result,) = model.get_results()
        model.remove_result(result)
        model.add_results([opset13.result(cuts.values[end - 1])])
    if first:
        value = cuts.values[first - 1]
        users = value.get_target_inputs()
        parameter, given = _input_like(value, bfloat16_states)
        for port in users:
            port.replace_source_output(given)
        model.add_parameters([parameter])
    _remove_unused(model)
    model.validate_nodes_and_infer_types()


def _input_like(value: ov.Output, bfloat16: bool) -> tuple[ov.Node, ov.Output]:
    """An input for hidden states, and what takes the place of `value` in the graph."""
    kind = value.get_element_type()
    parameter = opset13.parameter(value.get_partial_shape(), ov.Type.bf16 if bfloat16 else kind, HIDDEN_STATES)
    parameter.output(0).get_tensor().set_names({HIDDEN_STATES})
    given = opset13.convert(parameter, kind) if bfloat16 else parameter
    return parameter, given.output(0)


def _remove_unused(model: ov.Model) -> None:
    """Remove the inputs that no result depends on."""
    reached: set[str] = set()
    waiting = list(model.get_results())
    while waiting:
        node = waiting.pop()
        if node.get_name() not in reached:
            reached.add(node.get_name())
            waiting += [value.get_node() for value in node.input_values()]
    for parameter in model.get_parameters():
        if parameter.get_name() not in reached:
            model.remove_parameter(parameter)


def _head_product(model: ov.Model) -> ov.Node:
    """The last product of a model."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        computed = [value for value in node.input_values() if not is_constant(value)]
        if not computed:
            raise _refused("its end is of an unknown form")
        node = computed[0].get_node()
    return node


def _num_weights(product: ov.Node) -> int:
    """The number of the weights that a product reads; 0 for other operations."""
    if "MatMul" not in product.get_type_name():
        return 0
    # Of the constants of an input, the largest has the weights, and the others are their scales.
    return sum(
        max(math.prod(node.get_output_shape(0)) for node in _constants_of(value))
        for value in product.input_values()
        if is_constant(value)
    )


def _constants_of(value: ov.Output) -> Iterator[ov.Node]:
    node = value.get_node()
    if node.get_type_name() == "Constant":
        yield node
    for source in node.input_values():
        yield from _constants_of(source)


def _refused(why: str) -> ConfigurationError:
    return ConfigurationError(f"the model cannot be divided into the stages of a pipeline: {why}; serve it whole")
