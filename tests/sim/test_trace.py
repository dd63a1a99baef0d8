"""Traces: read, made, scaled."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protos.block_hash import block_hashes
from headrace.sim.trace import ROOT_HASH, Generated, at_rate, read


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
