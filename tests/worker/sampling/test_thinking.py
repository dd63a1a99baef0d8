"""The end of reasoning, forced by a budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.worker.request.params import SamplingParams, ThinkingBudget
from headrace.worker.request.request import Request
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.sampling.thinking import ThinkingEnd
from tests.worker.sampling_params import sample

OPEN, CLOSE, NEWLINE, FINAL = 10, 11, 12, 13
VOCAB = 64
PROMPT = [1, 2, CLOSE, 3]


def budget(max_tokens: int, **fields: Any) -> ThinkingBudget:
    return ThinkingBudget(**{"max_tokens": max_tokens, "closing": CLOSE, "ends": ((CLOSE, NEWLINE),), **fields})


def forced(rule: ThinkingBudget, *generated: int) -> int | None:
    """The token that must follow these."""
    return ThinkingEnd(rule).next_token(Request("r", PROMPT, SamplingParams(100, 1), 0, resume_token_ids=generated))


def test_the_end_is_forced_after_the_budget_and_only_once() -> None:
    rule = budget(3, is_open=True)
    assert forced(rule, 5, 6) is None
    assert forced(rule, 5, 6, 7) == CLOSE
    assert forced(rule, 5, 6, 7, CLOSE) == NEWLINE
    assert forced(rule, 5, 6, 7, CLOSE, NEWLINE) is None
    assert forced(rule, 5, 6, 7, CLOSE, NEWLINE, *range(20, 60)) is None


def test_reasoning_that_ends_by_itself_is_left_alone() -> None:
    rule = budget(3, is_open=True)
    assert forced(rule, 5, 6, CLOSE, 20, 21, 22, 23) is None


def test_a_budget_of_nothing_ends_it_at_once() -> None:
    assert forced(budget(0, is_open=True)) == CLOSE
    assert forced(budget(0, opening=(OPEN,))) is None
    assert forced(budget(0, opening=(OPEN,)), OPEN) == CLOSE


def test_reasoning_begins_with_its_opening() -> None:
    rule = budget(2, opening=(OPEN, NEWLINE))
    assert forced(rule, 5, 6, 7, 8, OPEN, 5, 6, 7) is None, "half an opening is none"
    assert forced(rule, OPEN, NEWLINE, 5) is None
    assert forced(rule, OPEN, NEWLINE, 5, 6) == CLOSE
    first = (NEWLINE,)
    assert forced(budget(0, opening=(3, *first)), *first) is None, "the prompt does not begin it"


def test_several_thoughts_share_the_budget_and_end_in_turn() -> None:
    rule = budget(3, opening=(OPEN,), ends=((CLOSE,), (CLOSE, FINAL)))
    thought = (OPEN, 5, 6, CLOSE, 20, OPEN, 7)
    assert forced(rule, *thought[:-1]) is None
    assert forced(rule, *thought) == CLOSE
    assert forced(rule, *thought, CLOSE, 20, OPEN) == CLOSE
    assert forced(rule, *thought, CLOSE, 20, OPEN, CLOSE) == FINAL
    assert forced(rule, *thought, CLOSE, 20, OPEN, CLOSE, FINAL) is None


ALL: list[dict[str, Any]] = [
    {"thinking_budget": budget(4, is_open=True)},
    {"thinking_budget": budget(4, is_open=True), "temperature": 0.0},
    {"thinking_budget": budget(4, is_open=True), "mirostat": 2, "dry_multiplier": 2.0},
    {"thinking_budget": budget(4, is_open=True), "bad_words": ((CLOSE,),), "logit_bias": ((CLOSE, -100.0),)},
    {},
]


@pytest.mark.parametrize("cut", [0, 3, 4, 5, 6, 12])
def test_a_stream_is_the_same_in_a_batch_and_resumed_at_any_place(cut: int) -> None:
    def rows(position: int) -> Any:
        values = (np.random.default_rng(position).normal(size=(len(ALL), VOCAB)) * 2).astype(np.float32)
        values[:, CLOSE] = -np.inf if position < 4 else values[:, CLOSE]
        return values

    def made(i: int, given: Any = (), mu: float | None = None) -> Request:
        sampling = SamplingParams(**{"max_tokens": 100, "seed": i, **ALL[i]})
        return Request("r", PROMPT, sampling, 0, resume_token_ids=given, mirostat_mu=mu)

    together, sampler = [made(i) for i in range(len(ALL))], BatchSampler()
    for position in range(16):
        for one, sampled in zip(together, sample(sampler, together, Logits(rows(position))), strict=True):
            one.token_ids.append(sampled.token_id)
    for i, one in enumerate(together):
        answer = one.token_ids[len(PROMPT) :].tolist()
        if ALL[i]:
            assert answer[4:6] == [CLOSE, NEWLINE]
        mu = None if one.mirostat is None else one.mirostat.before(cut)
        again, other = made(i, answer[:cut], mu), BatchSampler()
        for position in range(cut, 16):
            (sampled,) = sample(other, [again], Logits(rows(position)[i : i + 1]))
            again.token_ids.append(sampled.token_id)
        assert again.token_ids == one.token_ids
