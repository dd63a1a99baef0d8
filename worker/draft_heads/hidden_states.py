"""Finds hidden states in a model's graph with PagedAttention.

The states before a layer are the input of the normalisation before its projections, and the layer's result is added to
them. The search goes backwards from the layer's attention, so names in the graph do not matter.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.config import ConfigurationError
from headrace.worker.model.fused_projections import is_constant, projection
from headrace.worker.model.window_tables import attentions

_QUERY = 0
_ELEMENTWISE = {"Convert", "Multiply", "Add", "Subtract", "Divide", "Reshape"}


def states_before(model: ov.Model, layer: int) -> ov.Output:
    """The hidden states of all tokens before a layer, `[tokens, 1, size]` or `[tokens, size]`. ConfigurationError if
    the graph has an unknown form."""
    paged = attentions(model)
    if not 0 <= layer < len(paged):
        raise ConfigurationError(
            f"the heads read the hidden states before layer {layer}, and the model has {len(paged)} layers; they "
            "are made for another model"
        )
    if layer == 0:
        return embeddings_of(model)
    product = projection(paged[layer].input_value(_QUERY))
    found = None if product is None else _sum_before(product)
    if found is None:
        raise _unknown_form(f"the hidden states before layer {layer}")
    return found


def embeddings_of(model: ov.Model) -> ov.Output:
    """The embeddings of all tokens, which the first layer reads."""
    tokens = model.input("input_ids")
    found = _table_reads(tokens)
    if found is None:
        raise _unknown_form("the embeddings of tokens")
    output = found
    while len(users := _users(output)) == 1 and users[0].get_type_name() in _ELEMENTWISE:
        output = users[0].output(0)
    return output


def last_states(model: ov.Model) -> ov.Input:
    """The input of the product that gives logits: the last hidden states of all tokens, before the end of the graph is
    replaced."""
    node = model.get_results()[0].input_value(0).get_node()
    while node.get_type_name() != "MatMul":
        found = [value for value in node.input_values() if not is_constant(value)]
        if not found:
            raise _unknown_form("the last hidden states")
        node = found[0].get_node()
    return node.input(0)


def compute_all(model: ov.Model) -> ov.Output:
    """Let the graph compute the last hidden states of all tokens, not only of the sampled ones. Returns these states,
    `[tokens, size]`."""
    port = last_states(model)
    states = port.get_source_output()
    size = width_of(states)
    flat = opset13.reshape(states, opset13.constant(np.array([-1, size])), False).output(0)
    # Behind this, sampled rows are selected: what comes before is computed for all tokens.
    again = [-1, *(1 for _ in states.get_partial_shape()[1:-1]), size]
    port.replace_source_output(opset13.reshape(flat, opset13.constant(np.array(again)), False).output(0))
    return flat


def width_of(states: ov.Output) -> int:
    """The number of values of a hidden state, which must be fixed in the graph."""
    return int(states.get_partial_shape()[-1].get_length())


def check_width(path: Path, wanted: int, found: int) -> None:
    """ConfigurationError if the heads in `path` are for hidden states of another size than that of the model."""
    if found != wanted:
        raise ConfigurationError(
            f"the heads in {path} are for a model with hidden states of size {wanted}, and this model's have {found}; "
            "name heads that were trained for this model"
        )


def _sum_before(product: ov.Node) -> ov.Output | None:
    """The nearest sum of two values of each token from which a product is computed: the residual connection."""
    width = width_of(product.input_value(0))
    seen = set()
    waiting = [product.input_value(0).get_node()]
    while waiting:
        node = waiting.pop(0)
        if node.get_friendly_name() in seen:
            continue
        seen.add(node.get_friendly_name())
        values = node.input_values()
        if node.get_type_name() == "Add" and not any(is_constant(value) for value in values):
            last = node.output(0).get_partial_shape()[-1]
            if last.is_static and last.get_length() == width:
                return node.output(0)
        if node.get_type_name() == "MatMul":
            return None
        waiting += [value.get_node() for value in values if not is_constant(value)]
    return None


def _table_reads(tokens: ov.Output) -> ov.Output | None:
    """The values that are read from a constant table by token ids. If scales are in a separate table, the first node
    that combines both."""
    waiting = [port.get_node() for port in tokens.get_target_inputs()]
    seen: set[str] = set()
    while waiting:
        node = waiting.pop(0)
        if node.get_friendly_name() in seen:
            continue
        seen.add(node.get_friendly_name())
        if node.get_type_name() == "Gather" and is_constant(node.input_value(0)):
            return node.output(0)
        if node.get_type_name() in {"Convert", "Unsqueeze", "Reshape"}:
            waiting += _users(node.output(0))
    return None


def _users(output: ov.Output) -> list[ov.Node]:
    """The nodes that use a value, except those that only read its shape."""
    users = {}
    for port in output.get_target_inputs():
        node = port.get_node()
        if node.get_type_name() != "ShapeOf":
            users[node.get_friendly_name()] = node
    return list(users.values())


def _unknown_form(what: str) -> ConfigurationError:
    return ConfigurationError(
        f"{what} were not found in the model's graph, so heads cannot read them; serve the model without them, or "
        "export it again with optimum-intel"
    )
