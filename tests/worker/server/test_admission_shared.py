"""Requests that share a prompt: it is read and copied once."""

from __future__ import annotations

from array import array

import pytest

from headrace.common.transport.wire_request import SharedPart, WireRequest
from headrace.protos.block_hash import block_hashes, next_hash
from headrace.protos.inference_pb2 import GenerateRequest
from headrace.protos.status import Reason, StatusError
from headrace.worker.grammar.constraint import ConstraintSource
from headrace.worker.kv import chain
from headrace.worker.kv.cache import KVCache
from headrace.worker.request.request import Request
from headrace.worker.server.admission import DecodedRequest, ModelLimits, admit, decode

LIMITS = ModelLimits("m", "f" * 64, 100, 40_000, frozenset({2}))


def part(**fields: object) -> SharedPart:
    return SharedPart(GenerateRequest(**fields).SerializeToString())  # type: ignore[arg-type]


def admitted(request: DecodedRequest) -> Request:
    return admit(request, LIMITS, request_id="r", arrival_s=0.0)


def test_siblings_have_one_prompt_and_each_its_own_rest() -> None:
    prompt = part(token_ids=[7] * 30_000)
    grammar = GenerateRequest()
    grammar.sampling.constraint.regex = "a+"
    shared = (SharedPart(grammar.SerializeToString()), prompt)
    requests = []
    for number in range(128):
        own = GenerateRequest(request_id=str(number), resume_token_ids=[5])
        own.sampling.seed = number
        requests.append(decode(WireRequest(own.SerializeToString(), shared)))
    assert len({id(request.prompt) for request in requests}) == 1
    assert requests[0].constraint() == ConstraintSource("regex", ("a+",))
    for number, request in enumerate(requests):
        assert not request.message.token_ids
        assert request.message.sampling.HasField("constraint")
        assert request.constraint() is requests[0].constraint()
        made = admitted(request)
        assert (made.sampling.seed, made.num_prompt_tokens) == (number, 30_000)
        assert made.token_ids == array("I", [*[7] * 30_000, 5])
    # Tokens that one of them gets are not the others'.
    first, second = admitted(requests[0]), admitted(requests[1])
    first.token_ids.append(9)
    assert len(second.token_ids) == 30_001


def test_siblings_hash_their_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []

    def counted(parent: int, content: bytes) -> int:
        hashed.append(content)
        return next_hash(parent, content)

    monkeypatch.setattr(chain, "next_hash", counted)
    manager = KVCache(8, 4)
    prompt = list(range(10))
    shared = (part(token_ids=prompt),)
    requests = [
        admitted(decode(WireRequest(GenerateRequest(resume_token_ids=[n]).SerializeToString(), shared))) for n in (1, 2)
    ]
    for request in requests:
        request.token_ids.append(7)
        assert manager.hash_of(request, 1) == block_hashes(request.root_hash, prompt, 4)[1]
    assert len(hashed) == 2
    # Behind the prompt each has its own.
    last = [manager.hash_of(request, 2) for request in requests]
    assert last == [block_hashes(request.root_hash, request.token_ids, 4)[2] for request in requests]
    assert len(hashed) == 4
    # Another salt is another chain.
    salted = admitted(decode(WireRequest(GenerateRequest(cache_salt="s").SerializeToString(), shared)))
    assert manager.hash_of(salted, 1) == block_hashes(salted.root_hash, prompt, 4)[1] != manager.hash_of(requests[0], 1)


@pytest.mark.parametrize("where", ["in one part", "in two parts", "in a part and its own"])
def test_long_fields_arrive_wherever_they_are(where: str) -> None:
    first, second = GenerateRequest(), GenerateRequest(token_ids=[1])
    first.sampling.logit_bias[3] = 1.5
    other = {"in one part": first, "in two parts": second}.get(where, own := GenerateRequest())
    other.sampling.allowed_token_ids.extend([3, 4])
    other.sampling.bad_words.add(token_ids=[5, 6])
    shared = tuple(SharedPart(message.SerializeToString()) for message in (first, second))
    for _ in range(2):
        sampling = admitted(decode(WireRequest(own.SerializeToString(), shared))).sampling
        assert (sampling.logit_bias, sampling.allowed_token_ids) == (((3, 1.5),), (3, 4))
        assert sampling.bad_words == ((5, 6),)


def test_long_fields_that_are_shared_are_checked_like_any_other() -> None:
    bad = GenerateRequest(token_ids=[1])
    bad.sampling.allowed_token_ids.append(100)
    both = GenerateRequest(token_ids=[1])
    both.sampling.allowed_token_ids.append(1)
    both.sampling.constraint.regex = "a"
    for message in (bad, both):
        with pytest.raises(StatusError) as raised:
            admitted(decode(WireRequest(b"", (SharedPart(message.SerializeToString()),))))
        assert (raised.value.reason, raised.value.field) == (Reason.INVALID_FIELD, "sampling.allowed_token_ids")
    empty = GenerateRequest(token_ids=[1])
    empty.sampling.constraint.SetInParent()
    with pytest.raises(StatusError, match="must be one of"):
        decode(WireRequest(b"", (SharedPart(empty.SerializeToString()),))).constraint()


def test_a_prompt_in_several_parts_is_joined() -> None:
    request = decode(WireRequest(GenerateRequest(token_ids=[3]).SerializeToString(), (part(token_ids=[1, 4]),)))
    assert list(admitted(request).token_ids) == [1, 4, 3]


@pytest.mark.parametrize(
    ("token_ids", "reason"), [([100], Reason.INVALID_FIELD), ([1] * 40_000, Reason.CONTEXT_TOO_LONG)]
)
def test_a_shared_prompt_is_checked_like_any_other(token_ids: list[int], reason: Reason) -> None:
    for request in (
        decode(WireRequest(b"", (part(token_ids=token_ids),))),
        DecodedRequest(GenerateRequest(token_ids=token_ids)),
    ):
        with pytest.raises(StatusError) as raised:
            admitted(request)
        assert (raised.value.reason, raised.value.field) == (reason, "token_ids")
