"""The cost of a step from its shape."""

from __future__ import annotations

import msgspec
import pytest

from headrace.sim.step_cost import StepCost, default
from headrace.worker.engine.step_cost import StepShape

COST = StepCost((1, 5, 25), (10.0, 14.0, 24.0), 0.5, 0.125, 0.25, 3.0, 7.0)


@pytest.mark.parametrize(("tokens", "base"), [(1, 10.0), (3, 12.0), (5, 14.0), (15, 19.0), (25, 24.0), (45, 34.0)])
def test_the_base_is_a_line_through_the_knots(tokens: int, base: float) -> None:
    assert COST.milliseconds(StepShape(tokens, 0, 0, 0, 0)) == pytest.approx(base)


def test_each_term_counts() -> None:
    assert COST.milliseconds(StepShape(1, 2, 8, 4, 5, changed=True)) == 10 + 0.5 * 2 + 0.125 * 8 + 0.25 * 4 + 3 * 5 + 7


@pytest.mark.parametrize("knots", [(1,), (5, 1, 25), (1, 1, 25), (1, 25)])
def test_knots_that_make_no_line_are_refused(knots: tuple[int, ...]) -> None:
    encoded = msgspec.json.encode({**msgspec.structs.asdict(COST), "knots": knots})
    with pytest.raises(ValueError, match="knots"):
        msgspec.json.decode(encoded, type=StepCost)


def test_the_committed_fit_says_where_it_comes_from_and_how_far_it_is_off() -> None:
    cost = default()
    assert cost.model
    assert cost.machine
    assert 0 < cost.median_error < 0.15
    assert cost.milliseconds(StepShape.of([(0, 256)])) > cost.milliseconds(StepShape.of([(0, 1)])) > 0
    assert cost.change > 0
