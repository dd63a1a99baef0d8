"""A worker's learned step costs stay accurate: for minutes here, and for a day with HEADRACE_SOAK=1 (`make
soak-step-cost`)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import cast

import pytest

from headrace.protos.inference_pb2 import Belief
from headrace.sim import step_cost
from headrace.sim.step_cost import StepCost
from headrace.sim.trace import Job
from headrace.sim.worker import SimulatedWorker, WorkerSettings
from headrace.worker.engine.step_cost import StepShape
from tests.sim.soak import LOADS, WARM_UP_STEPS, soak

COSTS_OF_SIZES = {
    "135M": step_cost.default(),
    "7B": step_cost.read(step_cost.DEFAULT_FILE.with_name("step_cost_7b.json")),
}
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


class Disturbed:
    """A machine that takes `factors[n]` times as long for its n-th step. In the place of a StepCost."""

    def __init__(self, cost: StepCost, factors: Sequence[float]) -> None:
        self.cost, self.change = cost, cost.change
        self._factors = list(factors)

    def milliseconds(self, shape: StepShape) -> float:
        """See StepCost."""
        return (self._factors.pop(0) if self._factors else 1.0) * self.cost.milliseconds(shape)


def steps_of_prompts(machine: StepCost, *, number: int, num_streams: int = 0, length: int = 2000) -> list[int]:
    """Steps of each of so many prompts, one after the other, beside streams."""
    now_s = 0.0
    worker = SimulatedWorker(WorkerSettings(machine, kv_tokens=400_000, block_size=32), lambda: now_s)
    for name in range(num_streams):
        job = Job(10_000 + name, 0.0, ((10_000 + name, 64),), 100_000).hashed(32)
        worker.take(job.request(0.0), job, Belief())
    steps = []
    for name in range(number):
        job = Job(name, now_s, ((name, length),), 1).hashed(32)
        worker.take(job.request(now_s), job, Belief())
        ended, num_steps = False, 0
        while not ended:
            step_ms = worker.begin_step()
            assert step_ms is not None
            now_s += step_ms / 1000
            ended = any(output.is_last for output in worker.end_step(now_s)[0])
            num_steps += 1
        steps.append(num_steps)
    return steps


# Of the first four steps, a prompt of 64 tokens and one of 16 with a decode step each, which are a worker's warm-up.
DISTURBANCES = {
    "all slow": (10.0,) * 4,
    "all fast": (0.1,) * 4,
    "the larger slow": (10.0, 1.0, 1.0, 1.0),
    "the smaller slow": (1.0, 1.0, 10.0, 1.0),
    "slow for 40 steps": (10.0,) * 40,
}


@pytest.fixture(scope="module")
def undisturbed() -> dict[tuple[str, int], list[int]]:
    """The steps of each prompt where nothing else runs, by machine and number of streams."""
    return {
        (name, num_streams): steps_of_prompts(COSTS_OF_SIZES[name], number=16, num_streams=num_streams)
        for name in COSTS_OF_SIZES
        for num_streams in (0, 8)
    }


@pytest.mark.parametrize("num_streams", [0, 8])
@pytest.mark.parametrize("disturbance", DISTURBANCES)
@pytest.mark.parametrize("machine", COSTS_OF_SIZES)
def test_a_start_on_a_busy_machine_is_forgotten_within_a_few_prompts(
    machine: str, disturbance: str, num_streams: int, undisturbed: dict[tuple[str, int], list[int]]
) -> None:
    disturbed = cast("StepCost", Disturbed(COSTS_OF_SIZES[machine], DISTURBANCES[disturbance]))
    steps = steps_of_prompts(disturbed, number=16, num_streams=num_streams)
    right = undisturbed[machine, num_streams][-1]
    assert right / 2.5 <= steps[-1] <= 2.5 * right
