"""Attention without masks gives what it gave with them."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13

from headrace.worker.multimodal.towers.attention import (
    MASK,
    WINDOW_MASK,
    attend_in_bfloat16,
    see_all,
    see_all_and_windows,
    window_inputs,
)
from headrace.worker.multimodal.towers.tower import TowerError

HEADS, SIZE = 2, 8
PATCHES = 52
SIZES = np.array([16, 16, 8, 8, 4])


def merger(*, has_windows: bool, scaled: bool = False) -> ov.Model:
    """Layers of attention over all patches, and over windows, as in Qwen's towers."""
    rng = np.random.default_rng(0)
    names = [MASK, *([WINDOW_MASK] if has_windows else [])]
    masks = {name: opset13.parameter([1, -1, -1], np.float32, name) for name in names}
    states = parameter = opset13.parameter([-1, HEADS * SIZE], np.float32, "hidden_states")
    for name, node in (("hidden_states", parameter), *masks.items()):
        node.output(0).get_tensor().set_names({name})
    for name in (*names, *names):
        parts = []
        for _ in range(3):
            weights = opset13.constant(rng.normal(size=(HEADS * SIZE, HEADS * SIZE)).astype(np.float32))
            heads = opset13.reshape(opset13.matmul(states, weights, False, False), np.array([-1, HEADS, SIZE]), False)
            parts.append(opset13.transpose(heads, np.array([1, 0, 2])))
        mask = opset13.multiply(masks[name], np.float32(1)) if scaled else masks[name]
        seen = opset13.transpose(opset13.scaled_dot_product_attention(*parts, mask), np.array([1, 0, 2]))
        states = opset13.add(states, opset13.reshape(seen, np.array([-1, HEADS * SIZE]), False))
    return ov.Model([states], [parameter, *masks.values()], "merger")


def computed(model: ov.Model, inputs: dict[str, np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    properties = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    found: np.ndarray[Any, Any] = ov.Core().compile_model(model, "CPU", properties)(inputs)[0]
    return found


@pytest.mark.parametrize("has_windows", [False, True])
def test_states_are_those_of_the_masked_network(has_windows: bool) -> None:
    states = np.random.default_rng(1).normal(size=(PATCHES, HEADS * SIZE)).astype(np.float32)
    window = np.repeat(np.arange(len(SIZES)), SIZES)
    outside = np.where(window[:, None] == window, np.float32(0), np.float32(-np.inf))
    masks = {MASK: np.zeros((1, PATCHES, PATCHES), np.float32)}
    if has_windows:
        masks[WINDOW_MASK] = outside[None]
    expected = computed(merger(has_windows=has_windows), {"hidden_states": states, **masks})
    changed = merger(has_windows=has_windows)
    (see_all_and_windows if has_windows else see_all)(changed)
    more = dict(window_inputs(SIZES)) if has_windows else {}
    assert {port.any_name for port in changed.inputs} == {"hidden_states", *more}
    np.testing.assert_allclose(computed(changed, {"hidden_states": states, **more}), expected, rtol=1e-5, atol=1e-5)


def test_windows_are_filled_up_with_what_nobody_sees() -> None:
    found = window_inputs(np.array([3, 1]))
    assert found["window_members"].tolist() == [[0, 1, 2], [3, 0, 0]]
    assert found["window_unseen"].reshape(2, 3).tolist() == [[0, 0, 0], [0, -np.inf, -np.inf]]
    assert found["window_places"].tolist() == [0, 1, 2, 3]


def test_a_mask_that_is_used_in_another_way_is_refused() -> None:
    with pytest.raises(TowerError, match="uses attention_mask in an unknown way"):
        see_all(merger(has_windows=False, scaled=True))


@pytest.mark.parametrize("has_windows", [False, True])
def test_attention_in_bfloat16_stays_close_and_leaves_other_operations(has_windows: bool) -> None:
    states = 0.1 * np.random.default_rng(1).normal(size=(PATCHES, HEADS * SIZE)).astype(np.float32)
    plain, changed = (merger(has_windows=has_windows) for _ in range(2))
    for model in (plain, changed):
        (see_all_and_windows if has_windows else see_all)(model)
    attend_in_bfloat16(changed)
    types = {(node.get_type_name(), node.get_output_element_type(0)) for node in changed.get_ops()}
    assert ("ScaledDotProductAttention", ov.Type.bf16) in types
    assert {kind for name, kind in types if name in {"MatMul", "Add"}} == {ov.Type.f32}
    inputs = {"hidden_states": states, **(dict(window_inputs(SIZES)) if has_windows else {})}
    expected = computed(plain, inputs)
    assert 0 < np.abs(computed(changed, inputs) - expected).mean() < 0.05 * np.abs(expected).mean()
