"""Changes the attention of Qwen's towers, so that its memory grows with an image's patches, not with their square.

The exported networks add a mask `[1, patches, patches]` in float32 to the attention of each layer, because several
images may be in a call: 1 GiB for 16,384 patches, and more for the products that it is added to. Here a call has one
image. So where every patch sees every other, the mask is zero and is dropped. Where the patches of a window see each
other (Qwen2.5-VL), each window is computed by itself:

    q, k, v [heads, patches, size] --gather--> [windows, heads, patches of a window, size]
                                   --attention--> the same
                                   --gather--> [heads, patches, size]

Windows at the right and at the bottom are smaller; they are filled up, with what nobody sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.worker.multimodal.towers.tower import TowerError

MASK, WINDOW_MASK = "attention_mask", "window_attention_mask"
_MEMBERS, _UNSEEN, _PLACES = "window_members", "window_unseen", "window_places"
_ATTENTION = "ScaledDotProductAttention"
_MASK_PORT = 3


def see_all(model: ov.Model) -> None:
    """Drop the mask of layers in which every patch sees every other. TowerError if its use is unknown."""
    for attention in _users(model, MASK):
        zero = opset13.constant(np.int64(0))
        parts = [opset13.unsqueeze(value, zero) for value in attention.input_values()[:_MASK_PORT]]
        # Of rank 4, because OpenVINO computes others with a product of all patches by all.
        seen = opset13.scaled_dot_product_attention(*parts, causal=False)
        attention.output(0).replace(opset13.squeeze(seen, zero).output(0))
    _remove(model, MASK)


def see_all_and_windows(model: ov.Model) -> None:
    """As `see_all`, and compute each window by itself in layers that have windows. Adds the inputs of
    `window_inputs`."""
    see_all(model)
    members = _new_input(model, _MEMBERS, [-1, -1], np.int64)
    unseen = _new_input(model, _UNSEEN, [-1, 1, 1, -1], np.float32)
    places = _new_input(model, _PLACES, [-1], np.int64)
    of_patches = opset13.constant(np.int64(1))
    swapped = opset13.constant(np.array([1, 0, 2, 3]))
    for attention in _users(model, WINDOW_MASK):
        parts = []
        for value in attention.input_values()[:_MASK_PORT]:
            gathered = opset13.gather(value, members, of_patches)
            parts.append(opset13.transpose(gathered, swapped))
        seen = opset13.transpose(opset13.scaled_dot_product_attention(*parts, unseen, causal=False), swapped)
        shape = attention.get_output_partial_shape(0)
        flat = opset13.constant(np.array([shape[0].get_length(), -1, shape[2].get_length()]))
        joined = opset13.reshape(seen, flat, special_zero=False)
        attention.output(0).replace(opset13.gather(joined, places, of_patches).output(0))
    _remove(model, WINDOW_MASK)


def attend_in_bfloat16(model: ov.Model) -> None:
    """Compute attention in bfloat16 in a graph that is compiled for float32: it takes half of the time."""
    for attention in model.get_ops():
        if attention.get_type_name() != _ATTENTION:
            continue
        for port in attention.inputs():
            if port.get_element_type() == ov.Type.f32:
                port.replace_source_output(opset13.convert(port.get_source_output(), "bf16").output(0))
        readers = list(attention.output(0).get_target_inputs())
        attention.validate_and_infer_types()
        seen = opset13.convert(attention.output(0), "f32")
        for reader in readers:
            reader.replace_source_output(seen.output(0))
    model.validate_nodes_and_infer_types()


def window_inputs(sizes: npt.NDArray[np.int64]) -> Mapping[str, npt.NDArray[Any]]:
    """The inputs for windows with these numbers of patches, in order."""
    most, ends = int(sizes.max()), np.cumsum(sizes)
    inside = np.arange(most) < sizes[:, None]
    members = np.where(inside, (ends - sizes)[:, None] + np.arange(most), 0)
    return {
        _MEMBERS: members,
        _UNSEEN: np.where(inside, np.float32(0), np.float32(-np.inf))[:, None, None],
        _PLACES: np.flatnonzero(inside),
    }


def _users(model: ov.Model, name: str) -> list[ov.Node]:
    """The attention operations that use this mask."""
    (mask,) = (node for node in model.get_parameters() if name in node.output(0).get_names())
    ports = list(mask.output(0).get_target_inputs())
    attentions = [port.get_node() for port in ports if port.get_index() == _MASK_PORT]
    ranks = {node.get_output_partial_shape(0).rank.get_length() for node in attentions}
    if len(attentions) < len(ports) or ranks != {3} or {node.get_type_name() for node in attentions} != {_ATTENTION}:
        raise TowerError(
            f"its vision tower uses {name} in an unknown way; export it again with the current optimum-intel"
        )
    return attentions


def _remove(model: ov.Model, name: str) -> None:
    (mask,) = (node for node in model.get_parameters() if name in node.output(0).get_names())
    model.remove_parameter(mask)
    model.validate_nodes_and_infer_types()


def _new_input(model: ov.Model, name: str, shape: list[int], kind: type[np.generic]) -> ov.Node:
    parameter: ov.Node = opset13.parameter(shape, kind, name)
    parameter.output(0).get_tensor().set_names({name})
    model.add_parameters([parameter])
    return parameter
