"""Fusion of projections, on graphs that contain only products."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino import opset13

from headrace.worker.model.fused_projections import fuse, is_constant, products_to_fuse
from headrace.worker.weights.file_memory import FileMemory

HIDDEN, GROUP = 64, 32
LENGTHS = (48, 16, 16)
CORE = ov.Core()
Weights = Callable[[int, int], ov.Node]


def floats(length: int, seed: int) -> ov.Node:
    return opset13.constant(np.random.default_rng(seed).normal(size=(length, HIDDEN)).astype(np.float32))


def halves(length: int, seed: int) -> ov.Node:
    values = np.random.default_rng(seed).normal(size=(length, HIDDEN)).astype(np.float16)
    return opset13.convert(opset13.constant(values), "f32")


def bytes_by_row(length: int, seed: int) -> ov.Node:
    rng = np.random.default_rng(seed)
    values = opset13.convert(opset13.constant(rng.integers(-127, 127, (length, HIDDEN)).astype(np.int8)), "f32")
    return opset13.multiply(values, opset13.constant(rng.uniform(0.01, 0.1, (length, 1)).astype(np.float32)))


def nibbles(length: int, seed: int, *, zero: int | None = None) -> ov.Node:
    """4-bit weights in groups, with one zero point per group or one for all."""
    rng = np.random.default_rng(seed)
    shape = [length, HIDDEN // GROUP, GROUP]
    zeros = opset13.constant(np.float16(zero)) if zero is not None else of_nibbles(rng, [*shape[:2], 1])
    weights = opset13.subtract(of_nibbles(rng, shape), zeros)
    scales = opset13.constant(rng.uniform(0.01, 0.1, (*shape[:2], 1)).astype(np.float16))
    grouped = opset13.multiply(weights, scales)
    return opset13.convert(opset13.reshape(grouped, opset13.constant(np.array([length, HIDDEN])), False), "f32")


def of_nibbles(rng: np.random.Generator, shape: Sequence[int]) -> ov.Node:
    tensor = ov.Tensor(ov.Type.u4, ov.Shape(list(shape)))
    packed = tensor.data.reshape(-1).view(np.uint8)
    packed[:] = rng.integers(0, 256, packed.size)
    return opset13.convert(opset13.constant(tensor), "f16")


def products(
    weights: Sequence[Weights], *, lengths: Sequence[int] = LENGTHS, biased: Sequence[bool] = (False,) * 3
) -> tuple[ov.Model, list[ov.Node]]:
    """Products of the same states, and the model that gives each of them."""
    states = opset13.parameter([-1, 1, HIDDEN], np.float32, "states")
    made = [
        opset13.matmul(states, of(length, seed), False, True)
        for seed, (of, length) in enumerate(zip(weights, lengths, strict=True))
    ]
    ends = [
        opset13.add(product, opset13.constant(np.full((1, 1, length), 0.5 + index, np.float32)))
        if has_bias
        else product
        for index, (product, length, has_bias) in enumerate(zip(made, lengths, biased, strict=True))
    ]
    # Results keep what they are given, so something must stand between.
    results = [opset13.result(opset13.relu(end)) for end in ends]
    return ov.Model(results, [states], "products"), made


def outputs(model: ov.Model) -> list[npt.NDArray[np.float32]]:
    states = np.random.default_rng(9).normal(size=(5, 1, HIDDEN)).astype(np.float32)
    properties = {"INFERENCE_NUM_THREADS": 1, "INFERENCE_PRECISION_HINT": "f32"}
    request = CORE.compile_model(model, "CPU", properties).create_infer_request()
    request.infer([states])
    return [request.get_output_tensor(index).data.copy() for index in range(len(model.outputs))]


def num_products(model: ov.Model) -> int:
    return sum(node.get_type_name() == "MatMul" for node in model.get_ordered_ops())


@pytest.mark.parametrize("biased", [(False,) * 3, (True,) * 3, (True, False, True)])
@pytest.mark.parametrize("weights", [floats, halves, bytes_by_row, nibbles, lambda n, seed: nibbles(n, seed, zero=8)])
def test_one_product_gives_what_three_give(weights: Weights, biased: Sequence[bool]) -> None:
    apart, _ = products([weights] * 3, biased=biased)
    together, made = products([weights] * 3, biased=biased)
    assert fuse(made, FileMemory([]))
    together.validate_nodes_and_infer_types()
    assert (num_products(apart), num_products(together)) == (3, 1)
    for one, other in zip(outputs(together), outputs(apart), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


def test_one_product_that_gives_three_inputs_is_left_alone() -> None:
    states = opset13.parameter([-1, 1, HIDDEN], np.float32, "states")
    product = opset13.matmul(states, floats(96, 0), False, True)
    parts = opset13.split(product, opset13.constant(np.int64(2)), 3)
    assert products_to_fuse(parts.outputs()) == []
    apart = [opset13.matmul(states, floats(32, seed), False, True).output(0) for seed in range(3)]
    assert [len(group) for group in products_to_fuse(apart)] == [3]


def one_zero_each(length: int, seed: int) -> ov.Node:
    return nibbles(length, seed, zero=7 + seed % 2)


def through_an_unknown_node(length: int, seed: int) -> ov.Node:
    return opset13.tanh(floats(length, seed))


@pytest.mark.parametrize(
    "weights",
    [[one_zero_each] * 3, [through_an_unknown_node] * 3, [floats, halves, floats], [nibbles, bytes_by_row, nibbles]],
)
def test_what_cannot_be_put_together_is_left_alone(weights: Sequence[Weights]) -> None:
    model, made = products(weights)
    before = outputs(model)
    assert not fuse(made, FileMemory([]))
    assert num_products(model) == 3
    for one, other in zip(outputs(model), before, strict=True):
        assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("length", [-1, 4])
def test_what_is_constant_is_told_of_models_of_any_depth(length: int) -> None:
    values = opset13.parameter([length, 8], np.float32, "values")
    weights = opset13.constant(np.ones((1, 8), np.float32))
    assert is_constant(weights.output(0))
    assert not is_constant(values.output(0))
    for _ in range(3000):
        values, weights = opset13.add(values, opset13.constant(np.float32(1))), opset13.relu(weights)
    assert is_constant(weights.output(0))
    assert not is_constant(values.output(0))
