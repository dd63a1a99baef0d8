"""Joins the text embeddings of a multimodal model to its language model, so that the result takes tokens.

    input_ids -> text embeddings -> inputs_embeds -> language model -> logits

Where images are served, their states take the place of embeddings, by further inputs (`image_inputs`). Else the other
inputs of the language model are settled for text:

    position_ids [rows, batch, tokens]   equal rows: time, height and width of a text's token are its position
    visual_pos_masks                     which tokens belong to images: none
    deepstack_visual_embeds              what is added to the states of images' tokens: nothing
    token_type_ids                       all tokens are text; OpenVINO must page the attention before (`settle_types`)
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.multimodal.image_graph import (
    TYPES,
    input_of,
    marked,
    new_input,
    with_more_rows,
    with_positions,
    with_states,
)
from headrace.worker.multimodal.image_inputs import NUM_POSITIONS, ROWS

log = logging.getLogger(__name__)

TOKENS, POSITION_IDS = "input_ids", "position_ids"
_EMBEDDINGS = ("inputs_embeds", "per_layer_inputs")
_IS_OF_IMAGE, _IMAGE_STATES = "visual_pos_masks", "deepstack_visual_embeds"
_RANK_OF_ROWS = 3
_MOVES = {"Convert", "Reshape", "Unsqueeze", "Squeeze", "Transpose", "Broadcast"}


class JoiningError(Exception):
    """Why the networks do not fit together, as the end of a sentence that begins with the model."""


def join(language: ov.Model, embeddings: Sequence[ov.Model], *, has_images: bool = False) -> None:
    """Make a language model take tokens, and the states of images with `has_images`. `embeddings` are graphs of tokens
    to embeddings: of the text, and in some models of each layer. Raises JoiningError."""
    try:
        _join(language, embeddings, has_images=has_images)
    except RuntimeError as error:
        log.info("OpenVINO says: %s", error)
        raise JoiningError("its language model and its embeddings of tokens are not of one model") from error


def _join(language: ov.Model, embeddings: Sequence[ov.Model], *, has_images: bool) -> None:
    tokens = new_input(language, TOKENS, [-1, -1], np.int64)
    for graph, name in zip(embeddings, _EMBEDDINGS, strict=False):
        parameter = input_of(language, name)
        if parameter is None:
            raise JoiningError(f"its language model does not take {name}")
        embedded = _embedded(graph, tokens, name)
        if has_images and name == _EMBEDDINGS[0]:
            embedded = with_states(language, embedded)
        _replace(language, parameter, embedded)
    # Names of replaced outputs are added to those of what replaces them, and OpenVINO goes by both.
    tokens.set_friendly_name(TOKENS)
    tokens.output(0).get_tensor().set_names({TOKENS})
    _settle_positions(language, has_images=has_images)
    _settle_images(language, tokens, has_images=has_images)
    language.validate_nodes_and_infer_types()


def settle_types(model: ov.Model) -> None:
    """Make a paged model treat all tokens as text, except image tokens. Does nothing if the model has no input for
    token types, or takes no tokens."""
    types, tokens = input_of(model, TYPES), input_of(model, TOKENS)
    if types is None or tokens is None:
        return
    (of_batch,) = tokens.output(0).get_target_inputs()
    batch = of_batch.get_node().output(0)
    if input_of(model, ROWS) is None:
        _forget_types(model, types)
        value = _zeros_like(batch, types.output(0))
    else:
        value = marked(model, batch, types.output(0))
    _replace(model, types, value)
    model.validate_nodes_and_infer_types()


def _forget_types(model: ov.Model, types: ov.Node) -> None:
    """Restrict attention to the tokens before each token."""
    for attention in model.get_ordered_ops():
        if attention.get_type_name() == "PagedAttentionExtension":
            for port in attention.inputs():
                if _source(port.get_source_output()) == types.get_friendly_name():
                    # As in models that have no such input.
                    nothing = opset13.constant(np.zeros(0, port.get_element_type().to_dtype()))
                    port.replace_source_output(nothing.output(0))


def _replace(model: ov.Model, parameter: ov.Node, value: ov.Output) -> None:
    """Replace an input of the model by a value, and remove the input."""
    kind = parameter.get_element_type()
    if kind != value.get_element_type():
        value = opset13.convert(value, kind.get_type_name()).output(0)
    parameter.output(0).get_tensor().set_names(set())
    parameter.output(0).replace(value)
    model.remove_parameter(parameter)


def _embedded(graph: ov.Model, tokens: ov.Node, name: str) -> ov.Output:
    """The output that a graph computes for these tokens."""
    if len(graph.inputs) != 1 or len(graph.outputs) != 1:
        raise JoiningError(f"the network that gives its {name} does not turn tokens into embeddings")
    _replace(graph, graph.get_parameters()[0], tokens.output(0))
    found: ov.Output = graph.get_results()[0].input_value(0)
    return found


def _settle_positions(model: ov.Model, *, has_images: bool) -> None:
    """Use one row of positions for all rows, as text tokens require."""
    rows = input_of(model, POSITION_IDS)
    if rows is None or rows.get_partial_shape().rank != ov.Dimension(_RANK_OF_ROWS):
        return
    dimension = rows.get_partial_shape()[0]
    num_rows = 0 if dimension.is_dynamic else dimension.get_length()
    if not num_rows or (has_images and num_rows < NUM_POSITIONS):
        raise JoiningError("its language model takes an unknown number of positions for each token")
    row = new_input(model, POSITION_IDS, [-1, -1], np.int64)
    of_one = opset13.unsqueeze(row, opset13.constant(np.int64(0))).output(0)
    values = [of_one] * num_rows
    if has_images:
        # A fourth row, in front of these, is the place of a token.
        counted = opset13.concat([of_one] * NUM_POSITIONS, 0).output(0)
        values = [*values[NUM_POSITIONS:], with_positions(model, counted)]
    _replace(model, rows, opset13.concat(values, 0).output(0))


def _settle_images(model: ov.Model, tokens: ov.Node, *, has_images: bool) -> None:
    """Take the values that are added to the states of image tokens from the new inputs. Without `has_images`, remove
    the addition."""
    is_of_image, states = input_of(model, _IS_OF_IMAGE), input_of(model, _IMAGE_STATES)
    if is_of_image is None:
        return
    if not has_images:
        _remove_additions(model, is_of_image)
        _replace(model, is_of_image, _zeros_like(tokens.output(0), is_of_image.output(0)))
        if states is not None:
            if states.output(0).get_target_inputs():
                raise JoiningError("its language model adds something of images to its states in an unknown way")
            model.remove_parameter(states)
        return
    _replace(model, is_of_image, marked(model, tokens.output(0), is_of_image.output(0)))
    if states is not None:
        _replace(model, states, with_more_rows(model, states))


def _remove_additions(model: ov.Model, is_of_image: ov.Node) -> None:
    """Remove the values that are added to the states of images' tokens."""
    zero = {is_of_image.get_friendly_name()}
    for node in model.get_ordered_ops():
        values = node.input_values()
        is_zero = [value.get_node().get_friendly_name() in zero for value in values]
        kind = node.get_type_name()
        if (kind in _MOVES and is_zero[0]) or (kind == "Multiply" and any(is_zero)):
            zero.add(node.get_friendly_name())
        elif kind == "Add" and sum(is_zero) == 1:
            other = values[is_zero.index(False)]
            if other.get_partial_shape() == node.get_output_partial_shape(0):
                node.output(0).replace(other)


def _zeros_like(shaped: ov.Output, typed: ov.Output) -> ov.Output:
    zero = opset13.constant(np.zeros((), typed.get_element_type().to_dtype()))
    return opset13.broadcast(zero, opset13.shape_of(shaped)).output(0)


def _source(value: ov.Output) -> str:
    """The name of the node that computes a value, skipping conversions of its type."""
    node = value.get_node()
    while node.get_type_name() == "Convert":
        node = node.input_value(0).get_node()
    return str(node.get_friendly_name())
