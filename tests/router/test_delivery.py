"""The ledger of one request: checks of positions, requests for resumption, and completeness."""

from __future__ import annotations

from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.common.transport.wire_request import SharedPart, WireRequest
from headrace.protos import inference_pb2, worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.router.dispatch.delivery import Delivery, FencedError

CARD = worker_pb2.ModelCard(name="m", block_size=4, max_context_tokens=20, eos_token_ids=[2])
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=10)


NOTHING_BELIEVED = inference_pb2.Belief()


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


def test_the_first_attempt_is_the_bytes_of_the_client_and_the_bound_behind_them() -> None:
    raw = request() + b"\xfa\x01\x03new"
    sent = Delivery(WireRequest(raw)).next_attempt(1500, inference_pb2.Belief(placement_id=7)).joined()
    assert sent.startswith(raw)
    arrived = inference_pb2.GenerateRequest.FromString(sent)
    assert (arrived.max_wait_ms, arrived.belief.placement_id) == (1500, 7)


def test_an_attempt_that_was_given_back_is_none() -> None:
    raw = inference_pb2.GenerateRequest(token_ids=[5, 6, 7]).SerializeToString()
    delivery = Delivery(WireRequest(raw))
    first = delivery.next_attempt(0, NOTHING_BELIEVED)
    delivery.given_back()
    assert delivery.next_attempt(0, NOTHING_BELIEVED).joined() == first.joined()
    again = inference_pb2.GenerateRequest.FromString(delivery.next_attempt(0, NOTHING_BELIEVED).joined())
    assert again.attempt == 1, "the one before counts"


@given(TOKENS, st.lists(TOKENS, max_size=5), st.integers(0, 5))
def test_a_resumption_carries_all_tokens_so_far_and_a_higher_attempt(
    resume: list[int], parts: list[list[int]], attempt: int
) -> None:
    delivery = Delivery(WireRequest(request(resume_token_ids=resume, attempt=attempt, tenant="t")))
    delivery.next_attempt(0, NOTHING_BELIEVED)
    so_far = list(resume)
    for number, part in enumerate(parts, start=1):
        delivery.accept(message(len(so_far), *part))
        so_far += part
        again = inference_pb2.GenerateRequest.FromString(delivery.next_attempt(0, NOTHING_BELIEVED).joined())
        assert (list(again.resume_token_ids), again.attempt) == (so_far, attempt + number)
        assert (list(again.token_ids), again.tenant) == ([5, 6, 7], "t")
    assert list(delivery.prompt.tokens) == [5, 6, 7]
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
    delivery = Delivery(WireRequest(request()))
    delivery.max_tokens = 20
    with pytest.raises(FencedError):
        delivery.accept(raw)
    assert delivery.num_delivered == 0


def test_a_repeat_and_anything_behind_the_finish_is_fenced() -> None:
    delivery = Delivery(WireRequest(request()))
    delivery.accept(message(0, 9))
    with pytest.raises(FencedError, match="position 0 where 1 was expected"):
        delivery.accept(message(0, 9))
    delivery.accept(message(1, finish=inference_pb2.Finish()))
    with pytest.raises(FencedError, match="after its finish"):
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
    delivery = Delivery(WireRequest(request(sampling=sampling)))
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
    delivery = Delivery(WireRequest(request(resume_token_ids=[9, 2])))
    raw = delivery.closing_message(CARD)
    assert raw is not None
    closed = inference_pb2.GenerateResponse.FromString(raw)
    assert (closed.start_pos, closed.HasField("num_cached_tokens")) == (2, True)


def test_bytes_that_are_no_request_are_refused() -> None:
    with pytest.raises(StatusError) as caught:
        Delivery(WireRequest(b"\xff\xff"))
    assert caught.value.reason is Reason.INVALID_FIELD


def test_requests_that_share_a_prompt_and_a_grammar_are_read_and_copied_once() -> None:
    shared = inference_pb2.GenerateRequest(token_ids=range(30_000), model="m")
    shared.sampling.constraint.json_schema = '{"description": "' + "x" * 200_000 + '"}'
    part = SharedPart(shared.SerializeToString())
    deliveries = []
    for number in range(128):
        own = inference_pb2.GenerateRequest(request_id=str(number), attempt=number)
        own.sampling.max_tokens = 7
        deliveries.append(Delivery(WireRequest(own.SerializeToString(), (part,))))
    assert len({id(delivery.prompt) for delivery in deliveries}) == 1
    first = deliveries[0]
    assert first.prompt.tokens == array("I", range(30_000))
    assert first.prompt.num_copied_tokens == 30_000
    for number, delivery in enumerate(deliveries):
        assert (delivery.request.request_id, delivery.request.model, delivery.request.attempt) == (
            str(number),
            "m",
            number,
        )
        assert delivery.request.sampling.HasField("constraint")
        assert delivery.request.ByteSize() < 100
    # What resumes one of them shares the part too.
    first.next_attempt(0, NOTHING_BELIEVED)
    first.accept(message(0, 11, 12))
    again = first.next_attempt(0, NOTHING_BELIEVED)
    assert again.shared == (part,)
    whole = inference_pb2.GenerateRequest.FromString(again.joined())
    assert (list(whole.token_ids), list(whole.resume_token_ids)) == (list(range(30_000)), [11, 12])
    assert whole.sampling == inference_pb2.SamplingParams(max_tokens=7, constraint=shared.sampling.constraint)


def test_a_prompt_may_be_in_several_parts() -> None:
    parts = [SharedPart(inference_pb2.GenerateRequest(token_ids=ids).SerializeToString()) for ids in ([1, 2], [3])]
    delivery = Delivery(WireRequest(inference_pb2.GenerateRequest(token_ids=[4]).SerializeToString(), tuple(parts)))
    assert list(delivery.prompt.tokens) == [1, 2, 3, 4]
    whole = inference_pb2.GenerateRequest.FromString(delivery.next_attempt(0, NOTHING_BELIEVED).joined())
    assert list(whole.token_ids) == [1, 2, 3, 4]


def test_a_shared_part_with_delivered_tokens_is_refused() -> None:
    part = SharedPart(inference_pb2.GenerateRequest(token_ids=[1], resume_token_ids=[2]).SerializeToString())
    with pytest.raises(StatusError) as raised:
        Delivery(WireRequest(b"", (part,)))
    assert (raised.value.reason, raised.value.field) == (Reason.INVALID_FIELD, "resume_token_ids")
