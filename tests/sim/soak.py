"""Loads of hours in virtual time, and the errors of a worker's predictions about its steps."""

from __future__ import annotations

import random
from array import array
from collections import defaultdict
from typing import NamedTuple, cast

from headrace.protos.inference_pb2 import Belief
from headrace.sim.step_cost import StepCost
from headrace.sim.trace import Job
from headrace.sim.worker import SimulatedWorker, WorkerSettings
from headrace.worker.engine.step_cost import StepCosts, StepShape

BLOCK_SIZE = 32
# Steps of a kind before its predictions count.
WARM_UP_STEPS = 20


class Load(NamedTuple):
    """Requests of log-normal prompts and exponential answers, in tokens. `together` of them are in flight at any time,
    or come at once every `every_s` if that is set."""

    together: int
    prompt: int
    output: int
    every_s: float = 0.0
    target_step_ms: float | None = None

    def job(self, number: int, now_s: float, rng: random.Random) -> Job:
        """The next request."""
        prompt = max(2, min(20_000, int(self.prompt * rng.lognormvariate(0, 0.5))))
        return Job(number, now_s, ((number, prompt),), 1 + int(rng.expovariate(1 / self.output))).hashed(BLOCK_SIZE)


LOADS = {
    "decode-heavy": Load(32, 60, 600),
    "long prompts": Load(4, 5000, 60),
    "bursty": Load(24, 300, 100, every_s=45.0),
    "mixed with a target": Load(8, 2000, 128, target_step_ms=60.0),
}


class Noisy:
    """A machine whose steps take up to a tenth more or less than they should, and one in 500 takes five times as long,
    because something else ran. In the place of a StepCost."""

    def __init__(self, cost: StepCost, rng: random.Random) -> None:
        self.cost = cost
        self.change = cost.change
        self._rng = rng

    def milliseconds(self, shape: StepShape) -> float:
        """See StepCost."""
        slower = 5.0 if self._rng.random() < 0.002 else self._rng.uniform(0.9, 1.1)
        return slower * self.cost.milliseconds(shape)


class WatchedCosts(StepCosts):
    """Records the prediction for each step before learning from it."""

    def __init__(self, cost: StepCost) -> None:
        super().__init__()
        self.predicted: dict[bool, array[float]] = defaultdict(lambda: array("f"))
        """How many times what a step should have taken was predicted: of decode steps, and of those with prompts."""
        self.mixed_ms = array("f")
        """Times of steps with prompts that streams had a part in."""
        self.mixed_tokens = array("f")
        """How many tokens of prompts each of those had."""
        self._cost = cost

    def observe(self, shape: StepShape, milliseconds: float, *, is_first: bool) -> None:
        """See StepCosts."""
        is_decode = shape.prompt_tokens == 0
        predicted = self.of(is_decode=is_decode).predict_ms(shape) / self._cost.milliseconds(shape)
        self.predicted[is_decode].append(predicted)
        if shape.context and shape.prompt_tokens:
            self.mixed_ms.append(milliseconds)
            self.mixed_tokens.append(shape.prompt_tokens)
        super().observe(shape, milliseconds, is_first=is_first)


def soak(load: Load, cost: StepCost, hours: float, seed: int = 1) -> WatchedCosts:
    """Run a load for some hours of virtual time."""
    rng, now_s, next_s, number, num_open = random.Random(seed), 0.0, 0.0, 0, 0
    machine = cast("StepCost", Noisy(cost, random.Random(seed + 1)))
    worker = SimulatedWorker(
        WorkerSettings(machine, kv_tokens=400_000, block_size=BLOCK_SIZE, target_step_ms=load.target_step_ms),
        lambda: now_s,
    )
    worker.scheduler.step_costs = costs = WatchedCosts(cost)
    while now_s < 3600 * hours:
        coming = load.together - num_open
        if load.every_s:
            coming = load.together if now_s >= next_s else 0
            next_s += load.every_s if coming else 0.0
        for _ in range(coming):
            job = load.job(number, now_s, rng)
            worker.take(job.request(now_s), job, Belief())
            number, num_open = number + 1, num_open + 1
        step_ms = worker.begin_step()
        if step_ms is None:
            now_s = max(now_s, next_s)
            continue
        now_s += step_ms / 1000
        num_open -= sum(output.is_last for output in worker.end_step(now_s)[0])
    return costs
