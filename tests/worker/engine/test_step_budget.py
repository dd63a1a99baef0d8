"""The number of prompt tokens in a step, given the costs of steps."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from headrace.worker.engine.step_budget import (
    LEAST_IMAGE_SHARE,
    STREAMS_PER_IMAGE,
    TARGET_STEP_MS,
    Prompt,
    StepBudget,
)
from headrace.worker.engine.step_cost import NOTHING, StepCosts, StepShape

STREAM = StepShape.of([(200, 1)])
FAR = 40_000


def true_cost(shape: StepShape) -> float:
    """A small model on two cores. Reading 40,000 tokens takes 88 ms."""
    read = shape.reread + shape.context
    return 8.0 + 0.4 * shape.tokens + 0.12 * shape.attended / 1000 + 2.2 * read / 1000 + 0.1 * shape.sequences


@pytest.fixture(scope="module")
def budget() -> StepBudget:
    """The budget of a worker that has learned these costs."""
    rng, costs = random.Random(1), StepCosts()
    for _ in range(400):
        chunk = StepShape.of([(rng.choice([0, 500, 8000, FAR]), rng.choice([8, 32, 128, 256]))])
        costs.prompts.observe(chunk, true_cost(chunk))
        streams = StepShape.of([(rng.randrange(2000), 1)] * rng.randrange(1, 8))
        costs.decode.observe(streams, true_cost(streams))
    return StepBudget(costs, 1024, 1024)


def tokens_per_s(tokens: int, past: int, others: StepShape = NOTHING) -> float:
    chunk = StepShape.of([(past, tokens)])
    return 1000 * tokens / (true_cost(chunk) + 0.4 * others.tokens)


def test_a_step_behind_a_long_context_computes_enough_to_be_worth_reading_it(budget: StepBudget) -> None:
    """Reading alone takes more than a step of prompts that have nothing computed."""
    room = budget.alone([Prompt(FAR, 10_000)], 0)
    assert tokens_per_s(room.tokens, FAR) > 0.8 * tokens_per_s(1024, FAR)


def test_beside_streams_reading_a_long_context_is_not_taken_from_the_tokens(budget: StepBudget) -> None:
    room = budget.with_streams(STREAM, [Prompt(FAR, 10_000)], 0)
    assert tokens_per_s(room.tokens, FAR, STREAM) > 0.8 * tokens_per_s(1024, FAR)
    assert room.step_ms < 1.1 * 8 * 2.2 * FAR / 1000


def test_the_first_in_rank_gets_on_behind_a_long_context_while_short_prompts_are_served(budget: StepBudget) -> None:
    """Its share is of the time that remains after reading the context."""
    room = budget.alone([Prompt(0, 300), Prompt(FAR, 10_000)], 1)
    assert room.for_first >= 8


def test_short_prompts_beside_streams_keep_the_target(budget: StepBudget) -> None:
    room = budget.with_streams(STREAM, [Prompt(0, 10_000)], 0)
    assert room.step_ms < 1.1 * TARGET_STEP_MS
    assert room.tokens > 100


@pytest.mark.parametrize("share", [0.7, 0.5])
def test_prompts_beside_streams_leave_the_rest_of_the_target_to_others(budget: StepBudget, share: float) -> None:
    room = replace(budget, share=share).with_streams(STREAM, [Prompt(0, 10_000)], 0)
    assert 0.8 * share * TARGET_STEP_MS < room.step_ms <= share * TARGET_STEP_MS


@pytest.mark.parametrize(("num_streams", "num_images"), [(32, 1), (32, 6), (5, 2)])
def test_images_get_a_share_of_each_step(budget: StepBudget, num_streams: int, num_images: int) -> None:
    share = max(LEAST_IMAGE_SHARE, STREAMS_PER_IMAGE * num_images / num_streams)
    streams = StepShape.of([(200, 1)] * num_streams)
    room = budget.with_streams(streams, [Prompt(0, 10_000)] * num_images, 0, num_images=num_images)
    alone_ms = true_cost(streams)
    assert (1 + 0.6 * share) * alone_ms < room.step_ms < (1.1 + share) * alone_ms
    assert room.step_ms < 0.5 * budget.with_streams(streams, [Prompt(0, 10_000)] * num_images, 0).step_ms
