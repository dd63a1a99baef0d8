"""The ledger of an answer: its positions, the request that continues it, and when it is complete. Pure."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.ledger import FencedError, Ledger
from headrace.protos import inference_pb2, worker_pb2

CARD = worker_pb2.ModelCard(name="m", block_size=4, max_context_tokens=20, eos_token_ids=[2])
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=10)
LENGTH, STOP = inference_pb2.FINISH_REASON_LENGTH, inference_pb2.FINISH_REASON_STOP


def request(**fields: Any) -> inference_pb2.GenerateRequest:
    sampling = inference_pb2.SamplingParams(**fields.pop("sampling", {}))
    return inference_pb2.GenerateRequest(token_ids=[5, 6, 7], sampling=sampling, **fields)


def message(start_pos: int, *token_ids: int, **fields: Any) -> inference_pb2.GenerateResponse:
    return inference_pb2.GenerateResponse(start_pos=start_pos, token_ids=token_ids, **fields)


def finish(reason: inference_pb2.FinishReason) -> inference_pb2.Finish:
    return inference_pb2.Finish(reason=reason)


@given(TOKENS, st.lists(TOKENS, max_size=5), st.integers(0, 5))
def test_a_resumption_has_all_tokens_so_far(resume: list[int], parts: list[list[int]], attempt: int) -> None:
    first = request(resume_token_ids=resume, tenant="t")
    ledger = Ledger(first, 3)
    so_far = list(resume)
    for part in parts:
        ledger.begin_attempt()
        assert not ledger.has_progressed
        ledger.record(message(len(so_far), *part))
        so_far += part
        assert ledger.has_progressed == bool(part)
        again = ledger.resumption(first, attempt)
        assert (list(again.resume_token_ids), again.attempt) == (so_far, attempt)
        assert (list(again.token_ids), again.tenant) == ([5, 6, 7], "t")
    assert ledger.num_delivered == len(so_far) - len(resume)
    assert list(first.resume_token_ids) == resume, "the request stays as it is"


def test_a_resumption_names_the_model_that_began_the_answer() -> None:
    ledger = Ledger(request(), 3)
    ledger.record(message(0, model_identity="one", num_cached_tokens=0))
    assert ledger.resumption(request(), 1).model_identity == "", "nothing of it was delivered"
    ledger.record(message(0, 9))
    ledger.begin_attempt()
    ledger.record(message(1, 9, num_cached_tokens=0))
    assert ledger.resumption(request(), 2).model_identity == "one", "a worker that does not say so has the same"


def test_a_resumption_has_the_state_of_mirostat_after_its_last_token() -> None:
    ledger = Ledger(request(), 3)
    assert not ledger.resumption(request(), 1).HasField("mirostat_mu")
    ledger.record(message(0, 9, mirostat_mu=4.5))
    ledger.record(message(1, 9, mirostat_mu=4.25))
    again = ledger.resumption(request(), 1)
    assert again.mirostat_mu == 4.25
    assert Ledger(again, 3).resumption(again, 2).mirostat_mu == 4.25, "a router lost it before another token"


@pytest.mark.parametrize(
    "wrong", [message(0, 9), message(2, 9), message(0, finish=finish(STOP)), message(1, *range(20))]
)
def test_what_does_not_continue_the_answer_is_fenced(wrong: inference_pb2.GenerateResponse) -> None:
    ledger = Ledger(request(), 3)
    ledger.max_context_tokens = 20
    ledger.record(message(0, 8))
    with pytest.raises(FencedError):
        ledger.record(wrong)
    assert (list(ledger.token_ids), ledger.is_finished) == ([8], False)


def test_nothing_follows_a_finish() -> None:
    ledger = Ledger(request(), 3)
    ledger.record(message(0, 9, finish=finish(STOP)))
    with pytest.raises(FencedError, match="after its finish"):
        ledger.record(message(1, 9))


def test_an_answer_may_fill_the_context_and_no_more() -> None:
    ledger = Ledger(request(), 3)
    ledger.max_context_tokens = 20
    ledger.record(message(0, *range(17)))
    with pytest.raises(FencedError, match="more than the 20 tokens"):
        ledger.record(message(17, 1))


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        ({}, [9, 9], None),
        ({}, [9, 2], STOP),
        ({"ignore_eos": True}, [9, 2], None),
        ({"ignore_eos": True, "stop_token_ids": [8]}, [9, 8], STOP),
        ({"max_tokens": 2}, [9, 9], LENGTH),
        ({"max_tokens": 2}, [9, 2], STOP),
        ({"max_tokens": 3}, [9, 9], None),
        ({}, [9] * 17, LENGTH),
        ({}, [], None),
    ],
)
def test_an_answer_is_closed_exactly_when_its_tokens_end_it(
    sampling: dict[str, Any], tokens: list[int], reason: inference_pb2.FinishReason | None
) -> None:
    ledger = Ledger(request(sampling=sampling), 3)
    for position, token in enumerate(tokens):
        ledger.record(message(position, token, num_cached_tokens=2))
    closing = ledger.closing_message(CARD)
    if reason is None:
        assert closing is None
        return
    assert closing is not None
    ledger.record(closing)
    assert ledger.is_finished
    end = closing.finish
    assert (end.reason, end.stop_token_id) == (reason, tokens[-1] if reason == STOP else 0)
    assert (end.num_prompt_tokens, end.num_cached_tokens, end.num_generated_tokens) == (3, 2, len(tokens))


def test_an_answer_that_is_complete_on_arrival_is_closed_with_all_that_a_first_message_has() -> None:
    closing = Ledger(request(resume_token_ids=[9, 2]), 3).closing_message(CARD)
    assert closing is not None
    assert (closing.start_pos, closing.HasField("num_cached_tokens")) == (2, True)


def test_clients_get_the_cached_tokens_of_the_attempt_that_began_the_answer() -> None:
    ledger = Ledger(request(), 3)
    ledger.record(message(0, num_cached_tokens=1))  # lost before its first token
    ledger.begin_attempt()
    ledger.record(message(0, 9, num_cached_tokens=2))
    ledger.begin_attempt()
    ledger.record(message(1, 2, num_cached_tokens=3))
    closing = ledger.closing_message(CARD)
    assert closing is not None
    assert closing.finish.num_cached_tokens == 2


@pytest.mark.parametrize(
    ("last", "max_tokens", "is_early"),
    [
        (finish(LENGTH), None, True),
        (finish(LENGTH), 18, True),
        (finish(LENGTH), 17, False),  # the answer is as long as its caller wants
        (finish(STOP), None, False),
    ],
)
def test_an_end_for_want_of_context_is_taken_away_where_another_worker_has_more(
    last: inference_pb2.Finish, max_tokens: int | None, is_early: bool
) -> None:
    ledger = Ledger(request(sampling={} if max_tokens is None else {"max_tokens": max_tokens}), 3)
    ledger.max_context_tokens = 20
    ledger.record(message(0, *range(16)))
    end = message(16, 9, finish=last)
    assert ledger.take_early_end(end, 30) == is_early
    assert end.HasField("finish") != is_early
    assert not ledger.take_early_end(message(16, finish=last), 30), "a token before the end of the context"
