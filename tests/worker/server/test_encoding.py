"""Requests for a model that encodes texts: the fields that are checked before they are queued."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK, TASK_UNSPECIFIED, GenerateRequest, SamplingParams
from headrace.protos.status import Reason, StatusError
from headrace.worker.request.request import Request
from headrace.worker.server.admission import DecodedRequest, ModelLimits, admit

NOTHING = SamplingParams(max_tokens=0)


def limits(task: Any) -> ModelLimits:
    return ModelLimits("m", "f" * 64, 100, 16, frozenset(), task=task)


def admitted(offered: Any = TASK_EMBED, /, **fields: Any) -> Request:
    message = GenerateRequest(**{"task": TASK_EMBED, "sampling": NOTHING, "token_ids": [7] * 16, **fields})
    return admit(DecodedRequest(message), limits(offered), request_id="r", arrival_s=5.0)


def test_a_text_may_fill_the_context_and_keeps_its_tenant() -> None:
    request = admitted(tenant="mill", priority=2, max_wait_ms=1500)
    assert (request.num_tokens, request.tenant, request.priority, request.max_wait_s) == (16, "mill", 2, 1.5)
    assert request.sampling.max_tokens == 0
    pair = admitted(TASK_RANK, task=TASK_RANK, num_first_text_tokens=5)
    assert pair.num_first_text_tokens == 5


@pytest.mark.parametrize(
    ("offered", "fields", "reason", "problem"),
    [
        (TASK_EMBED, {"task": TASK_UNSPECIFIED}, Reason.UNSUPPORTED, "offers embeddings (POST /v1/embeddings)"),
        (TASK_RANK, {}, Reason.UNSUPPORTED, "offers rerank and score"),
        (TASK_UNSPECIFIED, {}, Reason.UNSUPPORTED, "offers chat/completions and completions, not embeddings"),
        (TASK_EMBED, {"token_ids": [7] * 17}, Reason.CONTEXT_TOO_LONG, "17 tokens, and this model takes at most 16"),
        (TASK_EMBED, {"token_ids": []}, Reason.INVALID_FIELD, "at least one token"),
        (TASK_EMBED, {"token_ids": [100]}, Reason.INVALID_FIELD, "token 100; the vocabulary has 100"),
        (TASK_EMBED, {"sampling": SamplingParams(max_tokens=3)}, Reason.INVALID_FIELD, "max_tokens must be 0"),
        (TASK_EMBED, {"resume_token_ids": [1], "token_ids": [7]}, Reason.INVALID_FIELD, "without resume_token_ids"),
        (TASK_EMBED, {"num_first_text_tokens": 16}, Reason.INVALID_FIELD, "must be below the 16 tokens"),
        (TASK_EMBED, {"model": "other"}, Reason.MODEL_NOT_FOUND, "serves 'm', not 'other'"),
    ],
)
def test_what_is_wrong_is_named(offered: Any, fields: Any, reason: Reason, problem: str) -> None:
    with pytest.raises(StatusError) as caught:
        admitted(offered, **fields)
    assert caught.value.reason is reason
    assert problem in caught.value.message
