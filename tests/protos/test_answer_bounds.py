"""The rule by which gateway, router and worker decide that an answer is complete."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.protos.answer_bounds import (
    MAX_REQUEST_BYTES,
    check_context,
    closing_message,
    max_image_bytes,
    max_request_bytes,
)
from headrace.protos.inference_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    Constraint,
    GenerateRequest,
    JsonObject,
    SamplingParams,
)
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ModelCard

CARD = ModelCard(max_context_tokens=20, vocab_size=100, eos_token_ids=[2])
CONSTRAINT = Constraint(json_object=JsonObject())


@pytest.mark.parametrize(
    ("sampling", "tokens", "reason", "stop_token_id"),
    [
        ({}, [5, 2], FINISH_REASON_STOP, 2),
        ({"ignore_eos": True}, [5, 2], None, None),
        ({"ignore_eos": True, "constraint": CONSTRAINT}, [5, 2], FINISH_REASON_STOP, 2),
        ({"stop_token_ids": [7], "ignore_eos": True}, [7], FINISH_REASON_STOP, 7),
        ({"stop_token_ids": [7]}, [7, 8], None, None),
        # Before min_tokens a stop token is chosen only where a grammar can but end: it ends the answer.
        ({"min_tokens": 5}, [5, 2], FINISH_REASON_STOP, 2),
        ({"max_tokens": 2}, [5, 6], FINISH_REASON_LENGTH, None),
        ({"max_tokens": 2}, [5, 2], FINISH_REASON_STOP, 2),
        ({"max_tokens": 3}, [5, 6], None, None),
        ({"max_tokens": 50}, list(range(3, 20)), FINISH_REASON_LENGTH, None),
        ({}, list(range(3, 19)), None, None),
        ({}, [], None, None),
    ],
)
def test_a_complete_answer_gets_its_finish(
    sampling: dict[str, Any], tokens: list[int], reason: int | None, stop_token_id: int | None
) -> None:
    request = GenerateRequest(sampling=SamplingParams(**sampling))
    message = closing_message(request, 3, tokens, 1, CARD)
    if reason is None:
        assert message is None
        return
    assert message is not None
    finish = message.finish
    assert (message.start_pos, finish.reason) == (len(tokens), reason)
    assert (finish.stop_token_id if finish.HasField("stop_token_id") else None) == stop_token_id
    assert (finish.num_prompt_tokens, finish.num_cached_tokens, finish.num_generated_tokens) == (3, 1, len(tokens))


def test_without_a_card_only_the_requests_own_bounds_count() -> None:
    request = GenerateRequest(sampling=SamplingParams(max_tokens=2))
    assert closing_message(request, 3, [5], 0, ModelCard()) is None
    assert closing_message(request, 3, [5, 2], 0, ModelCard()) is not None
    assert closing_message(GenerateRequest(), 3, [5] * 100, 0, ModelCard()) is None


@pytest.mark.parametrize(
    ("num_prompt", "num_resumed", "fits"), [(19, 0, True), (20, 0, False), (15, 5, True), (15, 6, False)]
)
def test_a_prompt_must_leave_room(num_prompt: int, num_resumed: int, fits: bool) -> None:
    if fits:
        check_context(num_prompt, num_resumed, 20)
        return
    with pytest.raises(StatusError) as raised:
        check_context(num_prompt, num_resumed, 20)
    assert (raised.value.reason, raised.value.field) == (Reason.CONTEXT_TOO_LONG, "token_ids")


def test_no_valid_request_is_larger_than_the_bound() -> None:
    card = ModelCard(max_context_tokens=100_000, vocab_size=2**32 - 1)
    request = GenerateRequest(token_ids=[2**32 - 1] * 100_000)
    card.vocab_size = 50_000
    request.sampling.allowed_token_ids.extend([2**32 - 1] * 50_000)
    for token in range(50_000):
        request.sampling.logit_bias[2**32 - 1 - token] = 1.0
    request.sampling.constraint.json_schema = "x" * (256 << 10)
    assert request.ByteSize() <= max_request_bytes(card)


def test_images_have_what_a_message_holds_beside_the_longest_prompt() -> None:
    card = ModelCard(max_context_tokens=100_000, vocab_size=1000)
    assert max_image_bytes(card) == 0, "it reads no images"
    card.images.max_images, card.images.max_bytes = 128, 12 << 20
    request = GenerateRequest(token_ids=[2**32 - 1] * 100_000)
    request.images.add(data=bytes(max_image_bytes(card)))
    request.sampling.constraint.json_schema = "x" * (256 << 10)
    assert request.ByteSize() <= min(MAX_REQUEST_BYTES, max_request_bytes(card))
    assert len(request.images[0].data) > MAX_REQUEST_BYTES - (2 << 20)
    card.max_context_tokens = 10_000_000
    assert max_image_bytes(card) == MAX_REQUEST_BYTES // 2
    card.images.max_images = 1
    assert max_image_bytes(card) == 12 << 20
