"""Operations over all tokens of a step, in graphs with nothing else."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import numpy as np
import openvino as ov
import pytest
from openvino import opset13

from headrace.worker.model.positions import UnservableError, settle_positions, take_positions

CORE = ov.Core()


def constant(*values: int) -> ov.Node:
    return opset13.constant(np.array(values, np.int64))


def model_of(values: Callable[[ov.Node, ov.Node], ov.Node]) -> ov.Model:
    """A model of `positions` `[T]` and `states` `[T, 4]`."""
    positions = opset13.parameter([-1], np.int64, "position_ids")
    positions.output(0).get_tensor().set_names({"position_ids"})
    states = opset13.parameter([-1, 4], np.float32, "states")
    return ov.Model([opset13.result(values(positions, states))], [positions, states], "positions")


def larger_of_two(positions: ov.Node, states: ov.Node) -> ov.Node:
    """The states times 10 in steps with a position beyond 99, else times 1."""
    largest = opset13.reduce_max(opset13.unsqueeze(positions, constant(1)), constant(0, 1), False)
    is_long = opset13.greater(opset13.add(largest, constant(1)), constant(100))
    factor = opset13.select(is_long, opset13.constant(np.float32(10)), opset13.constant(np.float32(1)))
    return opset13.multiply(states, factor)


def counting(rows: int, *, has_unused: bool) -> ov.Model:
    """A model of tokens `[batch, tokens]` that counts their positions from a past length, like Qwen3.5. It may have an
    input of positions that nothing reads."""
    tokens = opset13.parameter([-1, -1], np.int64, "input_ids")
    past = opset13.parameter([], np.int64, "past")
    for node, name in ((tokens, "input_ids"), (past, "past")):
        node.output(0).get_tensor().set_names({name})
    shape = opset13.shape_of(tokens)
    length = opset13.gather(shape, opset13.constant(np.int64(1)), opset13.constant(np.int64(0)))
    counted = opset13.range(past, opset13.add(past, length), opset13.constant(np.int64(1)), "i64")
    row = opset13.reshape(counted, constant(1, 1, -1), special_zero=False)
    repeated = opset13.broadcast(row, opset13.concat([constant(rows), shape], 0))
    values = opset13.add(opset13.convert(repeated, "f32"), opset13.convert(tokens, "f32"))
    unused = opset13.parameter([-1, -1], np.int64, "position_ids")
    unused.output(0).get_tensor().set_names({"position_ids"})
    return ov.Model([opset13.result(values)], [tokens, past, *([unused] if has_unused else [])], "counting")


@pytest.mark.parametrize("has_unused", [False, True])
def test_a_model_that_counts_positions_reads_them_from_an_input(has_unused: bool) -> None:
    model = counting(4, has_unused=has_unused)
    take_positions(model)
    assert {port.any_name for port in model.inputs} == {"input_ids", "past", "position_ids"}
    tokens, positions = np.array([[1, 2], [3, 4]]), np.array([[7, 8], [100, 101]])
    compiled = CORE.compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1})
    found = compiled({"input_ids": tokens, "past": np.int64(5), "position_ids": positions})[0]
    np.testing.assert_array_equal(found, np.broadcast_to(tokens + positions, (4, 2, 2)))
    take_positions(model)
    assert len(model.inputs) == 3


def counted_angles(_positions: ov.Node, states: ov.Node) -> ov.Node:
    """Numbers of the states' rows, from a length."""
    length = opset13.gather(opset13.shape_of(states), constant(1), constant(0))
    return opset13.convert(length, "f32")


def angles_of_states(_positions: ov.Node, states: ov.Node) -> ov.Node:
    """Angles that depend on what positions do not tell."""
    return opset13.gather(states, constant(0), constant(1))


@pytest.mark.parametrize("angles", [counted_angles, angles_of_states])
def test_rotations_by_counted_positions_are_refused(angles: Callable[[ov.Node, ov.Node], ov.Node]) -> None:
    model = model_of(lambda positions, states: opset13.multiply(states, opset13.cos(angles(positions, states))))
    with pytest.raises(UnservableError, match="its graph counts positions itself"):
        settle_positions(model, 64)


