"""Gemma 4's tower looks up the embeddings of places."""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.multimodal.towers.gemma4 import look_up_places

NUM_PLACES, SIZE = 7, 4


def embedder() -> ov.Model:
    """Places [1, patches, 2] to embeddings [1, patches, size], as the exported network computes them."""
    table = np.random.default_rng(0).standard_normal((2, NUM_PLACES, SIZE)).astype(np.float32)
    places = opset13.parameter([-1, -1, 2], np.int64, "image_position_ids")
    places.output(0).get_tensor().set_names({"image_position_ids"})
    rows = opset13.one_hot(places, opset13.constant(NUM_PLACES), opset13.constant(1), opset13.constant(0), -1)
    moved = opset13.transpose(opset13.convert(rows, "f32"), opset13.constant(np.array([0, 2, 1, 3])))
    product = opset13.matmul(moved, opset13.constant(table), transpose_a=False, transpose_b=False)
    return ov.Model([opset13.reduce_sum(product, opset13.constant(np.array([1])), keep_dims=False)], [places])


def embeddings(model: ov.Model) -> np.ndarray:
    places = np.array([[[0, 0], [6, 1], [2, 5], [2, 5]]], np.int64)
    found: np.ndarray = ov.compile_model(model, "CPU")(places)[0]
    return found


def test_embeddings_that_are_looked_up_have_the_same_bits() -> None:
    model = embedder()
    expected = embeddings(model)
    look_up_places(model)
    assert not [node for node in model.get_ops() if node.get_type_name() in ("OneHot", "MatMul")]
    assert embeddings(model).tobytes() == expected.tobytes()


def test_a_graph_of_another_form_stays_as_it_is() -> None:
    places = opset13.parameter([1, -1, 2], np.int64, "image_position_ids")
    model = ov.Model([opset13.convert(places, "f32")], [places])
    look_up_places(model)
    assert [node.get_type_name() for node in model.get_ordered_ops()] == ["Parameter", "Convert", "Result"]
