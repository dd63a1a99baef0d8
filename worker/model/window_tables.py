"""Gives the layers with a sliding window their own block tables.

    input   block_indices           i32 [blocks]   blocks of the other layers
    input   window_block_indices    i32 [blocks]   blocks of layers with a window, in the same order

Both tables have an entry for each block of a sequence. The operator reads all of them. It multiplies values outside of
the window by zero, so their entries may name any block with finite numbers (docs/decisions/kv-cache.md#windows).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import openvino as ov
from openvino import opset13

WINDOW_BLOCK_INDICES = "window_block_indices"
# Indices of the inputs of PagedAttention.
_KEY_CACHE = 3
_BLOCK_INDICES = 7
_SLIDING_WINDOW = 10
_ALIBI_SLOPES = 11


class WindowLayers(NamedTuple):
    """The numbers of the layers whose queries see at most the last `num_tokens` tokens, their own included."""

    num_tokens: int
    layers: frozenset[int]


def window_layers(model: ov.Model) -> WindowLayers:
    """The layers with windows of a model with PagedAttention. Without any, `num_tokens` is 0."""
    found = {_layer_of(node): _window_of(node) for node in attentions(model)}
    windows = {layer: window for layer, window in found.items() if window > 0}
    return WindowLayers(max(windows.values(), default=0), frozenset(windows))


def add_window_tables(model: ov.Model) -> WindowLayers:
    """Give the layers with windows the input above. Does nothing if there are none."""
    found = window_layers(model)
    if not found.layers:
        return found
    tables = opset13.parameter([-1], np.int32, WINDOW_BLOCK_INDICES)
    tables.output(0).get_tensor().set_names({WINDOW_BLOCK_INDICES})
    model.add_parameters([tables])
    for node in attentions(model):
        if _layer_of(node) in found.layers:
            node.input(_BLOCK_INDICES).replace_source_output(tables.output(0))
    model.validate_nodes_and_infer_types()
    return found


def attentions(model: ov.Model) -> list[ov.Node]:
    """The operations of attention, in the order of their layers."""
    return [node for node in model.get_ordered_ops() if node.get_type_name() == "PagedAttentionExtension"]


def has_window(attention: ov.Node) -> bool:
    """Whether queries see a window only. Without OpenVINO's constant folding, a window may be computed."""
    window = attention.input_value(_SLIDING_WINDOW).get_node()
    return window.get_type_name() != "Constant" or int(np.asarray(window.data).reshape(-1)[0]) > 0


def has_alibi(attention: ov.Node) -> bool:
    """Whether positions are those of ALiBi."""
    slopes = attention.input_value(_ALIBI_SLOPES).get_partial_shape()
    return bool(slopes.is_dynamic or list(slopes.to_shape()) != [0])


def _layer_of(attention: ov.Node) -> int:
    return int(attention.input_value(_KEY_CACHE).any_name.rpartition(".")[2])


def _window_of(attention: ov.Node) -> int:
    """The window of a layer in tokens; 0 if it has none, or one that depends on inputs. Exports compute it from
    constants."""
    result = opset13.result(attention.input_value(_SLIDING_WINDOW))
    try:
        model = ov.Model([result], [])
    except RuntimeError:
        return 0
    found = [ov.Tensor(model.output(0).element_type, model.output(0).shape)]
    return int(found[0].data.reshape(-1)[0]) if model.evaluate(found, []) else 0
