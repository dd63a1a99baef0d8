"""Decides whether products with compressed weights are computed in 8-bit integers.

A CPU with AVX-512 that has bfloat16 and VNNI, but no AMX, multiplies twice as many 8-bit integers as bfloat16 numbers
in an instruction. OpenVINO uses these instructions in graphs of float32: it quantises the inputs of a product to 8
bits, in groups with a scale each. With groups of 128 inputs a product takes 0.6 to 0.8 of its time in bfloat16, and its
errors are as large; with groups of 32, OpenVINO's default, it takes as long. Inputs of a group must have weights with
one scale. docs/decisions/graphs.md has the measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import openvino as ov

from headrace.worker.host.precision import computes_in_bfloat16

GROUP = 128
_PROPERTIES = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": str(GROUP)}
_COMPRESSED = {ov.Type.u4, ov.Type.i4, ov.Type.u8, ov.Type.i8}
_DECOMPRESSION = {"Convert", "Subtract", "Multiply", "Reshape", "Transpose"}
# Smaller weights do not decide how long a graph takes.
_LEAST_WEIGHTS = 1 << 16


def integer_products(core: ov.Core, model: ov.Model, execution_mode: str, root: Path = Path("/")) -> dict[str, object]:
    """Properties with which OpenVINO computes the model's products in integers; empty where that is not faster, or not
    possible with its weights. `root` is "/" except in tests."""
    if execution_mode != "performance" or not computes_in_bfloat16(core):
        return {}
    flags = _cpu_flags(root)
    return dict(_PROPERTIES) if "avx512_vnni" in flags and "amx_tile" not in flags and fits(model) else {}


def fits(model: ov.Model) -> bool:
    """Whether all large weights of the model's products are compressed, in groups of a multiple of GROUP or with a
    scale for each output."""
    large = [found for found in _weights_of(model) if math.prod(found[0].get_output_shape(0)) >= _LEAST_WEIGHTS]
    return bool(large) and all(_fits(stored, rank) for stored, rank in large)


def _weights_of(model: ov.Model) -> Iterator[tuple[ov.Node, int]]:
    """The stored weights of products, and the number of dimensions in which the products see them."""
    for node in model.get_ops():
        if node.get_type_name() != "MatMul":
            continue
        for value in node.input_values():
            constants = _constants(value)
            if constants:
                largest = max(constants, key=lambda constant: math.prod(constant.get_output_shape(0)))
                yield largest, len(value.get_partial_shape())


def _constants(value: ov.Output) -> list[ov.Node]:
    """The constants that a value is decompressed from; empty if it is something else."""
    node = value.get_node()
    if node.get_type_name() == "Constant":
        return [node]
    if node.get_type_name() not in _DECOMPRESSION:
        return []
    parts = [_constants(source) for source in node.input_values()]
    return [constant for part in parts for constant in part] if all(parts) else []


def _fits(stored: ov.Node, rank: int) -> bool:
    """Whether the product of these stored weights is computed in integers. True only for weights `[outputs, inputs]` or
    `[outputs, groups, inputs of a group]`; others, such as those of several experts, are not known to be."""
    shape = stored.get_output_shape(0)
    if rank != 2 or stored.get_output_element_type(0) not in _COMPRESSED:
        return False
    return len(shape) == 2 or (len(shape) == 3 and shape[2] % GROUP == 0)


def _cpu_flags(root: Path) -> frozenset[str]:
    try:
        lines = (root / "proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split() for line in lines if line.startswith("flags")), ()))