def test_rotations_may_also_depend_on_other_inputs() -> None:
    """As on the positions of images."""
    model = model_of(
        lambda positions, states: opset13.cos(
            opset13.add(states, opset13.unsqueeze(opset13.convert(positions, "f32"), constant(1)))
        )
    )
    assert not settle_positions(model, 64)


def test_a_model_that_counts_nothing_is_left_alone() -> None:
    model = model_of(lambda positions, states: opset13.multiply(states, states))
    model.inputs[0].get_tensor().set_names({"others"})
    take_positions(model)
    assert len(model.inputs) == 2


@pytest.mark.parametrize(("context", "factor"), [(100, 1.0), (101, 10.0)])
def test_the_largest_position_is_that_of_the_context(context: int, factor: float) -> None:
    model = model_of(larger_of_two)
    assert settle_positions(model, context)
    request = CORE.compile_model(model, "CPU").create_infer_request()
    for position in (5, 500):
        result = request.infer([np.array([position]), np.ones((1, 4), np.float32)])[0]
        assert result.tolist() == [[factor] * 4]


@pytest.mark.parametrize(
    "values",
    [
        lambda positions, states: opset13.reduce_min(positions, constant(0), False),
        lambda positions, states: opset13.reduce_max(opset13.add(positions, positions), constant(0), False),
        lambda positions, states: opset13.cum_sum(positions, constant(0)),
        lambda positions, states: opset13.reduce_mean(states, constant(0), True),
        lambda positions, states: opset13.softmax(states, 0),
        lambda positions, states: opset13.range(
            opset13.constant(np.int64(0)),
            opset13.gather(opset13.shape_of(states), opset13.constant(np.int64(0)), opset13.constant(np.int64(0))),
            opset13.constant(np.int64(1)),
            "i64",
        ),
    ],
)
def test_what_else_is_taken_over_all_tokens_is_refused(values: Callable[[ov.Node, ov.Node], ov.Node]) -> None:
    with pytest.raises(UnservableError, match="over all tokens of a step"):
        settle_positions(model_of(values), 100)


@pytest.mark.parametrize(
    "values",
    [
        lambda positions, states: opset13.reduce_mean(states, constant(-1), True),
        lambda positions, states: opset13.softmax(states, 1),
        lambda positions, states: opset13.cos(opset13.convert(positions, "f32")),
    ],
)
def test_what_is_taken_of_each_token_is_left_alone(values: Callable[[ov.Node, ov.Node], ov.Node]) -> None:
    assert not settle_positions(model_of(values), 100)


def test_a_table_of_positions_is_as_long_as_the_context() -> None:
    table = opset13.constant(np.zeros((64, 4), np.float32))
    model = model_of(lambda positions, states: opset13.gather(table, positions, opset13.constant(np.int64(0))))
    settle_positions(model, 64)
    with pytest.raises(UnservableError, match="64 positions"):
        settle_positions(model, 65)


@pytest.mark.parametrize(("axis", "is_servable"), [(1, True), (0, False)])
def test_a_part_of_each_tokens_values_may_be_assigned_but_not_a_part_of_the_tokens(
    axis: int, is_servable: bool
) -> None:
    """As Qwen3-VL puts the factors of three rows of positions together. Exporters number all elements."""

    def assigned(positions: ov.Node, states: ov.Node) -> ov.Node:
        shape = opset13.shape_of(states)
        count = opset13.reduce_prod(shape, np.int64(0), keep_dims=False)
        numbers = opset13.reshape(opset13.range(np.int64(0), count, np.int64(1), "i64"), shape, special_zero=False)
        part = opset13.slice(numbers, constant(0), constant(1), constant(1), constant(axis))
        places = opset13.reshape(part, constant(-1, 1), special_zero=False)
        values = opset13.broadcast(np.float32(7), opset13.gather(shape, constant(0), np.int64(0)))
        flat = opset13.reshape(states, constant(-1), special_zero=False)
        return opset13.reshape(opset13.scatter_nd_update(flat, places, values), shape, special_zero=False)

    model = model_of(assigned)
    with nullcontext() if is_servable else pytest.raises(UnservableError, match="over all tokens of a step"):
        settle_positions(model, 100)
