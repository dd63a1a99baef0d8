"""The ledger of one request: what is fenced, what a resumption asks for, when an answer is complete."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.protos import inference_pb2, worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.router.delivery import Delivery, FencedError

CARD = worker_pb2.ModelCard(name="m", block_size=4, max_context_tokens=20, eos_token_ids=[2])
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=10)


def request(**fields: Any) -> bytes:
    sampling = inference_pb2.SamplingParams(**fields.pop("sampling", {}))
    return inference_pb2.GenerateRequest(token_ids=[5, 6, 7], sampling=sampling, **fields).SerializeToString()


def message(start_pos: int, *token_ids: int, **fields: Any) -> bytes:
    return inference_pb2.GenerateResponse(start_pos=start_pos, token_ids=token_ids, **fields).SerializeToString()


def closing(delivery: Delivery) -> inference_pb2.Finish | None:
    raw = delivery.closing_message(CARD)
    if raw is None:
        return None
    delivery.accept(raw)
    return inference_pb2.GenerateResponse.FromString(raw).finish


def test_the_first_attempt_is_the_bytes_of_the_client() -> None:
    raw = request() + b"\xfa\x01\x03new"
    assert Delivery(raw).next_attempt() == raw


@given(TOKENS, st.lists(TOKENS, max_size=5), st.integers(0, 5))
def test_a_resumption_carries_all_tokens_so_far_and_a_higher_attempt(
    resume: list[int], parts: list[list[int]], attempt: int
) -> None:
    delivery = Delivery(request(resume_token_ids=resume, attempt=attempt, tenant="t"))
    delivery.next_attempt()
    so_far = list(resume)
    for number, part in enumerate(parts, start=1):
        delivery.accept(message(len(so_far), *part))
        so_far += part
        again = inference_pb2.GenerateRequest.FromString(delivery.next_attempt())
        assert (list(again.resume_token_ids), again.attempt) == (so_far, attempt + number)
        assert (list(again.token_ids), again.tenant) == ([5, 6, 7], "t")
    assert list(delivery.prompt) == [5, 6, 7, *so_far]
    assert delivery.num_delivered == len(so_far) - len(resume)


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(message(1, 9), id="a gap"),
        pytest.param(message(0, *range(30)), id="more than the context"),
        pytest.param(b"\xff\xff", id="no message"),
    ],
)
def test_what_does_not_continue_the_answer_is_fenced(raw: bytes) -> None:
    delivery = Delivery(request())
    delivery.max_tokens = 20
    with pytest.raises(FencedError):
        delivery.accept(raw)
    assert delivery.num_delivered == 0


def test_a_repeat_and_anything_behind_the_finish_is_fenced() -> None:
    delivery = Delivery(request())
    delivery.accept(message(0, 9))
    with pytest.raises(FencedError, match="position 0 where 1 was due"):
        delivery.accept(message(0, 9))
    delivery.accept(message(1, finish=inference_pb2.Finish()))
    with pytest.raises(FencedError, match="behind its finish"):
        delivery.accept(message(1, 9))


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason"),
    [
        ({}, [9, 9], None),
        ({}, [9, 2], inference_pb2.FINISH_REASON_STOP),
        ({"ignore_eos": True}, [9, 2], None),
        ({"ignore_eos": True, "stop_token_ids": [8]}, [9, 8], inference_pb2.FINISH_REASON_STOP),
        ({"max_tokens": 2}, [9, 9], inference_pb2.FINISH_REASON_LENGTH),
        ({"max_tokens": 2}, [9, 2], inference_pb2.FINISH_REASON_STOP),
        ({"max_tokens": 3}, [9, 9], None),
        ({}, [9] * 17, inference_pb2.FINISH_REASON_LENGTH),
        ({}, [], None),
    ],
)
def test_an_answer_is_closed_from_here_exactly_when_its_tokens_end_it(
    sampling: dict[str, Any], tokens: list[int], reason: int | None
) -> None:
    delivery = Delivery(request(sampling=sampling))
    for position, token in enumerate(tokens):
        delivery.accept(message(position, token, num_cached_tokens=2))
    finish = closing(delivery)
    if reason is None:
        assert finish is None
        return
    assert finish is not None
    assert delivery.is_finished
    stop = tokens[-1] if reason == inference_pb2.FINISH_REASON_STOP else 0
    assert (finish.reason, finish.stop_token_id) == (reason, stop)
    assert (finish.num_prompt_tokens, finish.num_cached_tokens, finish.num_generated_tokens) == (3, 2, len(tokens))


def test_a_resume_that_is_complete_on_arrival_is_closed_too() -> None:
    delivery = Delivery(request(resume_token_ids=[9, 2]))
    raw = delivery.closing_message(CARD)
    assert raw is not None
    closed = inference_pb2.GenerateResponse.FromString(raw)
    assert (closed.start_pos, closed.HasField("num_cached_tokens")) == (2, True)


def test_bytes_that_are_no_request_are_refused() -> None:
    with pytest.raises(StatusError) as caught:
        Delivery(b"\xff\xff")
    assert caught.value.reason is Reason.INVALID_FIELD
