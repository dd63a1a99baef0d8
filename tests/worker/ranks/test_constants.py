"""Parts of compressed weights are those of the decompressed weights."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import openvino as ov
import pytest
from openvino import opset13

from headrace.worker.config import ConfigurationError
from headrace.worker.ranks.constants import ConstantCutter, keeps_groups
from headrace.worker.ranks.owners import Share
from headrace.worker.weights.file_memory import FileMemory

ROWS, COLUMNS, GROUP = 12, 192, 32
CORE = ov.Core()


def integers(kind: ov.Type, shape: Sequence[int]) -> ov.Node:
    tensor = ov.Tensor(kind, ov.Shape(list(shape)))
    stored = tensor.data.reshape(-1).view(np.uint8)
    stored[:] = np.random.default_rng(len(shape)).integers(0, 256, stored.size, np.uint8)
    return opset13.constant(tensor)


def scales(shape: Sequence[int]) -> ov.Node:
    return opset13.constant(np.random.default_rng(3).uniform(0.01, 0.1, shape).astype(np.float16))


def in_groups(kind: ov.Type, *, has_zeros: bool, group: int = GROUP) -> ov.Output:
    """Weights as nncf and GGUF files have them."""
    shape = [ROWS, COLUMNS // group, group]
    weights = opset13.convert(integers(kind, shape), "f16")
    if has_zeros:
        weights = opset13.subtract(weights, opset13.convert(integers(kind, [*shape[:2], 1]), "f16"))
    flat = opset13.reshape(
        opset13.multiply(weights, scales([*shape[:2], 1])), opset13.constant(np.array([ROWS, COLUMNS])), False
    )
    return opset13.convert(flat, "f32").output(0)


def by_row(kind: ov.Type) -> ov.Output:
    weights = opset13.convert(integers(kind, [ROWS, COLUMNS]), "f16")
    return opset13.convert(opset13.multiply(weights, scales([ROWS, 1])), "f32").output(0)


def transposed() -> ov.Output:
    values = np.random.default_rng(5).standard_normal((COLUMNS, ROWS)).astype(np.float32)
    return opset13.transpose(opset13.constant(values), opset13.constant(np.array([1, 0]))).output(0)


FORMS: dict[str, Callable[[], ov.Output]] = {
    "u4": lambda: in_groups(ov.Type.u4, has_zeros=True),
    "i4": lambda: in_groups(ov.Type.i4, has_zeros=False),
    "u8": lambda: in_groups(ov.Type.u8, has_zeros=True),
    "u4 in odd groups": lambda: in_groups(ov.Type.u4, has_zeros=True, group=64),
    "i8 by row": lambda: by_row(ov.Type.i8),
    "f32 transposed": transposed,
}


def computed(output: ov.Output) -> npt.NDArray[np.float32]:
    compiled = CORE.compile_model(ov.Model([opset13.result(output)], []), "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    found: npt.NDArray[np.float32] = compiled({})[0].copy()
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("axis", "positions"),
    [
        (0, range(4, 9)),
        (0, [0, 1, 7, 11]),
        (1, range(64, 192)),
        (1, [*range(64), *range(128, 192)]),
        # These split groups.
        (1, range(96)),
        (1, range(48, 80)),
    ],
)
def test_parts_are_those_of_the_decompressed_weights(form: str, axis: int, positions: Sequence[int]) -> None:
    weights = FORMS[form]()
    expected = np.take(computed(weights), list(positions), axis)
    part = ConstantCutter(FileMemory([])).cut(weights, axis, np.array(positions))
    assert part.get_element_type() == weights.get_element_type()
    np.testing.assert_array_equal(computed(part), expected)


def test_rows_of_compressed_weights_are_not_copied() -> None:
    weights = in_groups(ov.Type.u4, has_zeros=True)
    cutter = ConstantCutter(FileMemory([]))
    part = cutter.cut(weights, 0, np.arange(4, 9))
    source, made = (np.asarray(stored_in(output).data) for output in (weights, part))
    assert stored_in(part).get_element_type() == ov.Type.u4
    assert made.ctypes.data - source.ctypes.data == 4 * COLUMNS // 2


def stored_in(output: ov.Output) -> ov.Node:
    """The constant with the weights themselves."""
    node = output.get_node()
    while node.get_type_name() != "Constant":
        node = node.input_value(0).get_node()
    return node


def test_the_same_part_is_made_once() -> None:
    weights, cutter = by_row(ov.Type.i8), ConstantCutter(FileMemory([]))
    first, second = (cutter.cut(weights, 1, np.arange(64)) for _ in range(2))
    assert first.get_node().get_name() == second.get_node().get_name()


def test_groups_that_would_become_too_small_are_refused() -> None:
    weights = in_groups(ov.Type.u4, has_zeros=True)
    with pytest.raises(ConfigurationError, match="groups of 32 weights"):
        ConstantCutter(FileMemory([])).cut(weights, 1, np.arange(8))


def test_an_unknown_operation_on_weights_is_refused() -> None:
    weights = opset13.relu(by_row(ov.Type.i8)).output(0)
    with pytest.raises(ConfigurationError, match="Relu"):
        ConstantCutter(FileMemory([])).cut(weights, 1, np.arange(64))


@pytest.mark.parametrize(("border", "least", "fits"), [(64, 0, True), (48, 0, False), (48, 16, True), (40, 16, False)])
def test_borders_keep_groups_or_do_not(border: int, least: int, fits: bool) -> None:
    share = Share(1, np.repeat([1, 2], [border, COLUMNS - border]))
    assert keeps_groups(in_groups(ov.Type.u4, has_zeros=True), share, least) is fits
