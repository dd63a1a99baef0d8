"""Finds the maximum number of tokens of a step in which matrix products give each token the same bits.

OpenVINO multiplies compressed weights by kernels that it chooses by the number of rows. Two kernels add up in different
orders, so a token's keys, values and logits then depend on how many other tokens its step has. On CPUs with AVX2 and
without VNNI, the kernel changes between 80 rows and 81; docs/decisions/exactness.md has the list. No property of
OpenVINO reports it. But it does not depend on the size of a product, so a small product with weights of the model's
type, compiled like the model, shows it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.model.fused_projections import is_constant
from headrace.worker.model.step_limits import MIN_PROMPT_STEP

# The largest step that is tried. Larger ones count as not exact.
MOST_ROWS = 1024
# Large enough that kernels divide the sum into parts.
_INPUTS = 1024
_OUTPUTS = 64
_GROUP = 32
_COMPRESSED = {ov.Type.u4, ov.Type.i4, ov.Type.u8, ov.Type.i8}


def exact_rows(core: ov.Core, model: ov.Model, properties: Mapping[str, object]) -> int:
    """The largest number of tokens in a step, at most MOST_ROWS, for which each token has the same bits as in a step of
    MIN_PROMPT_STEP tokens. `properties` are those with which the model is compiled. Takes about a tenth of a second for
    each type of weights."""
    return min((_rows_alike(core, kind, properties) for kind in _weight_types(model)), default=MOST_ROWS)


def _weight_types(model: ov.Model) -> set[ov.Type]:
    found = set()
    for node in model.get_ops():
        if node.get_type_name() == "MatMul" and is_constant(node.input_value(1)):
            found |= set(_stored_types(node.input_value(1))) & _COMPRESSED
    return found


def _stored_types(weights: ov.Output) -> Iterator[ov.Type]:
    node = weights.get_node()
    if node.get_type_name() == "Constant":
        yield node.get_element_type()
    for value in node.input_values():
        yield from _stored_types(value)


def _rows_alike(core: ov.Core, kind: ov.Type, properties: Mapping[str, object]) -> int:
    """The largest count of equal rows whose products are equal too. A change between two tested counts is found by
    bisection."""
    request = core.compile_model(_product(kind), "CPU", dict(properties)).create_infer_request()
    row = np.random.default_rng(0).standard_normal(_INPUTS).astype(np.float32)

    def outputs(num_rows: int) -> set[bytes]:
        result = request.infer({0: np.broadcast_to(row, (num_rows, 1, _INPUTS)).copy()})[0]
        return {output.tobytes() for output in result}

    expected = outputs(MIN_PROMPT_STEP)
    if len(expected) > 1:
        return 0
    below, above = MIN_PROMPT_STEP, MOST_ROWS + 1
    for num_rows in (16, 32, 64, 128, 256, 512, MOST_ROWS):
        if outputs(num_rows) != expected:
            above = num_rows
            break
        below = num_rows
    while above - below > 1:
        middle = (below + above) // 2
        if outputs(middle) == expected:
            below = middle
        else:
            above = middle
    return below


def _product(kind: ov.Type) -> ov.Model:
    """A product with weights of a type, as exporters store them: in groups, each with a scale, and with a zero point if
    the type is unsigned."""
    rng = np.random.default_rng(1)
    shape = (_OUTPUTS, _INPUTS // _GROUP, _GROUP)
    weights = opset13.convert(_integers(rng, kind, shape), "f16")
    if kind in {ov.Type.u4, ov.Type.u8}:
        zeros = _integers(rng, kind, (*shape[:2], 1))
        weights = opset13.subtract(weights, opset13.convert(zeros, "f16"))
    scales = rng.uniform(0.01, 0.02, (*shape[:2], 1)).astype(np.float16)
    flat = opset13.reshape(
        opset13.multiply(weights, opset13.constant(scales)), opset13.constant(np.array([_OUTPUTS, _INPUTS])), False
    )
    states = opset13.parameter([-1, 1, _INPUTS], np.float32, "states")
    product = opset13.matmul(states, opset13.convert(flat, "f32"), False, True)
    return ov.Model([opset13.result(product)], [states], "product")


def _integers(rng: np.random.Generator, kind: ov.Type, shape: tuple[int, ...]) -> ov.Node:
    tensor = ov.Tensor(kind, ov.Shape(list(shape)))
    stored = tensor.data.reshape(-1).view(np.uint8)
    stored[:] = rng.integers(0, 256, stored.size, np.uint8)
    return opset13.constant(tensor)
