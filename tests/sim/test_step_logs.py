"""Costs of steps from logs: made from known costs, and found again."""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Iterator

import pytest
from msgspec import structs

from headrace.sim import step_logs
from headrace.sim.step_cost import StepCost
from headrace.sim.step_logs import LearnedCost, LoggedStep
from headrace.worker.engine.step_cost import StepShape

DECODE = StepCost((1, 64), (10.0, 41.5), 0.0, 0.0, 0.002, 0.0, 1.5)
PROMPTS = StepCost((8, 1024), (12.0, 418.4), 0.0001, 0.001, 0.002, 0.0, 0.0)


def shapes(rng: random.Random, count: int) -> Iterator[StepShape]:
    for number in range(count):
        batch = rng.choice((1, 2, 4, 8, 16, 32, 64))
        streams = [(rng.randrange(16, 2000), 1) for _ in range(batch)]
        if number % 3:
            yield StepShape.of(streams, changed=rng.random() < 0.5)
        else:
            yield StepShape.of([*streams[:8], (rng.randrange(0, 3000), rng.randrange(8, 512))], changed=True)


def logged(worker: str, rng: random.Random, start_s: float, count: int, stretch: float = 1.0) -> list[LoggedStep]:
    """Steps one after the other, 1 ms apart, with an error of up to 2 %."""
    found = []
    for shape in shapes(rng, count):
        cost = PROMPTS if shape.prompt_tokens else DECODE
        ms = stretch * (cost.milliseconds(shape) * rng.uniform(0.98, 1.02) - 1.0)
        found.append(LoggedStep(worker, start_s, ms, "main", **shape._asdict()))
        start_s += (ms + 1.0) / 1000
    return found


def test_a_fit_finds_the_costs_again_with_the_time_between_steps() -> None:
    steps = step_logs.timed(logged("a", random.Random(1), 5.0, 900), 5.0)
    fit = step_logs.fit(steps, "a model", "a host")
    assert fit.slowdown == 0
    assert fit.steps.decode.median_error < 0.02
    assert fit.steps.prompts.median_error < 0.03
    for shape in (StepShape.of([(500, 1)] * 8), StepShape.of([(1000, 256)], changed=True)):
        cost = PROMPTS if shape.prompt_tokens else DECODE
        assert fit.steps.milliseconds(shape) == pytest.approx(cost.milliseconds(shape), rel=0.06)


def test_a_fit_finds_what_shared_positions_save() -> None:
    rng = random.Random(3)
    cost = structs.replace(DECODE, saving=0.0008)
    plain = step_logs.timed(logged("a", rng, 5.0, 900), 5.0)
    steps = [*plain]
    for _ in range(300):
        batch = rng.choice((4, 8, 16))
        shape = StepShape.of([(rng.randrange(600, 900), 1)] * batch, shared=512 * (batch - rng.choice((1, 2, 4))))
        steps.append(step_logs.Timed(shape, cost.milliseconds(shape) * rng.uniform(0.98, 1.02), 0.0))
    found = step_logs.fit(steps, "a model", "a host").steps.decode
    assert found.per_context == pytest.approx(0.002, rel=0.1)
    assert found.saving == pytest.approx(0.0008, rel=0.15)
    dear = [step._replace(ms=step.ms + 0.002 * step.shape.shared) for step in steps]
    assert step_logs.fit(dear, "a model", "a host").steps.decode.saving == 0, "shared positions that cost more"
    assert step_logs.fit(plain, "a model", "a host").steps.decode.saving == 0


def test_steps_take_as_long_as_predicted_on_average_even_if_some_wait_for_a_core() -> None:
    rng = random.Random(4)
    steps = [
        step._replace(ms=step.ms * (rng.uniform(1.0, 1.8) if rng.random() < 0.2 else 1.0))
        for step in step_logs.timed(logged("a", rng, 5.0, 900), 5.0)
    ]
    costs = step_logs.fit(steps, "a model", "a host").steps
    for has_prompts in (False, True):
        own = [step for step in steps if (step.shape.prompt_tokens > 0) == has_prompts]
        mean = statistics.fmean(step.ms / costs.milliseconds(step.shape) for step in own)
        assert mean == pytest.approx(1.0, abs=0.002)


