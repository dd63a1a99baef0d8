"""Scales in float32 give the same bits, and lie where they were put."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino import opset13

from headrace.worker.weights.file_memory import FileMemory, give_back_files
from headrace.worker.weights.scales import widen_scales

ROWS, GROUPS, GROUP = 256, 32, 32
INPUTS = GROUPS * GROUP


def integers(kind: ov.Type, shape: list[int], value: int | None = None) -> ov.Node:
    """Random integers, or one value everywhere."""
    tensor = ov.Tensor(kind, ov.Shape(shape))
    stored = tensor.data.reshape(-1).view(np.uint8)
    half = 4 if kind.bitwidth == 4 else 0
    stored[:] = np.random.default_rng(3).integers(0, 256, stored.size) if value is None else value | value << half
    return opset13.constant(tensor)


def product(kind: ov.Type, zero: int | None, *, has_zeros: bool = True, shares: bool = False) -> ov.Model:
    """A product as exporters write it: groups with a scale each, and zero points. With `shares`, an embedding reads the
    same weights."""
    weights = opset13.convert(integers(kind, [ROWS, GROUPS, GROUP]), "f16")
    if has_zeros:
        weights = opset13.subtract(weights, opset13.convert(integers(kind, [ROWS, GROUPS, 1], zero), "f16"))
    scales = np.random.default_rng(4).uniform(0.01, 0.02, (ROWS, GROUPS, 1)).astype(np.float16)
    flat = opset13.reshape(opset13.multiply(weights, opset13.constant(scales)), np.array([ROWS, INPUTS]), False)
    states = opset13.parameter([-1, INPUTS], np.float32, "states")
    result = opset13.matmul(states, opset13.convert(flat, "f32"), False, True)
    if shares:
        rows = opset13.gather(opset13.convert(flat, "f32"), np.array([1, 5]), np.int64(0))
        result = opset13.concat([result, rows], 1)
    return ov.Model([opset13.result(result)], [states], "product")


def computed(model: ov.Model) -> npt.NDArray[np.float32]:
    compiled = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    states = np.random.default_rng(5).standard_normal((2, INPUTS)).astype(np.float32)
    return np.array(compiled({0: states})[0])


def constants(model: ov.Model, kind: ov.Type) -> list[int]:
    """The sizes of a type's constants, in values."""
    nodes = [node for node in model.get_ops() if node.get_type_name() == "Constant"]
    return [int(np.prod(list(node.get_output_shape(0)))) for node in nodes if node.get_output_element_type(0) == kind]


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("zero", [None, 8])
@pytest.mark.parametrize("kind", [ov.Type.u4, ov.Type.u8])
def test_results_have_the_same_bits(tmp_path: Path, kind: ov.Type, zero: int | None, shares: bool) -> None:
    before = computed(product(kind, zero, shares=shares))
    model, memory = product(kind, zero, shares=shares), FileMemory([tmp_path])
    assert widen_scales(model, memory) == 1
    assert constants(model, ov.Type.f16) == []
    assert constants(model, ov.Type.f32) == [ROWS * GROUPS]
    assert sorted(constants(model, kind)) == [1 if zero else ROWS * GROUPS, ROWS * INPUTS]
    assert computed(model).tobytes() == before.tobytes()
    give_back_files()
    assert computed(model).tobytes() == before.tobytes()


def test_weights_without_zero_points_keep_their_bits() -> None:
    before = computed(product(ov.Type.i8, None, has_zeros=False))
    model, memory = product(ov.Type.i8, None, has_zeros=False), FileMemory([])
    assert widen_scales(model, memory) == 1
    assert computed(model).tobytes() == before.tobytes()


def test_other_products_stay_as_they_are() -> None:
    states = opset13.parameter([-1, ROWS], np.float32, "states")
    halves = opset13.constant(np.ones((ROWS, INPUTS), np.float16))
    scaled = opset13.multiply(halves, opset13.constant(np.ones((ROWS, INPUTS), np.float16)))
    result = opset13.matmul(states, opset13.convert(scaled, "f32"), False, False)
    model = ov.Model([opset13.result(result)], [states], "other")
    assert widen_scales(model, FileMemory([])) == 0
