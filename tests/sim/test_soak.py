"""A worker's learned step costs stay accurate: for minutes here, and for a day with HEADRACE_SOAK=1 (`make
soak-step-cost`)."""

from __future__ import annotations

import os

import pytest

from headrace.sim import step_cost
from tests.sim.soak import LOADS, WARM_UP_STEPS, soak

HOURS = 24.0 if os.environ.get("HEADRACE_SOAK") else 0.05
COSTS = {
    "": step_cost.default(),
    "with AMX": step_cost.read(step_cost.DEFAULT_FILE.with_name("step_cost_amx.json")),
}


@pytest.mark.parametrize("name", LOADS)
@pytest.mark.parametrize("machine", COSTS)
def test_predictions_stay_within_twice_the_truth(name: str, machine: str) -> None:
    load = LOADS[name]
    costs = soak(load, COSTS[machine], HOURS)
    for predicted in costs.predicted.values():
        assert min(predicted[WARM_UP_STEPS:]) >= 0.5
        assert max(predicted[WARM_UP_STEPS:]) <= 2.0
    if load.target_step_ms is not None:
        middle = len(costs.mixed_ms) // 2
        for half_ms in (costs.mixed_ms[:middle], costs.mixed_ms[middle:]):
            assert sum(ms > 1.5 * load.target_step_ms for ms in half_ms) <= 0.01 * len(half_ms)