def test_a_disturbed_step_counts_as_one_of_twice_the_time() -> None:
    steps = step_logs.timed(logged("a", random.Random(1), 5.0, 900), 5.0)
    steps = [step._replace(ms=20 * step.ms) if number % 50 == 0 else step for number, step in enumerate(steps)]
    shape = StepShape.of([(500, 1)] * 8)
    fit = step_logs.fit(steps, "a model", "a host")
    assert fit.steps.milliseconds(shape) == pytest.approx(1.02 * DECODE.milliseconds(shape), rel=0.03)


def test_workers_that_compute_at_the_same_time_show_how_they_slow_each_other_down() -> None:
    rng = random.Random(1)
    together = [*logged("a", rng, 5.0, 400, 1.5), *logged("b", rng, 5.0, 400, 1.5)]
    alone = logged("a", rng, 500.0, 400)
    fit = step_logs.fit(step_logs.timed([*together, *alone], 0.0), "a model", "a host")
    assert fit.slowdown == pytest.approx(0.5, abs=0.1)


def test_what_large_batches_cost_is_not_taken_for_what_other_workers_cost() -> None:
    """They read positions at a higher cost, which no fit sees, and never compute alone."""
    rng = random.Random(5)
    steps: list[step_logs.Timed] = []

    def add(batch: int, others: float) -> None:
        for context in (64, 512, 1024):
            shape = StepShape.of([(rng.randrange(context, context + 20), 1)] * batch)
            read_ms = (0.004 if batch <= 2 else 0.007) * shape.context
            steps.append(step_logs.Timed(shape, (20.0 + batch + read_ms) * (1.0 + 0.05 * others), others))

    for _ in range(40):
        for others in (0.0, 1.0):
            for batch in (1, 2):
                add(batch, others)
            shape = StepShape.of([(rng.randrange(0, 16), 128)])
            steps.append(step_logs.Timed(shape, 60.0 * (1.0 + 0.05 * others), others))
        for batch in (4, 8, 16, 32):
            add(batch, 1.0)
    assert step_logs.fit(steps, "a model", "a host").slowdown == pytest.approx(0.05, abs=0.011)


def test_the_first_step_of_a_size_and_those_before_the_load_do_not_count() -> None:
    steps = logged("a", random.Random(1), 5.0, 200)
    assert len(step_logs.timed(steps, 0.0)) == 200 - len({step.tokens for step in steps})
    late = steps[100].start_s
    assert len(step_logs.timed(steps, late)) <= 100


def test_too_few_steps_are_no_ground_for_a_fit() -> None:
    with pytest.raises(ValueError, match="steps with prompts were computed, and a fit needs"):
        step_logs.fit(step_logs.timed(logged("a", random.Random(1), 5.0, 20), 0.0), "", "")


def test_a_log_is_read_without_the_line_that_is_being_written() -> None:
    steps = logged("a", random.Random(1), 5.0, 3)
    lines = [json.dumps({name: getattr(step, name) for name in step.__struct_fields__}) for step in steps]
    raw = "\n".join(lines).encode()
    assert step_logs.read(raw) == steps[:2]
    assert step_logs.read(raw + b"\n") == steps
    assert step_logs.read(b"") == []


def test_learned_costs_are_linear() -> None:
    terms = LearnedCost(8.0, 0.2, 0.15, 2.0, 0.1, 1.5, 99)
    pair = step_logs.learned(terms, terms, "hosts", "a model")
    shape = StepShape.of([(99, 1)] * 4, changed=True)
    assert pair.milliseconds(shape) == pytest.approx(8 + 0.2 * 4 + 2.0 * 0.4 + 0.1 * 4 + 1.5)
    shape = StepShape.of([(1000, 100)])
    assert pair.milliseconds(shape) == pytest.approx(8 + 0.2 * 100 + 0.15 * shape.attended / 1000 + 2.0 * 1 + 0.1)
