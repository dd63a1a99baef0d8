"""Finds operations outside of attention that depend on the positions of a step's tokens, and replaces or refuses them.

A step holds tokens of many sequences. An operation over all of them would let one sequence change another:

- Rotary factors that depend on the largest position (LongRoPE, dynamic NTK). That position is replaced by a
  constant, the last position of the longest context. So every token of every step has the same factors.
- Positions that the graph counts itself, from one past length for all sequences: the position input takes their place.
- Rotations by positions that the graph counts over all tokens of a step: the model is refused.
- Other sums, maxima and the like over the tokens of a step: the model is refused.

Positions beyond the end of a table of learned positions would read its last row, so the context must not exceed the
table.
"""

from __future__ import annotations

import enum
import logging

import numpy as np
import openvino as ov
from openvino import opset13

log = logging.getLogger(__name__)

_REDUCTIONS = {"ReduceMax", "ReduceMin", "ReduceSum", "ReduceMean", "ReduceProd", "ReduceL1", "ReduceL2"}
_ALONG_AN_AXIS = {"CumSum", "Softmax", "LogSoftmax"}
_ROTATIONS = {"Cos", "Sin"}
_MOVES = {"Unsqueeze", "Squeeze", "Reshape", "Convert", "Transpose"}
# The index of the input with the axes, for operators that take a part of a tensor.
_PARTS = {"Slice": 4, "Gather": 2}

_POSITIONS = "position_ids"
# Which dimensions of positions in rows are dynamic: [rows, batch, tokens].
_ROWS = [False, True, True]


class UnservableError(Exception):
    """Why a graph cannot be served, as the end of a sentence that begins with the model."""


class _Kind(enum.IntEnum):
    """How a value depends on the tokens of a step. A node has the highest kind of its inputs."""

    CONSTANT = 0
    SHAPE = 1
    POSITION = 2
    TOKENS = 3


def take_positions(model: ov.Model) -> None:
    """Let a model read positions from an input if it counts one row for all its tokens itself, as Qwen3.5's text models
    do: 1-D -> [rows, batch, tokens], for time, height and width. Must come before paging."""
    parameter = next((node for node in model.get_parameters() if _POSITIONS in node.output(0).get_names()), None)
    if parameter is not None and parameter.output(0).get_target_inputs():
        return
    counted = [node for node in model.get_ordered_ops() if _is_counted(node)]
    if not counted:
        return
    if parameter is None:
        parameter = opset13.parameter([-1, -1], np.int64, _POSITIONS)
        parameter.output(0).get_tensor().set_names({_POSITIONS})
        model.add_parameters([parameter])
    of_one = opset13.unsqueeze(parameter, opset13.constant(np.int64(0)))
    for node in counted:
        rows = opset13.concat([of_one] * int(node.get_output_partial_shape(0)[0].get_length()), 0)
        kind = node.get_output_element_type(0).get_type_name()
        node.output(0).replace(opset13.convert(rows, kind).output(0))
    model.validate_nodes_and_infer_types()


def _is_counted(node: ov.Node) -> bool:
    """Whether the node repeats a range for each row and each sequence."""
    shape = node.get_output_partial_shape(0) if node.get_output_size() else None
    if node.get_type_name() != "Broadcast" or shape is None or shape.rank.is_dynamic or len(shape) != len(_ROWS):
        return False
    if [dimension.is_dynamic for dimension in shape] != _ROWS or shape[0].get_length() == 1:
        return False
    source = node.input_value(0).get_node()
    while source.get_type_name() in _MOVES:
        source = source.input_value(0).get_node()
    return bool(source.get_type_name() == "Range")


def settle_positions(model: ov.Model, max_context_tokens: int) -> bool:
    """Make each token of a paged model independent of the other tokens of its step. Returns whether the model then
    depends on `max_context_tokens`. Raises UnservableError if something is taken over all tokens in an
    unknown way, or if the model has fewer positions than `max_context_tokens`."""
    depends_on_context = False
    kinds: dict[str, _Kind] = {}
    placed: set[str] = set()  # what depends on the positions of the input
    for node in model.get_ordered_ops():
        kind = kinds[node.get_name()] = _kind_of(node, kinds)
        if _is_table_of_positions(node, kinds):
            _check_length(node, max_context_tokens)
        if kind is _Kind.POSITION or any(value.get_node().get_name() in placed for value in node.input_values()):
            placed.add(node.get_name())
        elif node.get_type_name() in _ROTATIONS and kind is not _Kind.CONSTANT:
            raise UnservableError(
                "its graph counts positions itself, over all tokens of a step, instead of taking them; export the "
                "original with headrace pull OWNER/NAME --weights int8"
            )
        if not _takes_all_tokens(node, kind):
            continue
        if node.get_type_name() == "ReduceMax" and kind is _Kind.POSITION and _is_of_positions_only(node):
            largest = opset13.constant(np.full(node.get_output_shape(0), max_context_tokens - 1, np.int64))
            kind_of_number = node.get_output_element_type(0).get_type_name()
            constant = opset13.convert(largest, kind_of_number)
            kinds[constant.get_name()] = _Kind.CONSTANT
            node.output(0).replace(constant.output(0))
            depends_on_context = True
            continue
        log.info("%s %s works over all tokens of a step", node.get_type_name(), node.get_friendly_name())
        raise UnservableError(
            "it computes something over all tokens of a step outside of attention, so one request would change the "
            "answer to another; serve a model of another architecture"
        )
    model.validate_nodes_and_infer_types()
    return depends_on_context


