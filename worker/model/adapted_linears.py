"""Finds the linear layers of a model's graph by the names that adapters give them.

An exporter names a product after its module: `__module.model.layers.0.self_attn.q_proj/aten::linear/MatMul`. A model
converted from GGUF has no such names. Its converter always writes the same structure, so each product is identified by
its place:

    query, key, value -> attention -> o_proj -> gate_proj, up_proj -> down_proj

Names are compared from the layer on, because adapters and exporters put different prefixes before it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import openvino as ov

from headrace.worker.model.adapter_memory import Linear, name_from_layer
from headrace.worker.model.fused_projections import is_constant, projection
from headrace.worker.model.window_tables import attentions

_EXPORTED = re.compile(r"^__module\.(?P<module>.+?)/aten::")
_ATTENTION = "layers.{}.self_attn."
_MLP = "layers.{}.mlp."
_OTHERS_OF_LAYER = 4
_ACTIVATIONS = {"Swish", "Gelu"}


def find_linears(model: ov.Model) -> list[Linear]:
    """The linear layers of a model with PagedAttention whose products are not fused yet, in the graph's order. Empty if
    the model has neither names nor the known structure. The product that gives the logits is not included."""
    products = [node for node in model.get_ordered_ops() if _is_linear(node)]
    last = products[-1].get_friendly_name() if products else ""
    exported = [(match["module"], node) for node in products if (match := _EXPORTED.match(node.get_friendly_name()))]
    named = exported or list(_by_structure(model, products[:-1]))
    return [_linear(name_from_layer(module), node) for module, node in named if node.get_friendly_name() != last]


def _is_linear(node: ov.Node) -> bool:
    """Whether the node multiplies the states of tokens with weights: `[tokens, inputs]`, `[tokens, 1, inputs]`, or, if
    it transposes them, `[tokens, inputs, 1]`. Where an export leaves an axis open, the first may not be that of tokens,
    so such products do not count."""
    if node.get_type_name() != "MatMul" or not is_constant(node.input_value(1)):
        return False
    if len(node.input_value(1).get_shape()) != 2:
        return False
    states = list(node.input_value(0).get_partial_shape())
    if not states[0].is_dynamic or len(states) not in (2, 3):
        return False
    if node.get_attributes()["transpose_a"]:
        return len(states) == 3 and states[2] == 1
    return len(states) == 2 or states[1] == 1


def _linear(name: str, node: ov.Node) -> Linear:
    weights = list(node.input_value(1).get_shape())
    outputs, inputs = weights if node.get_attributes()["transpose_b"] else reversed(weights)
    return Linear(name, node.get_friendly_name(), inputs, outputs)


def _by_structure(model: ov.Model, products: Sequence[ov.Node]) -> Iterator[tuple[str, ov.Node]]:
    """Names and products of a converted model; empty if it has another structure. `products` are those of layers."""
    paged = attentions(model)
    of_attention = [[projection(node.input_value(index)) for index in range(3)] for node in paged]
    if any(node is None for nodes in of_attention for node in nodes):
        return
    taken = {node.get_friendly_name() for nodes in of_attention for node in nodes if node is not None}
    others = [node for node in products if node.get_friendly_name() not in taken]
    if len(taken) != 3 * len(paged) or len(others) != _OTHERS_OF_LAYER * len(paged):
        return
    found: list[tuple[str, ov.Node]] = []
    for layer, nodes in enumerate(of_attention):
        names = [_ATTENTION.format(layer) + name for name in ("q_proj", "k_proj", "v_proj", "o_proj")]
        mlp = _mlp(others[_OTHERS_OF_LAYER * layer + 1 : _OTHERS_OF_LAYER * (layer + 1)])
        if mlp is None:
            return
        found += zip(names, [*nodes, others[_OTHERS_OF_LAYER * layer]], strict=True)
        found += zip([_MLP.format(layer) + name for name in ("gate_proj", "up_proj", "down_proj")], mlp, strict=True)
    yield from found


def _mlp(products: Sequence[ov.Node]) -> list[ov.Node] | None:
    """The products of an MLP in the order gate, up, down; None if it has no gate."""
    first, second, down = products
    gated = [node for node in (first, second) if _users(node) & _ACTIVATIONS]
    if len(gated) != 1 or source_of(first) != source_of(second):
        return None
    return [gated[0], second if gated[0] is first else first, down]


def source_of(product: ov.Node) -> tuple[str, int]:
    """The source of the states that a product multiplies. Products of the same states have the same source."""
    source = product.input_value(0)
    return source.get_node().get_friendly_name(), source.get_index()


def _users(node: ov.Node) -> set[str]:
    return {port.get_node().get_type_name() for port in node.output(0).get_target_inputs()}
