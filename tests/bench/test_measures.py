"""Figures and checks, from records whose times are known."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from headrace.bench import checks, measures
from headrace.bench.load import Run
from headrace.bench.measures import distribution, values_s
from headrace.bench.record import Record


def record(number: int = 0, **changes: Any) -> Record:
    """Sent at `number`, first content after 0.5 s, four pieces 0.1 s apart, eight tokens."""
    sent = float(number)
    times = [sent + 0.5 + 0.1 * i for i in range(4)]
    made = Record(number, 100, 8, prompt_id=number, planned_s=sent - 0.25, sent_s=sent, times=times)
    made.ended_s = sent + 1.2
    made.pieces = [f"{number}", "a", "b", "c"]
    made.finish_reason, made.is_finished = "length", True
    made.usage_prompt_tokens, made.usage_completion_tokens, made.output_tokens = 100, 8, 8
    return dataclasses.replace(made, **changes)


def failed(number: int = 9) -> Record:
    return record(number, error_kind="HTTP 500", error="broken")


def of(*records: Record) -> Run:
    return Run(list(records), 0.0, max(r.ended_s for r in records), 0.0, len(records))


def test_metrics_are_those_of_the_definitions() -> None:
    records = [record(0), record(1), failed()]
    assert values_s(records, "ttft") == pytest.approx([0.5, 0.5])
    assert values_s(records, "itl") == pytest.approx([0.1] * 6)
    assert values_s(records, "tpot") == pytest.approx([0.7 / 7] * 2)
    assert values_s(records, "e2el") == pytest.approx([1.2, 1.2])
    assert values_s(records, "client_queue_time") == pytest.approx([0.25] * 2)
    assert values_s(records, "e2el_including_client_queue") == pytest.approx([1.45] * 2)


def test_percentiles_interpolate_between_ranks() -> None:
    found = distribution(np.array([0.1, 0.2, 0.3, 0.4, 0.5]), [25, 99, 99.9])
    assert (found.mean, found.median) == pytest.approx((300, 300))
    assert found.std == pytest.approx(141.42, abs=0.01)
    assert found.percentiles == pytest.approx({25: 200, 99: 496, 99.9: 499.6})
    assert distribution(np.array([]), [99]).percentiles == {99: 0}


def test_totals_count_only_what_succeeded() -> None:
    run = of(record(0), record(1), record(1), failed(2))
    found = measures.totals(run, {"ttft": 500.1, "tpot": 100.1})
    assert (found.completed, found.failed, found.good) == (3, 1, 3)
    assert (found.input_tokens, found.output_tokens) == (300, 24)
    assert found.duration_s == pytest.approx(3.2)
    assert found.per_s(found.output_tokens) == pytest.approx(7.5)
    assert found.peak_concurrency == 3


def test_an_answer_without_content_meets_no_objective() -> None:
    empty = of(record(0, times=[], pieces=[]))
    assert measures.totals(empty, {"ttft": 499}).good == 0


def test_the_share_from_the_cache_is_that_of_the_prompts_for_which_it_is_told() -> None:
    told = measures.totals(of(record(0, cached_tokens=30), record(1, cached_tokens=0), record(2)), {})
    assert told.cached_share == pytest.approx(30 / 200)
    assert measures.totals(of(record(0)), {}).cached_share is None


@pytest.mark.parametrize(
    ("objectives", "good"),
    [({"ttft": 499}, 0), ({"tpot": 99}, 0), ({"e2el": 1199}, 0), ({"e2el": 1201, "ttft": 501}, 1), ({}, 1)],
)
def test_goodput_needs_every_objective(objectives: dict[str, float], good: int) -> None:
    assert measures.totals(of(record(0)), objectives).good == good


def test_the_peak_counts_no_request_beside_one_that_ends_as_it_begins() -> None:
    assert measures.totals(of(record(0, ended_s=1.0), record(1)), {}).peak_concurrency == 1


def test_the_timeline_has_tokens_where_their_pieces_came() -> None:
    run = of(record(0), record(2))
    found = measures.timeline(run)
    assert found.output_tokens == pytest.approx([8, 0, 8, 0])
    assert found.in_flight == [1, 0, 1, 0]
    assert sum(found.output_tokens) == 16


def test_an_answer_without_content_has_no_time_to_its_first() -> None:
    empty = record(0, times=[], pieces=[])
    assert len(values_s([empty], "ttft")) == len(values_s([empty], "tpot")) == 0


def test_health_counts_late_requests_and_lags() -> None:
    run = of(record(0, late_s=0.5), record(1, late_s=0.001))
    run.lags_s = [0.0] * 99 + [1.0]
    found = measures.health(run, 0.22)
    assert (found.timed_requests, found.late_requests) == (2, 1)
    assert (found.max_lateness_ms, found.mean_lateness_ms) == pytest.approx((500, 250.5))
    assert found.cpu_share == pytest.approx(0.1)
    assert measures.health(run, 1000.0).cpu_share == 1.0  # all failed at once


def kinds(*records: Record, ignores_eos: bool = True, exact: bool = True) -> dict[str, int]:
    found = checks.check(records, ignores_eos=ignores_eos, prompts_are_exact=exact, has_marked_end=True)
    assert found.is_wrong is bool(found.findings)
    return {finding.kind: finding.count for finding in found.findings}


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("empty", {"pieces": [], "times": []}),
    ("no_finish_reason", {"finish_reason": ""}),
    ("strange_finish_reason", {"finish_reason": "because"}),
    ("too_long", {"output_tokens": 9}),
    ("too_short", {"output_tokens": 7}),
    ("wrong_finish_reason", {"finish_reason": "stop"}),
    ("usage_too_small", {"usage_completion_tokens": 2}),
    ("prompt_truncated", {"usage_prompt_tokens": 80}),
    ("no_end_mark", {"is_finished": False}),
]


@pytest.mark.parametrize(("kind", "changes"), WRONG)
def test_each_kind_of_wrong_answer_is_found(kind: str, changes: dict[str, Any]) -> None:
    assert kinds(*(record(n) for n in range(8))) == {}
    assert kinds(record(0), record(1, **changes)) == {kind: 1}


def test_answers_may_be_short_if_they_may_end() -> None:
    assert kinds(record(0, output_tokens=5, finish_reason="stop"), ignores_eos=False) == {}
    assert kinds(record(0, output_tokens=5, finish_reason="length"), ignores_eos=False) == {"cut_early": 1}


def test_the_same_answer_to_different_prompts_is_wrong() -> None:
    same = [record(n, pieces=["same"]) for n in range(6)]
    assert kinds(*same) == {"same_answer": 6}
    assert kinds(*(dataclasses.replace(each, prompt_id=1) for each in same)) == {}


def test_a_guess_of_a_prompt_accuses_nobody() -> None:
    assert kinds(record(0, usage_prompt_tokens=10), exact=False) == {}


def test_a_tool_call_is_not_empty() -> None:
    assert kinds(record(0, pieces=[""], finish_reason="tool_calls"), ignores_eos=False) == {}


def test_errors_are_counted_by_kind_with_an_example() -> None:
    found = checks.check(
        [record(0), failed(1), failed(2)], ignores_eos=True, prompts_are_exact=True, has_marked_end=True
    )
    assert (found.errors, found.error_examples) == ({"HTTP 500": 2}, {"HTTP 500": "broken"})
    assert found.finish_reasons == {"length": 1}
    assert not found.is_wrong
