"""The embeddings of text in front of a language model: the joined graph computes what the two compute one after the
other, for a text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13

from headrace.worker.multimodal.image_graph import inputs_for_images
from headrace.worker.multimodal.image_inputs import ImageInputs
from headrace.worker.multimodal.joining import JoiningError, join, settle_types

VOCABULARY, SIZE = 11, 4
TABLE = np.random.default_rng(0).normal(size=(VOCABULARY, SIZE)).astype(np.float32)
TOKENS = np.array([[3, 1, 4], [1, 5, 9]], np.int64)
PLACES = np.array([[0, 1, 2], [7, 8, 9]], np.int64)


def parameter(name: str, shape: list[int], kind: Any) -> ov.Node:
    node: ov.Node = opset13.parameter(shape, kind)
    node.set_friendly_name(name)
    node.output(0).get_tensor().set_names({name})
    return node


def embeddings(kind: Any = np.int64, scale: float = 1.0, size: int = SIZE) -> ov.Model:
    """Tokens to embeddings. Its input has another name than that of a model of text."""
    tokens = parameter("input", [-1, -1], kind)
    table = opset13.constant(np.resize(scale * TABLE, (VOCABULARY, size)))
    return ov.Model([opset13.gather(table, tokens, opset13.constant(np.int64(0)))], [tokens], "embeddings")


def language(rows: int = 0, *, sees: bool = False, per_layer: bool = False) -> ov.Model:
    """Embeddings plus positions to something, like Qwen3-VL's with `sees`: states of images' tokens get more added."""
    parameters = [parameter("inputs_embeds", [-1, -1, SIZE], np.float32)]
    states = parameters[0].output(0)
    shape = [rows, -1, -1] if rows else [-1, -1]
    parameters.append(parameter("position_ids", shape, np.int64))
    places = opset13.convert(parameters[-1], "f32")
    if rows:
        places = opset13.reduce_sum(places, opset13.constant(np.int64(0)))
    states = opset13.add(states, opset13.unsqueeze(places, opset13.constant(np.int64(2)))).output(0)
    if sees:
        mask = parameter("visual_pos_masks", [-1, -1], bool)
        more = parameter("deepstack_visual_embeds", [1, -1, SIZE], np.float32)
        parameters += [mask, more]
        flat = opset13.reshape(mask, opset13.constant(np.array([-1])), special_zero=False)
        counted = opset13.cum_sum(opset13.convert(flat, "i64"), opset13.constant(np.int64(0)))
        places_in_image = opset13.maximum(opset13.subtract(counted, np.int64(1)), np.int64(0))
        of_image = opset13.gather(opset13.squeeze(more, np.int64(0)), places_in_image, np.int64(0))
        of_image = opset13.reshape(of_image, opset13.shape_of(states), special_zero=False)
        factor = opset13.unsqueeze(opset13.convert(mask, "f32"), opset13.constant(np.int64(2)))
        states = opset13.add(states, opset13.multiply(of_image, factor)).output(0)
    if per_layer:
        parameters.append(parameter("per_layer_inputs", [-1, -1, SIZE], np.float32))
        states = opset13.multiply(states, parameters[-1]).output(0)
    return ov.Model([states], parameters, "language")


def computed(model: ov.Model, more: Mapping[str, np.ndarray[Any, Any]] | None = None) -> np.ndarray[Any, Any]:
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    found: np.ndarray[Any, Any] = compiled({"input_ids": TOKENS, "position_ids": PLACES, **(more or {})})[0]
    return found


@pytest.mark.parametrize(("rows", "sees"), [(0, False), (3, False), (4, True)])
def test_a_joined_model_takes_tokens_and_a_row_of_positions(rows: int, sees: bool) -> None:
    model = language(rows, sees=sees)
    join(model, [embeddings()])
    inputs = {port.any_name: list(port.get_partial_shape()) for port in model.inputs}
    assert sorted(inputs) == ["input_ids", "position_ids"]
    assert all(len(shape) == 2 for shape in inputs.values())
    # OpenVINO's paging goes by these names.
    assert {node.get_friendly_name() for node in model.get_parameters()} == {"input_ids", "position_ids"}
    expected = TABLE[TOKENS] + max(rows, 1) * PLACES[..., None]
    np.testing.assert_allclose(computed(model), expected, rtol=1e-6)
    kinds = {node.get_type_name() for node in model.get_ordered_ops()}
    assert "CumSum" not in kinds, "what is added to the states of images' tokens is still computed"


def test_tokens_may_be_of_another_type() -> None:
    model = language()
    join(model, [embeddings(np.int32)])
    np.testing.assert_allclose(computed(model), TABLE[TOKENS] + PLACES[..., None], rtol=1e-6)


def test_layers_may_have_embeddings_of_their_own() -> None:
    model = language(per_layer=True)
    join(model, [embeddings(), embeddings(scale=2.0)])
    assert {port.any_name for port in model.inputs} == {"input_ids", "position_ids"}
    expected = (TABLE[TOKENS] + PLACES[..., None]) * 2 * TABLE[TOKENS]
    np.testing.assert_allclose(computed(model), expected, rtol=1e-6)


def of_images(rows: int, size: int = SIZE) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(1)
    return {
        "image_rows": np.array([1, 2, 4][:rows], np.int64),
        "image_states": rng.normal(size=(3, size)).astype(np.float32)[:rows],
        "image_positions": rng.integers(50, 60, (3, 3))[:, :rows],
        "image_deepstack": rng.normal(size=(1, 3, size)).astype(np.float32)[:, :rows],
    }


@pytest.mark.parametrize("num_images", [0, 3])
@pytest.mark.parametrize(("rows", "sees"), [(0, False), (3, False), (3, True), (4, True)])
def test_states_of_images_take_the_place_of_embeddings(rows: int, sees: bool, num_images: int) -> None:
    """And their positions and additions that of the text's. The first of four rows is the place of each token."""
    model = language(rows, sees=sees)
    join(model, [embeddings()], has_images=True)
    values = of_images(num_images)
    if not rows:
        del values["image_positions"]
    if not sees:
        del values["image_deepstack"]
    assert sorted(port.any_name for port in model.inputs) == sorted(["input_ids", "position_ids", *values])
    embedded = TABLE[TOKENS].reshape(-1, SIZE)
    positions = np.stack([PLACES.reshape(-1)] * max(rows, 1))
    embedded[values["image_rows"]] = values["image_states"]
    if rows:
        positions[-3:, values["image_rows"]] = values["image_positions"]
    expected = embedded + positions.sum(0)[:, None]
    if sees:
        expected[values["image_rows"]] += values["image_deepstack"][0]
    np.testing.assert_allclose(computed(model, values), expected.reshape(*TOKENS.shape, SIZE), rtol=1e-6)


