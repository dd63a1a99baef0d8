"""A worker's reports about its speed."""

from __future__ import annotations

import pytest

from headrace.worker.engine.step_cost import StepCosts, StepShape


def observed(costs: StepCosts, step: list[tuple[int, int]], ms: float) -> None:
    costs.observe(StepShape.of(step), ms, is_first=False)


def test_nothing_is_known_before_the_first_step() -> None:
    rates = StepCosts().rates
    assert (rates.prefill_tokens_per_s, rates.decode_step_ms) == (0.0, 0.0)


def test_the_prefill_rate_is_tokens_over_seconds_whatever_the_lengths_of_contexts() -> None:
    costs = StepCosts()
    for past, ms in ((0, 100.0), (8000, 300.0)) * 50:
        observed(costs, [(past, 256)], ms)
    assert costs.rates.prefill_tokens_per_s == pytest.approx(256 / 0.2, rel=0.01)


def test_a_step_of_decoding_says_nothing_about_prefill_nor_the_other_way_round() -> None:
    costs = StepCosts()
    observed(costs, [(100, 1)] * 3 + [(0, 256)], 200.0)
    observed(costs, [(100, 1)] * 4, 20.0)
    assert costs.rates.prefill_tokens_per_s == pytest.approx(1280)
    assert costs.rates.decode_step_ms == pytest.approx(20)


def test_a_step_in_which_prompts_take_less_time_than_streams_says_nothing() -> None:
    costs = StepCosts()
    observed(costs, [(100, 1)] * 8 + [(0, 8)], 1000.0)
    observed(costs, [(9000, 1)] * 8 + [(0, 100)], 1000.0)
    assert (costs.rates.prefill_tokens_per_s, costs.rates.decode_step_ms) == (0.0, 0.0)


def test_padding_is_neither() -> None:
    costs = StepCosts()
    costs.observe(StepShape.of([(0, 40)], padding=4), 100.0, is_first=False)
    costs.observe(StepShape.of([(10, 1)], padding=4), 10.0, is_first=False)
    assert costs.rates.prefill_tokens_per_s == pytest.approx(400)
    assert costs.rates.decode_step_ms == pytest.approx(10)


def test_both_follow_a_machine_that_became_slower() -> None:
    costs = StepCosts()
    for slower, num_steps in ((1.0, 1_000), (2.0, 8_000)):
        for _ in range(num_steps):
            observed(costs, [(0, 256)], 100.0 * slower)
            observed(costs, [(100, 1)], 10.0 * slower)
    assert costs.rates.prefill_tokens_per_s == pytest.approx(1280, rel=0.06)
    assert costs.rates.decode_step_ms == pytest.approx(20, rel=0.01)


def test_a_process_that_was_stopped_for_an_hour_is_as_fast_as_before() -> None:
    costs = StepCosts()
    for _ in range(100):
        observed(costs, [(0, 256)], 100.0)
        observed(costs, [(100, 1)], 10.0)
    observed(costs, [(0, 256)], 3_600_000.0)
    observed(costs, [(100, 1)], 3_600_000.0)
    assert costs.rates.prefill_tokens_per_s == pytest.approx(2560, rel=0.2)
    for _ in range(50):
        observed(costs, [(100, 1)], 10.0)
    assert costs.rates.decode_step_ms == pytest.approx(10, rel=0.2)


def test_a_step_that_built_kernels_counts_in_the_averages_and_not_in_the_model() -> None:
    costs = StepCosts()
    costs.observe(StepShape.of([(0, 256)]), 400.0, is_first=True)
    assert costs.prompts.num_steps == 0
    assert costs.rates.prefill_tokens_per_s == pytest.approx(640)


def test_prompts_and_decode_steps_are_learned_apart_and_without_what_a_changed_count_costs() -> None:
    costs = StepCosts()
    prompt, decode = StepShape.of([(0, 256)], changed=True), StepShape.of([(100, 1)] * 4)
    for _ in range(200):
        costs.observe(prompt, 95.0, is_first=False)
        costs.observe(decode._replace(changed=True), 35.0, is_first=False)
        costs.observe(decode, 30.0, is_first=False)
    assert costs.decode.change_ms == pytest.approx(5.0, rel=0.1)
    assert costs.prompts.predict_ms(prompt._replace(changed=False)) == pytest.approx(90.0, rel=0.02)
    assert costs.decode.predict_ms(decode) == pytest.approx(30.0, rel=0.02)
    assert costs.decode.predict_ms(decode._replace(changed=True)) == pytest.approx(35.0, rel=0.02)
