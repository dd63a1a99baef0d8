"""A simulated worker by itself."""

from __future__ import annotations

import random

import pytest

from headrace.protos.inference_pb2 import Belief
from headrace.sim import step_cost, trace
from headrace.sim.step_cost import StepCost
from headrace.sim.worker import SimulatedWorker, WorkerSettings

WITH_AMX = step_cost.read(step_cost.DEFAULT_FILE.with_name("step_cost_amx.json"))
BLOCK_SIZE = 32


def steps_of_prompts(cost: StepCost, *, max_num_batched_tokens: int) -> list[int]:
    """Tokens of the steps of prompts that come one by one, once the worker knows what steps cost."""
    settings = WorkerSettings(cost, block_size=BLOCK_SIZE, max_num_batched_tokens=max_num_batched_tokens)
    now_s, rng, sizes = 0.0, random.Random(3), []
    worker = SimulatedWorker(settings, lambda: now_s)
    for number in range(60):
        length = rng.randint(20, 250) if number < 40 else 1500
        job = trace.Job(number, now_s, ((number, length),), 1).hashed(BLOCK_SIZE)
        worker.take(job.request(now_s), job, Belief())
        while (step_ms := worker.begin_step()) is not None:
            before = worker.scheduler.stats.prompt_tokens_computed
            now_s += step_ms / 1000
            worker.end_step(now_s)
            if number >= 40:
                sizes.append(worker.scheduler.stats.prompt_tokens_computed - before)
    return sizes


def test_steps_of_prompts_alone_are_larger_where_that_makes_them_cheaper() -> None:
    with_amx = steps_of_prompts(WITH_AMX, max_num_batched_tokens=1024)
    assert max(with_amx) > 384
    assert max(steps_of_prompts(step_cost.default(), max_num_batched_tokens=1024)) <= 320


@pytest.mark.parametrize("most", [256, 320])
def test_no_step_is_larger_than_the_limit(most: int) -> None:
    assert max(steps_of_prompts(WITH_AMX, max_num_batched_tokens=most)) == most
