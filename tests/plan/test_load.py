"""The requests of loads: rates, users, conversations and shared prefixes."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from headrace.plan.load import Load, Requests, chain_ends, lengths
from headrace.sim.trace import Job


def requests(**others: Any) -> Requests:
    fixed = {"prompt": lengths("fixed", 100, 4000), "answer": lengths("fixed", 20, 4000)}
    return Requests(**{**fixed, "mean_prompt": 100, "mean_answer": 20, "most": 4000, **others})


@pytest.mark.parametrize("shape", ["lognormal", "exponential", "uniform", "fixed"])
def test_lengths_have_the_given_mean(shape: Any) -> None:
    made = Load(requests(prompt=lengths(shape, 200, 1 << 20), most=1 << 20), per_s=1.0).jobs(4000, 1)
    assert statistics.fmean(job.num_prompt_tokens for job in made) == pytest.approx(200, rel=0.06)


def test_a_rate_is_kept_and_the_same_seed_gives_the_same_requests() -> None:
    load = Load(requests(), per_s=4.0)
    jobs = load.jobs(4000, 1)
    assert jobs[-1].arrival_s == pytest.approx(1000, rel=0.06)
    assert jobs == load.jobs(4000, 1)
    assert jobs != load.jobs(4000, 2)
    assert load.scaled(2).jobs(4000, 1)[-1].arrival_s == pytest.approx(500, rel=0.06)


def test_prompts_share_their_prefix_and_nothing_else() -> None:
    jobs = Load(requests(prefix=64, num_prefixes=3), per_s=1.0).jobs(50, 1)
    assert {job.segments[0][0] for job in jobs} == {0, 1, 2}
    assert all(job.segments[0][1] == 64 for job in jobs)
    assert len({job.segments[1][0] for job in jobs}) == 50


def test_a_turn_continues_what_was_said_and_comes_after_the_answer() -> None:
    jobs = Load(requests(turns=4.0), per_s=1.0, think_s=5.0).jobs(200, 1)
    by_number = {job.number: job for job in jobs}
    later = [job for job in jobs if job.follows is not None]
    assert len(jobs) / (len(jobs) - len(later)) == pytest.approx(4, rel=0.3)
    for job in later:
        assert job.follows is not None
        before = by_number[job.follows]
        assert job.segments[: len(before.segments)] == before.segments
        assert job.segments[len(before.segments)] == (before.answer_token_id, before.num_output_tokens)
    assert statistics.fmean(job.think_s for job in later) == pytest.approx(5, rel=0.3)


def test_a_turn_repeats_as_much_of_the_answer_as_is_said() -> None:
    jobs = Load(requests(turns=4.0, reuse=0.3), per_s=1.0, think_s=5.0).jobs(100, 1)
    by_number = {job.number: job for job in jobs}
    others = set()
    for job in jobs:
        if job.follows is None:
            continue
        before = by_number[job.follows]
        assert job.segments[len(before.segments)] == (before.answer_token_id, 6)
        other, length = job.segments[len(before.segments) + 1]
        assert length == 14
        assert other not in {token for one in jobs[: job.number] for token, _ in one.segments} or other in others
        others.add(other)
    assert "repeat 30% of answers" in str(requests(turns=4.0, reuse=0.3))


def test_conversations_settle_after_their_thoughts_and_answers() -> None:
    load = Load(requests(turns=4.0), per_s=1.0, think_s=5.0)
    assert load.settle_s(0.1) == pytest.approx(2 * 3 * (5 + 20 * 0.1))
    assert Load(requests(), per_s=1.0).settle_s(0.1) == 0
    assert Load(requests(turns=4.0), users=5.0, think_s=5.0).settle_s(0.1) == 0


def test_no_request_is_longer_than_the_model_takes() -> None:
    jobs = Load(requests(turns=50.0, most=500), per_s=1.0).jobs(300, 1)
    assert max(job.num_prompt_tokens + job.num_output_tokens for job in jobs) <= 500


def test_each_user_asks_again_after_the_answer_and_a_thought() -> None:
    jobs = Load(requests(), users=3.0, think_s=10.0).jobs(30, 1)
    firsts = [job for job in jobs if job.follows is None]
    assert len(jobs) == 30
    assert len(firsts) == 3
    assert all(0 <= job.arrival_s <= 10 for job in firsts)
    assert len(chain_ends(jobs)) == 3


def test_a_trace_comes_faster_with_more_load() -> None:
    jobs = (Job(0, 0.0, ((1, 8),), 4), Job(1, 10.0, ((2, 8),), 4), Job(2, 30.0, ((3, 8),), 4))
    load = Load(trace=jobs, name="a trace")
    assert load.offered_per_s == pytest.approx(2 / 30)
    assert [job.arrival_s for job in load.scaled(2).jobs(10, 1)] == [0, 5, 15]
