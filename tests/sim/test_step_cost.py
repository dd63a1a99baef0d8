"""The cost of a step from its shape."""

from __future__ import annotations

from headrace.sim.step_cost import StepCost, StepShape, default


def test_the_shape_counts_what_each_new_token_attends_to() -> None:
    assert StepShape.of([(10, 1)]) == (1, 11, 11, 1)
    assert StepShape.of([(10, 3)]) == (3, 11 + 12 + 13, 13, 1)
    assert StepShape.of([(10, 3), (0, 2)]) == (5, 36 + 1 + 2, 15, 2)


def test_a_chunked_prompt_attends_to_as_much_as_a_whole_one() -> None:
    whole = StepShape.of([(0, 100)])
    chunks = [StepShape.of([(past, 25)]) for past in (0, 25, 50, 75)]
    assert sum(chunk.attended for chunk in chunks) == whole.attended


def test_coefficients_stand_in_the_order_of_the_features() -> None:
    shape = StepShape(2, 3, 5, 7)
    cost = StepCost(11.0, 13.0, 17.0, 19.0, 23.0)
    assert cost.milliseconds(shape) == 11 + 13 * 2 + 17 * 3 + 19 * 5 + 23 * 7
    by_features = (11.0, 13.0, 17.0, 19.0, 23.0)
    assert cost.milliseconds(shape) == sum(c * f for c, f in zip(by_features, shape.features, strict=True))


def test_the_committed_fit_says_where_it_comes_from_and_how_far_it_is_off() -> None:
    cost = default()
    assert cost.model
    assert cost.machine
    assert 0 < cost.median_error < 0.15
    assert cost.milliseconds(StepShape.of([(0, 256)])) > cost.milliseconds(StepShape.of([(0, 1)])) > 0
