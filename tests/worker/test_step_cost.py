"""The model of what steps cost, and the chunks that are cut by it."""

from __future__ import annotations

import random

import pytest

from headrace.worker.step_cost import MIN_STEPS, StepCostModel, StepShape
from tests.worker.conftest import VOCAB_SIZE, make_engine
from tests.worker.fake_runner import expected_tokens


def shape_of(tokens: int, past: int) -> StepShape:
    """A step of one prompt's chunk, or of as many sequences that compute one token."""
    return StepShape.of([(past, tokens)] if tokens > 32 else [(past, 1)] * tokens)


def true_cost(shape: StepShape) -> float:
    return 6.0 + 0.4 * shape.tokens + 0.2 * shape.attended / 1000 + 0.9 * shape.context / 1000


SHAPES = [shape_of(1, 100), shape_of(32, 300), shape_of(256, 0), shape_of(256, 8000)]


def learned(seed: int = 1, steps: int = 300, noise: float = 0.05) -> StepCostModel:
    rng = random.Random(seed)
    model = StepCostModel()
    for _ in range(steps):
        shape = shape_of(rng.choice([1, 8, 32, 100, 256]), rng.randrange(8000))
        model.observe(shape, true_cost(shape) * rng.uniform(1 - noise, 1 + noise))
    return model


def test_the_shape_tells_prompts_from_decoding() -> None:
    assert StepShape.of([(100, 1), (50, 1), (1000, 20)]) == StepShape(22, 20 * 1000 + 200, 150)


@pytest.mark.parametrize("seed", range(5))
def test_predictions_come_close_to_what_steps_cost(seed: int) -> None:
    model = learned(seed)
    for shape in SHAPES[1:]:
        assert model.predict_ms(shape) == pytest.approx(true_cost(shape), rel=0.06)
    assert model.predict_ms(SHAPES[0]) == pytest.approx(true_cost(SHAPES[0]), abs=3)


def test_single_slow_steps_do_not_spoil_it() -> None:
    model = learned()
    for _ in range(3):
        model.observe(SHAPES[1], 2000.0)
    assert model.predict_ms(SHAPES[1]) == pytest.approx(true_cost(SHAPES[1]), rel=0.35)


def test_it_follows_a_machine_that_became_slower() -> None:
    model, rng = learned(), random.Random(2)
    for _ in range(2000):
        shape = shape_of(rng.choice([1, 32, 256]), rng.randrange(9000))
        model.observe(shape, 1.6 * true_cost(shape))
    assert model.predict_ms(shape_of(128, 4000)) == pytest.approx(1.6 * true_cost(shape_of(128, 4000)), rel=0.1)


def test_long_monotony_leaves_it_sane() -> None:
    model = learned()
    for _ in range(20_000):
        model.observe(SHAPES[0], true_cost(SHAPES[0]))
    assert model.predict_ms(SHAPES[0]) == pytest.approx(true_cost(SHAPES[0]), rel=0.02)
    for _ in range(50):
        model.observe(SHAPES[2], true_cost(SHAPES[2]))
    assert model.predict_ms(SHAPES[2]) == pytest.approx(true_cost(SHAPES[2]), rel=0.1)


def test_tokens_within_a_limit_are_the_inverse_of_the_cost() -> None:
    model = learned(noise=0.0)
    decoding = StepShape(1, 0, 1000)
    assert model.tokens_within(50.0, decoding, 0) == pytest.approx((50 - 6 - 0.4 - 0.9) / 0.4, abs=3)
    assert model.tokens_within(50.0, decoding, 2000) == pytest.approx((50 - 6 - 0.4 - 0.9) / 0.8, abs=3)
    assert model.tokens_within(400.0, decoding, 0) == pytest.approx(814, rel=0.02)  # they look at each other too
    assert model.tokens_within(1.0, decoding, 0) == 0


def test_it_says_when_it_has_seen_too_little() -> None:
    model = StepCostModel()
    for _ in range(MIN_STEPS):
        assert not model.is_learned
        model.observe(SHAPES[0], 5.0)
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
