"""The model of what steps cost, and the chunks that are cut by it."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.worker.engine.step_cost import (
    MIN_STEPS,
    OUTLIER,
    REFERENCE,
    UNKNOWN_SCALE,
    WARM_UP_TOKENS,
    WIDEST,
    StepCostModel,
    StepCosts,
    StepShape,
)
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from tests.worker.conftest import VOCAB_SIZE, make_engine
from tests.worker.fake_runner import expected_tokens


def true_cost(shape: StepShape) -> float:
    """The cost of steps on a machine with other proportions than the reference."""
    read = shape.reread + shape.context
    return 20.0 + 0.4 * shape.tokens + 0.2 * shape.attended / 1000 + 0.9 * read / 1000 + 0.05 * shape.sequences


def mixed_step(rng: random.Random) -> StepShape:
    """A random step with some streams and usually a chunk of a prompt."""
    streams = [(rng.randrange(10, 3000), 1) for _ in range(rng.randrange(16))]
    chunk = (rng.randrange(0, 8000), rng.choice([8, 32, 100, 256, 512]))
    return StepShape.of([*streams, chunk])


def learned(seed: int = 1, steps: int = 400, noise: float = 0.05, slower: float = 1.0) -> StepCostModel:
    rng = random.Random(seed)
    model = StepCostModel()
    for _ in range(steps):
        shape = mixed_step(rng)
        model.observe(shape, slower * true_cost(shape) * rng.uniform(1 - noise, 1 + noise))
    return model


PROBES = [StepShape.of(step) for step in ([(0, 8)], [(0, 256)], [(8000, 256)], [(300, 1)] * 32 + [(1000, 100)])]


def errors(model: StepCostModel, slower: float = 1.0) -> list[float]:
    """The factors by which the predictions for some steps are wrong."""
    ratios = [model.predict_ms(shape) / (slower * true_cost(shape)) for shape in PROBES]
    return [max(ratio, 1 / ratio) for ratio in ratios]


def test_the_shape_tells_prompts_from_decoding() -> None:
    assert StepShape.of([(10, 1)]) == StepShape(1, 0, 0, 11, 1, 0)
    assert StepShape.of([(10, 3)]) == StepShape(3, 11 + 12 + 13, 10, 0, 1, 3)
    assert StepShape.of([(10, 3), (0, 2), (7, 1)], padding=4) == StepShape(10, 36 + 1 + 2, 10, 8, 3, 5)
    assert StepShape.of([(10, 1)], changed=True) == StepShape(1, 0, 0, 11, 1, 0, True)
    assert StepShape.of([(10, 1), (10, 1)], shared=8) == StepShape(2, 0, 0, 22, 2, 0, False, 8)
    assert StepShape.of([(10, 3), (4, 1)], shared=8).shared == 5


def test_a_chunked_prompt_attends_to_as_much_as_a_whole_one() -> None:
    whole = StepShape.of([(0, 100)])
    chunks = [StepShape.of([(past, 25)]) for past in (0, 25, 50, 75)]
    assert sum(chunk.attended for chunk in chunks) == whole.attended


@pytest.mark.parametrize("seed", range(5))
def test_predictions_come_close_to_what_steps_cost(seed: int) -> None:
    assert max(errors(learned(seed))) < 1.1


def test_before_the_first_step_it_expects_a_large_model_on_few_cores() -> None:
    model = StepCostModel()
    assert model.predict_ms(StepShape.of([(0, 256)])) > 2000
    assert list(model.weights) == [UNKNOWN_SCALE] * len(REFERENCE)


@pytest.mark.parametrize("seed", range(5))
def test_one_step_is_enough_for_a_first_guess_of_all(seed: int) -> None:
    assert max(errors(learned(seed, steps=1))) < 3


def test_a_single_slow_step_moves_it_little_whatever_it_took() -> None:
    model = learned()
    for _ in range(3):
        model.observe(PROBES[1], 100 * true_cost(PROBES[1]))
    assert max(errors(model)) < 1.2


def test_single_outliers_of_100_times_now_and_then_leave_it_within_a_third() -> None:
    model, rng = learned(), random.Random(5)
    for number in range(5000):
        shape = mixed_step(rng)
        slower = rng.choice([100.0, 0.01]) if number % 20 == 0 else 1.0
        model.observe(shape, slower * true_cost(shape))
        assert max(errors(model)) < 1.34


@pytest.mark.parametrize("factor", [2.0, 0.5])
def test_a_machine_whose_speed_changes_is_followed_within_fifty_steps(factor: float) -> None:
    model, rng = learned(), random.Random(2)
    for _ in range(50):
        shape = mixed_step(rng)
        model.observe(shape, factor * true_cost(shape))
    assert max(errors(model, factor)) < 1.25
    for _ in range(400):
        shape = mixed_step(rng)
        model.observe(shape, factor * true_cost(shape))
    assert max(errors(model, factor)) < 1.08


def test_a_first_guess_that_is_far_off_is_corrected() -> None:
    """For example, the first step may wait for the disk."""
    model, rng = StepCostModel(), random.Random(4)
    model.observe(PROBES[0], 300 * true_cost(PROBES[0]))
    for _ in range(100):
        shape = mixed_step(rng)
        model.observe(shape, true_cost(shape))
    assert max(errors(model)) < 1.3


@pytest.mark.parametrize("shape", PROBES)
def test_hours_of_the_same_step_leave_all_predictions_sane(shape: StepShape) -> None:
    model, rng = learned(), random.Random(3)
    for _ in range(20_000):
        model.observe(shape, true_cost(shape) * rng.uniform(0.95, 1.05))
    assert model.predict_ms(shape) == pytest.approx(true_cost(shape), rel=0.05)
    # What was not seen for so long is at its share of the reference, whose proportions are others.
    assert max(errors(model)) < 3
    for _ in range(100):
        other = mixed_step(rng)
        model.observe(other, true_cost(other))
    assert max(errors(model)) < 1.35


def test_a_term_that_is_absent_for_long_is_learned_again_at_once() -> None:
    """No prompt has a computed context, so nothing is read."""
    model, rng = learned(), random.Random(6)
    for _ in range(20_000):
        shape = StepShape.of([(0, rng.choice([64, 128, 256]))])
        model.observe(shape, true_cost(shape) * rng.uniform(0.95, 1.05))
    assert max(errors(model)) < 2
    for _ in range(60):
        shape = mixed_step(rng)
        model.observe(shape, true_cost(shape))
    assert max(errors(model)) < 1.3


def steps_of_all_kinds(rng: random.Random) -> Iterator[StepShape]:
    for _ in range(300):
        yield StepShape.of([(rng.randrange(10**6), rng.choice([1, 2, 10**5])) for _ in range(rng.choice([0, 1, 500]))])


@given(st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_whatever_is_observed_weights_stay_in_their_box_and_move_no_faster_than_they_may(seed: int) -> None:
    model, rng = StepCostModel(), random.Random(seed)
    ratios = []
    for shape in steps_of_all_kinds(rng):
        expected_ms = model.predict_ms(shape)
        ms = rng.choice([0.0, 1e-9, 1.0, rng.expovariate(0.01), 1e12, -5.0])
        is_learned = model.num_steps >= MIN_STEPS
        model.observe(shape, ms)
        seen_ms = min(max(ms, expected_ms / OUTLIER), expected_ms * OUTLIER) if is_learned else min(max(ms, 1e-6), 1e9)
        ratios.append(seen_ms / sum(shape.reference_ms))
        assert min(ratios) * 0.999 <= model.scale <= max(ratios) * 1.001
        assert all(model.scale / WIDEST * 0.999 <= weight <= model.scale * WIDEST * 1.001 for weight in model.weights)
        assert 0 < model.predict_ms(shape) < math.inf
        assert model.tokens_for(100.0, 100) >= 0


@pytest.mark.parametrize("past", [0, 2000, 16_000])
@pytest.mark.parametrize("budget_ms", [20.0, 100.0, 400.0])
def test_tokens_within_a_budget_are_the_inverse_of_what_a_chunk_costs(budget_ms: float, past: int) -> None:
    model = learned(noise=0.0)
    num_tokens = model.tokens_for(budget_ms, past)
    assert model.chunk_ms(past, num_tokens) <= budget_ms + 1e-6
    assert model.chunk_ms(past, num_tokens + 1) > budget_ms
    assert model.tokens_for(-10.0, past) == 0


def test_a_chunk_costs_what_the_step_with_it_costs_more() -> None:
    model = learned()
    streams = [(1000, 1)] * 3
    with_chunk = model.predict_ms(StepShape.of([*streams, (500, 40)]))
    assert with_chunk - model.predict_ms(StepShape.of(streams)) == pytest.approx(model.chunk_ms(500, 40))


def test_a_target_for_the_step_cuts_prompts_while_others_stream_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_blocks=500, max_num_batched_tokens=256)
    costs = engine.scheduler.step_costs = StepCosts()
    costs.prompts = costs.decode = learned(noise=0.0)
    monkeypatch.setattr(StepCosts, "observe", lambda *_, **__: None)
    engine.scheduler.target_step_ms = 40.0
    alone = engine.request(list(range(600)), max_tokens=1)
    engine.step()
    assert alone.num_computed_tokens > 150, "nobody streams, so nothing is to be kept"
    engine.scheduler.cancel(alone)
    streaming = engine.request([1, 2, 3], max_tokens=200)
    engine.step()
    long = engine.request(list(range(300, 900)), max_tokens=1)
    engine.step()
    assert 35 <= long.num_computed_tokens <= 55
    engine.run()
    assert engine.tokens[streaming] == expected_tokens([1, 2, 3], 200, VOCAB_SIZE)


def test_a_worker_that_has_warmed_up_knows_what_its_steps_cost() -> None:
    """The first step with a number of tokens teaches nothing, so the same prompts are computed twice."""
    engine = make_engine(num_blocks=64)
    costs = engine.scheduler.step_costs = StepCosts()
    for num_tokens in (*WARM_UP_TOKENS, *WARM_UP_TOKENS):
        sampling = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
        engine.engine.warm_up(Request("warm-up", [1] * num_tokens, sampling, 0))
    assert costs.prompts.num_steps >= len(WARM_UP_TOKENS)
    assert costs.decode.num_steps >= len(WARM_UP_TOKENS)


@pytest.mark.parametrize(("step_ms", "change_ms"), [(8.0, 5.0), (45.0, 7.0), (145.0, 6.0)])
def test_the_cost_of_a_change_is_learned_among_streams_that_come_and_go(step_ms: float, change_ms: float) -> None:
    """In large models it is a small part of a step. Some steps take five times as long."""
    costs, rng = StepCosts(), random.Random(1)
    streams = before = 16
    for _ in range(2000):
        if rng.random() < 0.1:
            streams = max(1, min(32, streams + rng.choice([-2, -1, 1, 2])))
        changed, before = streams != before, streams
        took_ms = step_ms + step_ms / 40 * streams + change_ms * changed
        took_ms *= 5.0 if rng.random() < 0.002 else rng.uniform(0.9, 1.1)
        costs.observe(StepShape.of([(300, 1)] * streams, changed=changed), took_ms, is_first=False)
    assert 0.6 * change_ms < costs.decode.change_ms < 1.4 * change_ms + 0.1 * step_ms
