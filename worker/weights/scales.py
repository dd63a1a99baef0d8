"""Keeps the scales of compressed weights out of the process's own memory.

Files have scales in float16, and OpenVINO's kernels need float32. OpenVINO would convert them, and keep the result in
memory beside its own copy of the weights. It uses scales that are already float32 in place, so they can be in a file
(see `FileMemory`). A zero point that all groups share becomes a single number.
"""

from __future__ import annotations

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.weights.file_memory import FileMemory

_COMPRESSED = {ov.Type.u4, ov.Type.i4, ov.Type.u8, ov.Type.i8}
# Smaller constants are not worth an operation on the graph.
_LEAST_BYTES = 1 << 14


def widen_scales(model: ov.Model, memory: FileMemory) -> int:
    """Replace float16 scales by the same numbers in float32, in `memory`. Returns how many constants were replaced.
    Results stay the same: OpenVINO computes with them in float32 in any case."""
    num_replaced = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() == "Multiply" and _widen(node, memory):
            num_replaced += 1
    model.validate_nodes_and_infer_types()
    return num_replaced


def _widen(multiply: ov.Node, memory: FileMemory) -> bool:
    left, scales = (value.get_node() for value in multiply.input_values())
    if scales.get_type_name() != "Constant" or scales.get_output_element_type(0) != ov.Type.f16:
        return False
    parts = _parts(left)
    converts = _converts_behind(multiply)
    if parts is None or not converts or scales.get_byte_size() < _LEAST_BYTES:
        return False
    weights, zeros = parts
    wide = opset13.convert(weights, "f32")
    if zeros is not None:
        wide = opset13.subtract(wide, opset13.convert(_shared(zeros), "f32"))
    wide = opset13.multiply(wide, _float32(scales, memory))
    wide.set_friendly_name(multiply.get_friendly_name())
    for convert in converts:
        source = convert.input_value(0).get_node()
        flat = wide
        if source.get_type_name() == "Reshape":
            flat = opset13.reshape(wide, source.input_value(1), source.get_attributes()["special_zero"])
        convert.output(0).replace(flat.output(0))
    return True


def _parts(node: ov.Node) -> tuple[ov.Output, ov.Output | None] | None:
    """The stored weights and zero points that a node decompresses without scales; None if it does something else."""
    inputs = [node] if node.get_type_name() == "Convert" else [value.get_node() for value in node.input_values()]
    if node.get_type_name() not in {"Convert", "Subtract"}:
        return None
    stored = []
    for convert in inputs:
        if convert.get_type_name() != "Convert" or convert.get_output_element_type(0) != ov.Type.f16:
            return None
        value = convert.input_value(0)
        if value.get_node().get_type_name() != "Constant" or value.get_element_type() not in _COMPRESSED:
            return None
        stored.append(value)
    return stored[0], stored[1] if len(stored) > 1 else None


def _converts_behind(multiply: ov.Node) -> list[ov.Node]:
    """The nodes that convert the decompressed weights to float32; empty if another node reads the weights."""
    users = [port.get_node() for port in multiply.output(0).get_target_inputs()]
    if len(users) == 1 and users[0].get_type_name() == "Reshape":
        users = [port.get_node() for port in users[0].output(0).get_target_inputs()]
    is_float32 = all(
        user.get_type_name() == "Convert" and user.get_output_element_type(0) == ov.Type.f32 for user in users
    )
    return users if is_float32 else []


def _shared(zeros: ov.Output) -> ov.Output:
    """The zero points as a single number, if all are equal."""
    stored = np.asarray(zeros.get_node().data).reshape(-1).view(np.uint8)
    first = int(stored[0])
    is_half = zeros.get_element_type().bitwidth == 4
    if stored.size < 2 or (stored != first).any() or (is_half and first & 15 != first >> 4):
        return zeros
    one = ov.Tensor(zeros.get_element_type(), ov.Shape([1] * len(zeros.get_shape())))
    one.data.reshape(-1).view(np.uint8)[:] = first & 15 if is_half else first
    return opset13.constant(one).output(0)


def _float32(scales: ov.Node, memory: FileMemory) -> ov.Node:
    shape = scales.get_output_shape(0)
    piece = memory.array(2 * scales.get_byte_size())
    piece.view(np.float32)[:] = np.asarray(scales.data).reshape(-1)
    return opset13.constant(ov.Tensor(piece, shape, ov.Type.f32), shared_memory=True)
