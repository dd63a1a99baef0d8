"""Selects the sampled rows as early in a model's graph as possible.

After the last attention, no operation looks at other tokens. So the rest of the last layer, which is most of its
arithmetic, is computed for the sampled rows only: one of hundreds in a prompt (measured in docs/decisions/graphs.md).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import openvino as ov
from openvino import opset13

from headrace.worker.model.fused_projections import is_constant
from headrace.worker.model.rank_sum import SUM
from headrace.worker.model.window_tables import attentions

_ELEMENTWISE = {
    *("Add", "Subtract", "Multiply", "Divide", "Power", "Maximum", "Minimum"),
    *("Sqrt", "Exp", "Negative", "Abs", "Convert", "Clamp"),
    *("Swish", "Gelu", "Sigmoid", "Tanh", "Relu", "SoftPlus", "Mish", "HSwish"),
    SUM,
}
_REDUCTIONS = {"ReduceMean", "ReduceSum", "ReduceMax"}
_MOVES = {"Reshape", "Transpose", "Unsqueeze", "Squeeze"}


def states_of_rows(states: ov.Output, rows: ov.Output, model: ov.Model) -> ov.Output:
    """`states` `[T, ...]` of `rows` `[n]`, as `[n, ...]`. Row-wise operations before them are also computed for these
    rows only, unless one of them may not be row-wise."""
    tail = _tail(states, model)
    entries = None if tail is None else _entries(tail)
    if entries is None:
        return gathered(states, rows)
    of_rows: dict[tuple[str, int], ov.Output] = {}
    for port in entries:
        source = port.get_source_output()
        key = (source.get_node().get_friendly_name(), source.get_index())
        if key not in of_rows:
            of_rows[key] = gathered(source, rows)
        port.replace_source_output(of_rows[key])
    return states


def gathered(states: ov.Output, rows: ov.Output) -> ov.Output:
    """A node that gathers the rows `rows` `[n]` of `states` `[T, ...]`: `[n, ...]`."""
    return opset13.gather(states, rows, opset13.constant(np.int64(0))).output(0)


def _tail(states: ov.Output, model: ov.Model) -> Sequence[ov.Node] | None:
    """The operations from the last attention up to `states`, except those that only move data. None if one of them may
    look at several tokens."""
    paged = attentions(model)
    end = states.get_node()
    if not paged or end.get_friendly_name() == paged[-1].get_friendly_name():
        return None
    first = paged[-1].output(0)
    while len(users := _users(first)) == 1 and users[0].get_type_name() in _MOVES:
        first = users[0].output(0)
    found: dict[str, ov.Node] = {}
    waiting = users
    while waiting:
        node = waiting.pop()
        if node.get_friendly_name() in found:
            continue
        if not _is_row_wise(node):
            return None
        found[node.get_friendly_name()] = node
        if node.get_friendly_name() != end.get_friendly_name():
            waiting += [user for output in node.outputs() for user in _users(output)]
    return list(found.values()) if end.get_friendly_name() in found else None


def _users(output: ov.Output) -> list[ov.Node]:
    return [port.get_node() for port in output.get_target_inputs()]


def _rank(output: ov.Output) -> int:
    """Number of dimensions; -1 if unknown."""
    rank = output.get_partial_shape().rank
    return int(rank.get_length()) if rank.is_static else -1


def _is_row_wise(node: ov.Node) -> bool:
    kind = node.get_type_name()
    if kind == "MatMul":
        return is_constant(node.input_value(1)) and not node.get_attributes()["transpose_a"]
    if kind in _REDUCTIONS:
        rank = _rank(node.input_value(0))
        axes = node.input_value(1).get_node()
        is_known = rank > 1 and axes.get_type_name() == "Constant" and node.get_attributes()["keep_dims"]
        return is_known and all(axis in {-1, rank - 1} for axis in np.asarray(axes.data).reshape(-1).tolist())
    if kind == "Reshape":
        return _keeps_rows(node)
    return kind in _ELEMENTWISE


def _keeps_rows(reshape: ov.Node) -> bool:
    """Whether a Reshape copies its first dimension, so that it changes only the form of each row."""
    pattern = reshape.input_value(1).get_node()
    if not reshape.get_attributes()["special_zero"] or pattern.get_type_name() != "Constant":
        return False
    return bool(np.asarray(pattern.data).reshape(-1)[:1].tolist() == [0])


def _entries(tail: Sequence[ov.Node]) -> list[ov.Input] | None:
    """The inputs of the tail that have a value for each token. None if an input has another form."""
    names = {node.get_friendly_name() for node in tail}
    entries = []
    for node in tail:
        for port in node.inputs():
            source = port.get_source_output()
            rank = _rank(source if node.get_type_name() == "Reshape" else node.output(0))
            if source.get_node().get_friendly_name() in names or is_constant(source):
                continue
            shape = source.get_partial_shape()
            if rank < 2 or _rank(source) != rank or shape[0].is_static:
                return None
            if any(dimension.is_dynamic for dimension in list(shape)[1:-1]):
                return None
            entries.append(port)
    return entries
