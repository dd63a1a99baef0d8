"""Computes query, key and value of an attention with one product instead of three, since all multiply the same states.

Each product of a step costs about 20 us besides its arithmetic: its input is quantised and the threads synchronise
twice. In a small model that is a large part of a decode step. docs/decisions/graphs.md has measurements, and says why
gates are not fused.

Weights are concatenated in their stored form, so all numbers and scales stay the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.weights.file_memory import FileMemory

# Operations that decompress weights. Others may mix rows.
_ELEMENTWISE = {"Subtract": opset13.subtract, "Multiply": opset13.multiply}
_QUERY_KEY_VALUE = range(3)
# The node that splits the result of a fused product is named after the replaced products, in the order of its outputs.
NAME_SEPARATOR = " | "


def fuse_projections(model: ov.Model, memory: FileMemory) -> int:
    """Fuse the projections of a model with PagedAttention where possible, with their weights in `memory`. Returns the
    number of fused products."""
    num_fused = 0
    for node in model.get_ordered_ops():
        if node.get_type_name() != "PagedAttentionExtension":
            continue
        groups = products_to_fuse([node.input_value(index) for index in _QUERY_KEY_VALUE])
        num_fused += sum(fuse(products, memory) for products in groups)
    model.validate_nodes_and_infer_types()
    return num_fused


def products_to_fuse(values: Sequence[ov.Output]) -> list[list[ov.Node]]:
    """Groups of products before an attention, each group computable by one product. A product that already serves
    several inputs is left out."""
    found = {product.get_friendly_name(): product for product in map(projection, values) if product is not None}
    groups: dict[object, list[ov.Node]] = {}
    for product in found.values():
        groups.setdefault(_likeness(product), []).append(product)
    return [products for products in groups.values() if len(products) > 1]


def projection(output: ov.Output) -> ov.Node | None:
    """The matrix product with constant weights that computes `output`, an input of an attention; None if the graph has
    another form."""
    seen = set()
    found = []
    waiting = [output.get_node()]
    while waiting:
        node = waiting.pop()
        if node.get_friendly_name() in seen:
            continue
        seen.add(node.get_friendly_name())
        if node.get_type_name() == "MatMul" and is_constant(node.input_value(1)):
            found.append(node)
        else:
            waiting += [value.get_node() for value in node.input_values()]
    return found[0] if len(found) == 1 else None


def is_constant(output: ov.Output) -> bool:
    """Whether the value is the same in every step."""
    waiting = [output]
    while waiting:
        part = waiting.pop()
        values = part.get_node().input_values()
        if part.get_partial_shape().is_dynamic or not (values or part.get_node().get_type_name() == "Constant"):
            return False
        waiting += values
    return True


def _likeness(product: ov.Node) -> object:
    """A key that is equal for products of the same states whose weights are stored in the same way."""
    source = product.input_value(0)
    return source.get_node().get_friendly_name(), source.get_index(), _storage(product.input_value(1))


def _storage(output: ov.Output) -> object:
    node = output.get_node()
    parts = tuple(_storage(value) for value in node.input_values())
    is_pattern = output.get_element_type() == ov.Type.i64
    shape = () if is_pattern else tuple(output.get_shape())[1:]
    return node.get_type_name(), output.get_element_type().get_type_name(), shape, parts


def fuse(products: Sequence[ov.Node], memory: FileMemory) -> bool:
    """Replace several products of the same states, and the biases of their columns, by one. Returns False if their
    weights cannot be concatenated."""
    orders = [product.get_attributes() for product in products]
    if any(order["transpose_a"] or not order["transpose_b"] for order in orders):
        return False
    weights = _stacked([product.input_value(1) for product in products], 0, memory)
    if weights is None:
        return False
    fused = opset13.matmul(products[0].input_value(0), weights, False, True)
    ends = list(products)
    sums = [bias_of(product) for product in products]
    if all(sums):
        biases = _stacked([bias for _, bias in filter(None, sums)], -1, memory)
        if biases is not None:
            fused = opset13.add(fused, biases)
            ends = [add for add, _ in filter(None, sums)]
    lengths = [product.get_output_partial_shape(0)[-1].get_length() for product in products]
    parts = opset13.variadic_split(fused, opset13.constant(np.int64(-1)), opset13.constant(np.array(lengths)))
    parts.set_friendly_name(NAME_SEPARATOR.join(product.get_friendly_name() for product in products))
    for index, end in enumerate(ends):
        end.output(0).replace(parts.output(index))
    return True


def bias_of(product: ov.Node) -> tuple[ov.Node, ov.Output] | None:
    """The node that adds a bias to a product, and the bias."""
    users = [port.get_node() for port in product.output(0).get_target_inputs()]
    if len(users) != 1 or users[0].get_type_name() != "Add":
        return None
    length = product.get_output_partial_shape(0)[-1].get_length()
    for value in users[0].input_values():
        if is_constant(value) and value.get_shape()[-1:] == [length] and math.prod(value.get_shape()) == length:
            return users[0], value
    return None


def _stacked(outputs: Sequence[ov.Output], axis: int, memory: FileMemory) -> ov.Node | None:
    """The concatenated outputs of equal graphs of constants; None if they cannot be concatenated."""
    nodes = [output.get_node() for output in outputs]
    kind = nodes[0].get_type_name()
    if any(node.get_type_name() != kind for node in nodes):
        return None
    if kind == "Constant":
        return _stacked_constants(nodes, axis, memory)
    inputs = [[node.input_value(index) for node in nodes] for index in range(nodes[0].get_input_size())]
    if kind == "Convert":
        values = _stacked(inputs[0], axis, memory)
        return None if values is None else opset13.convert(values, outputs[0].get_element_type().get_type_name())
    if kind == "Reshape":
        values = _stacked(inputs[0], axis, memory)
        shapes = [list(output.get_shape()) for output in outputs]
        shape = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
        return None if values is None or axis else opset13.reshape(values, opset13.constant(np.array(shape)), False)
    if kind in _ELEMENTWISE:
        left, right = (_stacked(values, axis, memory) for values in inputs)
        return None if left is None or right is None else _ELEMENTWISE[kind](left, right)
    return None


def _stacked_constants(constants: Sequence[ov.Node], axis: int, memory: FileMemory) -> ov.Node | None:
    shapes = [list(constant.get_output_shape(0)) for constant in constants]
    kind = constants[0].get_output_element_type(0)
    if any(constant.get_output_element_type(0) != kind for constant in constants):
        return None
    parts = [np.asarray(constant.data).reshape(-1).view(np.uint8) for constant in constants]
    if not shapes[0] or all(shape[axis] == 1 for shape in shapes):
        # A number for all rows can stay if it is the same in all graphs.
        is_same = all(np.array_equal(part, parts[0]) for part in parts)
        return constants[0] if is_same else None
    if any(shape[axis] == 1 for shape in shapes):
        return None
    lengths = [math.prod(shape) for shape in shapes]
    is_behind = axis == 0 or all(length == shape[-1] for length, shape in zip(lengths, shapes, strict=True))
    if not is_behind or any(length * kind.bitwidth % 8 for length in lengths):
        return None
    shape = shapes[0].copy()
    shape[axis] = sum(shape[axis] for shape in shapes)
    stacked = memory.array(sum(part.size for part in parts))
    np.concatenate(parts, out=stacked)
    return opset13.constant(ov.Tensor(stacked, ov.Shape(shape), kind), shared_memory=True)
