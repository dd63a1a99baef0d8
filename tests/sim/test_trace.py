"""Traces: read, made, scaled."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protos.block_hash import block_hashes
from headrace.sim.trace import ROOT_HASH, Generated, Job, at_rate, read


def line(**fields: object) -> str:
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2], **fields}) + "\n"


def test_equal_ids_give_equal_tokens_and_so_equal_hashes(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line(timestamp=2000) + line(timestamp=1000, hash_ids=[1, 3]))
    later, first = (job.hashed(64) for job in reversed(read(path)))
    assert (first.arrival_s, later.arrival_s) == (1.0, 2.0)
    assert (first.number, later.number) == (0, 1)
    assert later.num_prompt_tokens == len(later.token_ids()) == 600
    assert first.hashes[:8] == later.hashes[:8], "the first 512 tokens are the same"
    assert first.hashes[8] != later.hashes[8]


@pytest.mark.parametrize(
    ("bad", "problem"),
    [
        ("{}", "missing required field"),
        (line(hash_ids=[1]), "1 hash_ids do not fit 600 tokens"),
        (line(output_length=0), "at least 1"),
        (line(hash_ids=[1, -2]), "hash id -2"),
    ],
)
def test_a_bad_line_is_named_with_its_problem(tmp_path: Path, bad: str, problem: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line() + bad)
    with pytest.raises(ValueError, match=rf"trace\.jsonl, line 2: .*{problem}"):
        read(path)


def test_only_the_first_requests_are_read_when_so_many_are_wanted(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line() * 5)
    assert len(read(path, limit=2)) == 2


@given(st.integers(0, 1000), st.floats(0.1, 50))
def test_a_scaled_trace_has_the_rate_and_keeps_the_rhythm(seed: int, per_s: float) -> None:
    jobs = Generated(num_requests=40).jobs(random.Random(seed))
    scaled = at_rate(jobs, per_s)
    assert scaled[0].arrival_s == 0.0
    assert (len(jobs) - 1) / scaled[-1].arrival_s == pytest.approx(per_s)
    factor = scaled[-1].arrival_s / (jobs[-1].arrival_s - jobs[0].arrival_s)
    for before, after in zip(jobs, scaled, strict=True):
        assert after.arrival_s == pytest.approx((before.arrival_s - jobs[0].arrival_s) * factor)


def test_a_request_has_the_hashes_that_a_worker_would_compute() -> None:
    job = Generated(num_requests=1).jobs(random.Random(3))[0].hashed(32)
    request = job.request(0.0)
    assert request.block_hashes == block_hashes(ROOT_HASH, request.token_ids, 32)


CONVERSATIONS = Generated(
    num_requests=600, num_system_prompts=1, system_prompt_tokens=512, turns=6.0, num_conversations=50, burst=10
)


def test_a_turn_of_a_conversation_has_the_prompt_and_the_answer_before_it() -> None:
    trace = replace(CONVERSATIONS, num_requests=3000, num_conversations=20, max_prompt_tokens=100_000)
    jobs = trace.jobs(random.Random(1))
    by_prompt = {(*job.segments, (job.answer_token_id, job.num_output_tokens)): job for job in jobs}
    later = [job for job in jobs if len(job.segments) > 2]
    for job in later:
        before = by_prompt[job.segments[:-1]]
        assert before.arrival_s < job.arrival_s
        assert job.token_ids()[: before.num_prompt_tokens] == before.token_ids()
    assert all(job.segments[0] == (0, 512) for job in jobs), "all begin with the system prompt"
    assert len(jobs) / (len(jobs) - len(later)) == pytest.approx(6.0, rel=0.1), "so many turns has a conversation"


def test_requests_of_a_burst_arrive_together_and_are_of_different_conversations() -> None:
    jobs = CONVERSATIONS.jobs(random.Random(2))
    bursts: dict[float, list[Job]] = {}
    for job in jobs:
        bursts.setdefault(job.arrival_s, []).append(job)
    assert len(jobs) / len(bursts) == pytest.approx(10.0, rel=0.2)
    assert max(map(len, bursts.values())) <= 19
    assert jobs[-1].arrival_s == pytest.approx(len(jobs), rel=0.35), "one a second on average, as without bursts"
    for burst in bursts.values():
        histories = [job.segments[:-1] for job in burst if len(job.segments) > 2]
        assert len(set(histories)) == len(histories)


def test_a_conversation_ends_before_its_prompt_is_too_long() -> None:
    trace = replace(CONVERSATIONS, turns=1000.0, max_prompt_tokens=4096)
    jobs = trace.jobs(random.Random(3))
    assert all(job.num_prompt_tokens <= 512 + 4096 for job in jobs)
    assert sum(len(job.segments) == 2 for job in jobs) > 60, "others begin in their place"


def test_the_same_seed_gives_the_same_conversations_and_another_seed_others() -> None:
    first, again, other = (CONVERSATIONS.jobs(random.Random(seed)) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_bursts_of_more_requests_than_conversations_are_refused() -> None:
    with pytest.raises(ValueError, match="18 conversations are too few for bursts of up to 19 requests"):
        replace(CONVERSATIONS, num_conversations=18)
