"""The model of what steps cost, and the chunks that are cut by it."""

from __future__ import annotations

import random

import pytest

from headrace.worker.step_cost import MIN_STEPS, StepCostModel
from tests.worker.conftest import VOCAB_SIZE, make_engine
from tests.worker.fake_runner import expected_tokens


def true_cost(tokens: int, context: int) -> float:
    return 6.0 + 0.4 * tokens + 0.9 * context / 1000


def learned(seed: int = 1, steps: int = 300, noise: float = 0.05) -> StepCostModel:
    rng = random.Random(seed)
    model = StepCostModel()
    for _ in range(steps):
        tokens = rng.choice([1, 8, 32, 100, 256])
        context = tokens + rng.randrange(20_000)
        model.observe(tokens, context, true_cost(tokens, context) * rng.uniform(1 - noise, 1 + noise))
    return model


@pytest.mark.parametrize("seed", range(5))
def test_predictions_come_close_to_what_steps_cost(seed: int) -> None:
    model = learned(seed)
    for tokens, context in [(1, 100), (32, 8000), (256, 256), (256, 20_000)]:
        assert model.predict_ms(tokens, context) == pytest.approx(true_cost(tokens, context), rel=0.06)


def test_single_slow_steps_do_not_spoil_it() -> None:
    model = learned()
    for _ in range(3):
        model.observe(32, 1000, 2000.0)
    assert model.predict_ms(32, 1000) == pytest.approx(true_cost(32, 1000), rel=0.25)


def test_it_follows_a_machine_that_became_slower() -> None:
    model, rng = learned(), random.Random(2)
    for _ in range(2000):
        tokens, context = rng.choice([1, 32, 256]), rng.randrange(256, 9000)
        model.observe(tokens, context, 1.6 * true_cost(tokens, context))
    assert model.predict_ms(128, 4000) == pytest.approx(1.6 * true_cost(128, 4000), rel=0.1)


def test_long_monotony_leaves_it_sane() -> None:
    model = learned()
    for _ in range(20_000):
        model.observe(1, 500, true_cost(1, 500))
    assert model.predict_ms(1, 500) == pytest.approx(true_cost(1, 500), rel=0.02)
    assert 0 < model.predict_ms(256, 500) < 1000
    for _ in range(50):
        model.observe(256, 756, true_cost(256, 756))
    assert model.predict_ms(256, 756) == pytest.approx(true_cost(256, 756), rel=0.1)


def test_tokens_within_a_limit_are_the_inverse_of_the_cost() -> None:
    model = learned(noise=0.0)
    assert model.tokens_within(50.0, 1000) == pytest.approx((50 - 6 - 0.9) / 0.4, abs=2)
    assert model.tokens_within(1.0, 1000) == 0


def test_it_says_when_it_has_seen_too_little() -> None:
    model = StepCostModel()
    for _ in range(MIN_STEPS):
        assert not model.is_learned
        model.observe(1, 1, 5.0)
    assert model.is_learned


def test_a_target_for_the_step_cuts_prompts_while_others_stream_and_only_then(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(num_blocks=500, max_num_batched_tokens=256)
    engine.scheduler.step_cost = learned(noise=0.0)
    monkeypatch.setattr(StepCostModel, "observe", lambda *_: None)
    engine.scheduler.target_step_ms = 20.0
    alone = engine.request(list(range(600)), max_tokens=1)
    engine.step()
    assert alone.num_computed_tokens == 256, "nobody streams, so nothing is to be kept"
    engine.scheduler.cancel(alone)
    streaming = engine.request([1, 2, 3], max_tokens=200)
    engine.step()
    long = engine.request(list(range(300, 900)), max_tokens=1)
    engine.step()
    assert 25 <= long.num_computed_tokens <= 36
    engine.run()
    assert engine.tokens[streaming] == expected_tokens([1, 2, 3], 200, VOCAB_SIZE)
