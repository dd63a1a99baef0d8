"""What a worker tells routers about its speed."""

from __future__ import annotations

import pytest

from headrace.worker.step_rates import StepRates


class Totals:
    """Rates that are fed with steps one by one."""

    def __init__(self) -> None:
        self.rates = StepRates()
        self.prompt_tokens, self.generated, self.seconds = 0, 0, 0.0

    def step(self, prompt_tokens: int, generated: int, seconds: float) -> None:
        self.prompt_tokens += prompt_tokens
        self.generated += generated
        self.seconds += seconds
        self.rates.observe(self.prompt_tokens, self.generated, self.seconds)


def test_nothing_is_known_before_the_first_step() -> None:
    totals = Totals()
    totals.step(0, 0, 0.0)
    assert (totals.rates.prefill_tokens_per_s, totals.rates.decode_step_ms) == (0.0, 0.0)


def test_the_prefill_rate_is_tokens_over_seconds_whatever_the_lengths_of_contexts() -> None:
    totals = Totals()
    for seconds in (0.1, 0.3) * 50:
        totals.step(256, 0, seconds)
    assert totals.rates.prefill_tokens_per_s == pytest.approx(256 / 0.2, rel=0.01)


def test_a_step_of_decoding_says_nothing_about_prefill_nor_the_other_way_round() -> None:
    totals = Totals()
    totals.step(256, 3, 0.2)
    totals.step(0, 4, 0.02)
    assert totals.rates.prefill_tokens_per_s == pytest.approx(1280)
    assert totals.rates.decode_step_ms == pytest.approx(20)


def test_a_step_of_both_in_like_parts_says_nothing() -> None:
    totals = Totals()
    totals.step(8, 8, 1.0)
    assert (totals.rates.prefill_tokens_per_s, totals.rates.decode_step_ms) == (0.0, 0.0)


def test_both_follow_a_machine_that_became_slower() -> None:
    totals = Totals()
    for slower in (1.0, 2.0):
        for _ in range(15_000):
            totals.step(256, 0, 0.1 * slower)
            totals.step(0, 1, 0.01 * slower)
    assert totals.rates.prefill_tokens_per_s == pytest.approx(1280, rel=0.06)
    assert totals.rates.decode_step_ms == pytest.approx(20, rel=0.01)
