"""Gives a graph the inputs for the tokens of images (see `image_inputs`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.multimodal.image_inputs import DEEPSTACK, NUM_POSITIONS, POSITIONS, ROWS, STATES, ImageInputs

TYPES = "token_type_ids"
_FLAT = np.array([-1])
# In transformers' configuration of Qwen3-VL.
_USUAL_LAYERS = 3


def inputs_for_images(model: ov.Model, config: Mapping[str, Any]) -> ImageInputs | None:
    """The inputs that a joined graph has, before its attention is paged; None if it has none. `config` is the model's
    config.json."""
    states = input_of(model, STATES)
    if states is None:
        return None
    vision = config.get("vision_config")
    layers = vision.get("deepstack_visual_indexes") if isinstance(vision, dict) else None
    num_layers = len(layers) if isinstance(layers, list) else _USUAL_LAYERS
    return ImageInputs(
        hidden_size=int(states.get_partial_shape()[1].get_length()),
        has_positions=input_of(model, POSITIONS) is not None,
        num_layers=0 if input_of(model, DEEPSTACK) is None else num_layers,
        keeps_whole=input_of(model, TYPES) is not None,
    )


def input_of(model: ov.Model, name: str) -> ov.Node | None:
    """The input of this name; None if the graph has none."""
    return next((node for node in model.get_parameters() if name in node.output(0).get_names()), None)


def new_input(model: ov.Model, name: str, shape: list[int], kind: type[np.generic]) -> ov.Node:
    """Give the graph one more input."""
    parameter: ov.Node = opset13.parameter(shape, kind)
    parameter.set_friendly_name(name)
    parameter.output(0).get_tensor().set_names({name})
    model.add_parameters([parameter])
    return parameter


def with_states(model: ov.Model, embeddings: ov.Output) -> ov.Output:
    """Embeddings of tokens `[batch, tokens, hidden]` with the states of images in place of theirs. Gives the graph the
    inputs for both."""
    size = int(embeddings.get_partial_shape()[2].get_length())
    rows, states = new_input(model, ROWS, [-1], np.int64), new_input(model, STATES, [-1, size], np.float32)
    flat = opset13.reshape(embeddings, opset13.constant(np.array([-1, size])), special_zero=False)
    return _reshaped(_put(flat, rows, states, axis=0), embeddings)


def with_positions(model: ov.Model, positions: ov.Output) -> ov.Output:
    """Time, height and width of tokens `[3, batch, tokens]` with those of images in place of theirs. Gives the graph
    their input."""
    of_images = new_input(model, POSITIONS, [NUM_POSITIONS, -1], np.int64)
    flat = opset13.reshape(positions, opset13.constant(np.array([NUM_POSITIONS, -1])), special_zero=False)
    return _reshaped(_put(flat, _rows(model), of_images, axis=1), positions)


def marked(model: ov.Model, shaped: ov.Output, typed: ov.Output) -> ov.Output:
    """1 for each token of an image, 0 for others, in the shape and the type of others."""
    kind = typed.get_element_type().to_dtype()
    rows = _rows(model)
    zeros = opset13.broadcast(opset13.constant(np.zeros((), kind)), opset13.shape_of(shaped))
    flat = opset13.reshape(zeros, opset13.constant(_FLAT), special_zero=False)
    ones = opset13.broadcast(opset13.constant(np.ones((), kind)), opset13.shape_of(rows))
    return _reshaped(_put(flat, rows, ones, axis=0), shaped)


def with_more_rows(model: ov.Model, taken: ov.Node) -> ov.Output:
    """Replaces an input `[layers, tokens of images, hidden]`: the new input, followed by a row of zeros. The graph
    reads this row for text tokens, and does not use it."""
    size = int(taken.get_partial_shape()[2].get_length())
    given = new_input(model, DEEPSTACK, [-1, -1, size], np.float32)
    nothing, one = opset13.constant(np.zeros(3, np.int64)), opset13.constant(np.array([0, 1, 0]))
    return opset13.pad(given, nothing, one, "constant", opset13.constant(np.float32(0))).output(0)


def _rows(model: ov.Model) -> ov.Node:
    rows = input_of(model, ROWS)
    assert rows is not None, "states of images come first"
    return rows


def _put(values: ov.Node, rows: ov.Node, updates: ov.Node, *, axis: int) -> ov.Node:
    return opset13.scatter_update(values, rows, updates, opset13.constant(np.int64(axis)))


def _reshaped(values: ov.Node, like: ov.Output) -> ov.Output:
    return opset13.reshape(values, opset13.shape_of(like), special_zero=False).output(0)