def test_what_a_graph_takes_of_images_is_known() -> None:
    model = language(3, sees=True)
    assert inputs_for_images(model, {}) is None
    join(model, [embeddings()], has_images=True)
    config = {"vision_config": {"deepstack_visual_indexes": [2, 5]}}
    assert inputs_for_images(model, config) == ImageInputs(SIZE, True, 2, keeps_whole=False)
    assert inputs_for_images(model, {}) == ImageInputs(SIZE, True, 3, keeps_whole=False)
    model = language()
    model.add_parameters([parameter("token_type_ids", [-1, -1], np.int64)])
    join(model, [embeddings()], has_images=True)
    assert inputs_for_images(model, config) == ImageInputs(SIZE, False, 0, keeps_whole=True)


def test_networks_that_do_not_fit_are_refused_in_a_sentence() -> None:
    with pytest.raises(JoiningError, match="its language model does not take per_layer_inputs"):
        join(language(), [embeddings(), embeddings()])
    with pytest.raises(JoiningError, match="the network that gives its inputs_embeds does not turn tokens into"):
        join(language(), [language()])
    with pytest.raises(JoiningError, match="an unknown number of positions for each token"):
        join(language(rows=-1), [embeddings()])
    with pytest.raises(JoiningError, match="an unknown number of positions for each token"):
        join(language(rows=2), [embeddings()], has_images=True)
    with pytest.raises(JoiningError, match="its language model and its embeddings of tokens are not of one model"):
        join(language(per_layer=True), [embeddings(size=SIZE + 1), embeddings()])


def test_a_model_without_tokens_keeps_its_types() -> None:
    """Its inputs are refused later, in a sentence."""
    embeds, types = parameter("inputs_embeds", [-1, -1, SIZE], np.float32), parameter("token_type_ids", [-1], np.int64)
    model = ov.Model([embeds, types], [embeds, types], "language")
    settle_types(model)
    assert len(model.inputs) == 2