def _kind_of(node: ov.Node, kinds: dict[str, _Kind]) -> _Kind:
    name = node.get_type_name()
    if name == "Parameter":
        return _Kind.POSITION if _POSITIONS in node.output(0).get_names() else _Kind.TOKENS
    if name == "ShapeOf":
        return _Kind.SHAPE
    return max((kinds[value.get_node().get_name()] for value in node.input_values()), default=_Kind.CONSTANT)


def _takes_all_tokens(node: ov.Node, kind: _Kind) -> bool:
    """Whether one output value is computed from several tokens. Integers other than positions are ignored: they count
    tokens for experts, which determines where a token is computed but not its result."""
    name = node.get_type_name()
    if name == "Range":
        is_dynamic = kind is not _Kind.CONSTANT and node.get_output_partial_shape(0).is_dynamic
        return is_dynamic and not _numbers_elements(node)
    if name not in _REDUCTIONS and name not in _ALONG_AN_AXIS:
        return False
    is_count = kind is _Kind.TOKENS and bool(node.get_output_element_type(0).is_integral())
    if kind < _Kind.POSITION or is_count:
        return False
    shape = node.get_input_partial_shape(0)
    if shape.rank.is_dynamic:
        return True
    return any(shape[axis].is_dynamic for axis in _axes(node, shape.rank.get_length()))


def _numbers_elements(numbers: ov.Node) -> bool:
    """Whether a range numbers all elements of a tensor for the only purpose of an assignment to a part of each token's
    elements."""
    end = numbers.input_value(1).get_node()
    if end.get_type_name() != "ReduceProd":
        return False
    of_tensor = list(numbers.output(0).get_target_inputs())
    shape = end.input_value(0)
    if any(port.get_node().get_type_name() != "Reshape" or port.get_index() for port in of_tensor):
        return False
    if any(port.get_node().input_value(1) != shape for port in of_tensor):
        return False
    waiting = [port.get_node() for port in of_tensor]
    while waiting:
        for port in waiting.pop().output(0).get_target_inputs():
            user = port.get_node()
            if user.get_type_name() == "ScatterNDUpdate" and port.get_index() == 1:
                continue
            if port.get_index() or not _keeps_tokens(user):
                return False
            waiting.append(user)
    return True


def _keeps_tokens(node: ov.Node) -> bool:
    """Whether a node only takes a part of each token's elements, or rearranges them."""
    name = node.get_type_name()
    if name in _MOVES:
        return True
    if name not in {"Slice", "Gather"} or node.get_input_size() <= _PARTS[name]:
        return False
    axes, shape = node.input_value(_PARTS[name]).get_node(), node.get_input_partial_shape(0)
    if axes.get_type_name() != "Constant" or shape.rank.is_dynamic:
        return False
    return all(shape[int(axis)].is_static for axis in np.asarray(axes.data).reshape(-1))


def _axes(node: ov.Node, rank: int) -> list[int]:
    """Axes along which a node works; all axes if unknown."""
    if node.get_type_name() in {"Softmax", "LogSoftmax"}:
        return [int(node.get_attributes()["axis"]) % rank]
    axes = node.input_value(1).get_node()
    if axes.get_type_name() != "Constant":
        return list(range(rank))
    return [int(axis) % rank for axis in np.asarray(axes.data).reshape(-1).tolist()]


def _is_of_positions_only(node: ov.Node) -> bool:
    """Whether the node takes the maximum of the positions themselves, not of values computed from them."""
    source = node.input_value(0).get_node()
    while source.get_type_name() in _MOVES:
        source = source.input_value(0).get_node()
    return source.get_type_name() == "Parameter" and bool(node.get_output_partial_shape(0).is_static)


def _is_table_of_positions(node: ov.Node, kinds: dict[str, _Kind]) -> bool:
    if node.get_type_name() != "Gather":
        return False
    table, index = (kinds[node.input_value(port).get_node().get_name()] for port in (0, 1))
    return table is _Kind.CONSTANT and index is _Kind.POSITION and node.get_input_partial_shape(0).is_static


def _check_length(gather: ov.Node, max_context_tokens: int) -> None:
    num_positions = int(gather.get_input_shape(0)[0])
    if num_positions < max_context_tokens:
        raise UnservableError(
            f"it has {num_positions} positions and none for a context of {max_context_tokens} tokens; say "
            f"--max-context-tokens {num_positions} or less"
        )
