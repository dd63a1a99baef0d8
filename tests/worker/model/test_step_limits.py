"""Limits of steps: requested ones, and defaults that keep prompts exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.worker.engine.scheduler import MIN_CHUNK_ROOM
from headrace.worker.model.step_limits import StepLimits, step_limits


@pytest.mark.parametrize(
    ("asked", "exact_rows", "expected"),
    [
        ((None, None, None), 1024, StepLimits(128, 1024, 1024, is_exact=True)),
        ((None, None, None), 80, StepLimits(72, 80, 80, is_exact=True)),
        # Steps so small would cost too much.
        ((None, None, None), 8, StepLimits(128, 1024, 1024, is_exact=False)),
        ((16, None, None), 80, StepLimits(16, 80, 80, is_exact=True)),
        ((None, 64, None), 80, StepLimits(56, 64, 64, is_exact=True)),
        ((None, None, 40), 80, StepLimits(32, 80, 40, is_exact=True)),
        # What was asked for is honoured.
        ((128, None, None), 80, StepLimits(128, 1024, 1024, is_exact=False)),
        ((None, 256, None), 80, StepLimits(128, 256, 256, is_exact=False)),
        ((None, None, 200), 80, StepLimits(128, 1024, 200, is_exact=False)),
        ((200, None, None), 1024, StepLimits(200, 1024, 1024, is_exact=True)),
        ((None, 2048, None), 1024, StepLimits(128, 2048, 2048, is_exact=False)),
    ],
)
def test_limits(asked: tuple[int | None, int | None, int | None], exact_rows: int, expected: StepLimits) -> None:
    assert step_limits(*asked, exact_rows=exact_rows) == expected


@given(
    seqs=st.none() | st.integers(1, 300),
    tokens=st.none() | st.integers(16, 2000),
    exact_rows=st.integers(0, 1024),
)
def test_a_limit_that_was_asked_for_is_kept_and_defaults_leave_room_for_prompts(
    seqs: int | None, tokens: int | None, exact_rows: int
) -> None:
    limits = step_limits(seqs, tokens, None, exact_rows=exact_rows)
    assert seqs in {None, limits.max_num_seqs}
    assert tokens in {None, limits.max_num_batched_tokens}
    assert limits.max_num_mixed_tokens <= limits.max_num_batched_tokens
    if seqs is None or tokens is None:
        assert limits.max_num_seqs + MIN_CHUNK_ROOM <= limits.max_num_mixed_tokens
    assert limits.is_exact == (limits.max_num_batched_tokens <= exact_rows)
