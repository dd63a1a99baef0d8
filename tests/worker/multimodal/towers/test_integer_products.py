"""Which graphs have products in integers: those whose weights allow it, on CPUs where it is faster."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from openvino import opset13

from headrace.worker.multimodal.towers.integer_products import fits, integer_products

INPUTS, OUTPUTS = 256, 512
ZEN_4 = "avx2 avx512f avx512_vnni avx512_bf16"


class Core:
    """An OpenVINO that prefers a precision."""

    def __init__(self, precision: ov.Type) -> None:
        self._precision = precision

    def get_property(self, device: str, name: str) -> ov.Type:
        assert (device, name) == ("CPU", "INFERENCE_PRECISION_HINT")
        return self._precision


def integers(kind: ov.Type, *shape: int) -> ov.Node:
    tensor = ov.Tensor(kind, ov.Shape(list(shape)))
    stored = tensor.data.reshape(-1).view(np.uint8)
    stored[:] = np.random.default_rng(0).integers(0, 256, stored.size, np.uint8)
    node: ov.Node = opset13.constant(tensor)
    return node


def weights(kind: ov.Type, *shape: int) -> ov.Node:
    """Compressed weights `[outputs, inputs]` or in groups, as exporters store them."""
    scales = opset13.constant(np.ones((*shape[:-1], 1), np.float16))
    zeros = opset13.convert(integers(kind, *shape[:-1], 1), "f16")
    found: ov.Node = opset13.multiply(opset13.subtract(opset13.convert(integers(kind, *shape), "f16"), zeros), scales)
    if len(shape) == 3:
        found = opset13.reshape(found, opset13.constant(np.array([shape[0], shape[1] * shape[2]])), False)
    return opset13.convert(found, "f32")


def product(*all_weights: ov.Node) -> ov.Model:
    """Products of the same states with each weights, and one of states with states, as attention has them."""
    states = opset13.parameter([-1, INPUTS], np.float32, "states")
    results: list[Any] = [opset13.matmul(states, each, False, True) for each in all_weights]
    return ov.Model([*results, opset13.matmul(states, states, False, True)], [states], "product")


ROWS = weights(ov.Type.u8, OUTPUTS, INPUTS)
MODELS = [
    (product(ROWS), True),
    (product(weights(ov.Type.i8, OUTPUTS, INPUTS)), True),
    (product(weights(ov.Type.u4, OUTPUTS, INPUTS // 128, 128), ROWS), True),
    (product(weights(ov.Type.u4, OUTPUTS, INPUTS // 32, 32)), False),
    (product(weights(ov.Type.u4, OUTPUTS, INPUTS // 32, 32), ROWS), False),
    (product(ROWS, opset13.constant(np.ones((OUTPUTS, INPUTS), np.float32))), False),
    (product(ROWS, opset13.constant(np.ones((4, INPUTS), np.float32))), True),
    (product(opset13.convert(opset13.constant(np.ones((OUTPUTS, INPUTS), np.float16)), "f32")), False),
    (product(), False),
]


@pytest.mark.parametrize(("model", "expected"), MODELS)
def test_weights_decide(model: ov.Model, expected: bool) -> None:
    assert fits(model) is expected


def test_weights_of_experts_are_left_alone() -> None:
    stored = opset13.convert(integers(ov.Type.u8, 4, OUTPUTS, INPUTS), "f16")
    experts = opset13.convert(opset13.multiply(stored, opset13.constant(np.ones((4, OUTPUTS, 1), np.float16))), "f32")
    states = opset13.parameter([4, -1, INPUTS], np.float32, "states")
    assert not fits(ov.Model([opset13.matmul(states, experts, False, True)], [states], "experts"))


@pytest.mark.parametrize(
    ("precision", "flags", "mode", "expected"),
    [
        (ov.Type.bf16, ZEN_4, "performance", True),
        (ov.Type.bf16, ZEN_4, "accuracy", False),
        (ov.Type.f32, ZEN_4, "performance", False),
        (ov.Type.bf16, f"{ZEN_4} amx_tile", "performance", False),
        (ov.Type.bf16, "avx2 avx512f avx512_bf16", "performance", False),
        (ov.Type.bf16, "", "performance", False),
    ],
)
def test_the_cpu_decides(tmp_path: Path, precision: ov.Type, flags: str, mode: str, expected: bool) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/cpuinfo").write_text(f"processor : 0\nflags : fpu {flags}\n")
    found = integer_products(Core(precision), product(ROWS), mode, tmp_path)
    assert found.get("INFERENCE_PRECISION_HINT") == ("f32" if expected else None)


def test_a_host_that_tells_nothing_has_no_products_in_integers(tmp_path: Path) -> None:
    assert integer_products(Core(ov.Type.bf16), product(ROWS), "performance", tmp_path) == {}


def test_products_in_groups_of_128_are_close_to_those_in_float32() -> None:
    states = np.random.default_rng(0).standard_normal((40, INPUTS)).astype(np.float32)
    model = product(ROWS)
    found = integer_products(Core(ov.Type.bf16), model, "performance") or {"INFERENCE_PRECISION_HINT": "f32"}
    exact, close = (
        ov.Core().compile_model(model, "CPU", {**properties, "DYNAMIC_QUANTIZATION_GROUP_SIZE": group})(states)[0]
        for properties, group in ((found, "0"), (found, "128"))
    )
    assert np.abs(exact - close).max() < 0.02 * np.abs(exact).max()
