"""A request of a client: its parts, the bytes of its attempts, and its messages."""

from __future__ import annotations

from array import array
from typing import Any

import pytest

from headrace.common.ledger import FencedError
from headrace.common.transport.wire_request import SharedPart, WireRequest
from headrace.protos import inference_pb2, worker_pb2
from headrace.protos.status import Reason, StatusError
from headrace.router.dispatch.generation import Generation

NOTHING_BELIEVED = inference_pb2.Belief()


def request(**fields: Any) -> bytes:
    return inference_pb2.GenerateRequest(token_ids=[5, 6, 7], **fields).SerializeToString()


def generation(raw: bytes, *parts: SharedPart) -> Generation:
    """A request that arrived with no deadline."""

    async def write(_: bytes) -> None:
        raise AssertionError("nothing is sent")

    return Generation(WireRequest(raw, parts), write, lambda: None, max_attempts=4)


def next_attempt(of: Generation) -> inference_pb2.GenerateRequest:
    return inference_pb2.GenerateRequest.FromString(of.next_attempt(0, NOTHING_BELIEVED).joined())


def test_the_first_attempt_is_the_bytes_of_the_client_and_the_bound_behind_them() -> None:
    raw = request() + b"\xfa\x01\x03new"
    sent = generation(raw).next_attempt(1500, inference_pb2.Belief(placement_id=7)).joined()
    assert sent.startswith(raw)
    arrived = inference_pb2.GenerateRequest.FromString(sent)
    assert (arrived.max_wait_ms, arrived.belief.placement_id) == (1500, 7)


def test_an_attempt_that_no_worker_has_accepted_has_the_bytes_of_the_first() -> None:
    given = generation(request())
    first = given.next_attempt(0, NOTHING_BELIEVED)
    given.num_given_back += 1
    assert given.next_attempt(0, NOTHING_BELIEVED).joined() == first.joined()
    given.attempts.lost(progressed=False)
    assert next_attempt(given).attempt == 1, "the one before counts"


def test_later_attempts_continue_after_the_delivered_tokens_and_have_higher_numbers() -> None:
    given = generation(request(resume_token_ids=[1], attempt=2, tenant="t"))
    assert not given.is_new
    given.ledger.record(inference_pb2.GenerateResponse(start_pos=1, token_ids=[8, 9]))
    given.attempts.lost(progressed=given.has_progressed)
    again = next_attempt(given)
    assert (list(again.token_ids), list(again.resume_token_ids)) == ([5, 6, 7], [1, 8, 9])
    assert (again.attempt, again.tenant) == (3, "t")
    assert not given.has_progressed, "the next one has to bring tokens of its own"


def test_only_a_request_that_nobody_has_had_is_new() -> None:
    assert generation(request()).is_new
    assert not generation(request(attempt=1)).is_new
    assert not generation(request(resume_token_ids=[1])).is_new
    for change in (lambda given: given.attempts.refused(), lambda given: setattr(given, "num_given_back", 1)):
        given = generation(request())
        change(given)
        assert not given.is_new


def test_a_message_that_is_none_is_fenced() -> None:
    with pytest.raises(FencedError, match="not a GenerateResponse"):
        generation(request()).record(b"\xff\xff", worker_pb2.ModelCard(), may_outgrow=False)


def test_bytes_that_are_no_request_are_refused() -> None:
    with pytest.raises(StatusError) as caught:
        generation(b"\xff\xff")
    assert caught.value.reason is Reason.INVALID_FIELD


def test_requests_that_share_a_prompt_and_a_grammar_are_read_and_copied_once() -> None:
    shared = inference_pb2.GenerateRequest(token_ids=range(30_000), model="m")
    shared.sampling.constraint.json_schema = '{"description": "' + "x" * 200_000 + '"}'
    part = SharedPart(shared.SerializeToString())
    generations = []
    for number in range(128):
        own = inference_pb2.GenerateRequest(request_id=str(number), attempt=number)
        own.sampling.max_tokens = 7
        generations.append(generation(own.SerializeToString(), part))
    assert len({id(each.prompt) for each in generations}) == 1
    first = generations[0]
    assert first.prompt.tokens == array("I", range(30_000))
    assert first.prompt.num_copied_tokens == 30_000
    for number, each in enumerate(generations):
        assert (each.request.request_id, each.request.model, each.request.attempt) == (
            str(number),
            "m",
            number,
        )
        assert each.request.sampling.HasField("constraint")
        assert each.request.ByteSize() < 100
    # What resumes one of them shares the part too.
    first.ledger.record(inference_pb2.GenerateResponse(token_ids=[11, 12]))
    first.attempts.lost(progressed=True)
    again = first.next_attempt(0, NOTHING_BELIEVED)
    assert again.shared == (part,)
    whole = inference_pb2.GenerateRequest.FromString(again.joined())
    assert (list(whole.token_ids), list(whole.resume_token_ids)) == (list(range(30_000)), [11, 12])
    assert whole.sampling == inference_pb2.SamplingParams(max_tokens=7, constraint=shared.sampling.constraint)


def test_a_prompt_may_be_in_several_parts() -> None:
    parts = [SharedPart(inference_pb2.GenerateRequest(token_ids=ids).SerializeToString()) for ids in ([1, 2], [3])]
    given = generation(inference_pb2.GenerateRequest(token_ids=[4]).SerializeToString(), *parts)
    assert list(given.prompt.tokens) == [1, 2, 3, 4]
    assert list(next_attempt(given).token_ids) == [1, 2, 3, 4]


def test_a_shared_part_with_delivered_tokens_is_refused() -> None:
    part = SharedPart(inference_pb2.GenerateRequest(token_ids=[1], resume_token_ids=[2]).SerializeToString())
    with pytest.raises(StatusError) as raised:
        generation(b"", part)
    assert (raised.value.reason, raised.value.field) == (Reason.INVALID_FIELD, "resume_token_ids")
