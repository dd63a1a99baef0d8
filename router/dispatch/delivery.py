"""The delivered part of one answer, and the request that continues it.

A message is passed on as the bytes that arrived. It is also decoded (0.9 us; passing it on costs 37 us), because the
fence needs `start_pos` and a resumption needs the token ids, 4 bytes each.

Pure: bytes in, bytes out.
"""

from __future__ import annotations

import hashlib
from array import array
from functools import cached_property

from google.protobuf.message import DecodeError

from headrace.common.transport.wire_request import WireRequest
from headrace.protos import inference_pb2, worker_pb2
from headrace.protos.answer_bounds import closing_message
from headrace.protos.status import Reason, StatusError
from headrace.router.placement.prompt import Prompt


class FencedError(Exception):
    """A message does not continue the delivered tokens. Nothing of it may reach the client."""


def parse(raw: bytes) -> inference_pb2.GenerateRequest:
    """Decode a request. Raises StatusError (INVALID_FIELD) if the bytes are not a request."""
    try:
        return inference_pb2.GenerateRequest.FromString(raw)
    except DecodeError:
        raise StatusError(Reason.INVALID_FIELD, "the body is not a GenerateRequest of headrace.v1") from None


class _Digest:
    """The fields of a shared part that a router needs: its prompt, and other fields except the text of a grammar."""

    __slots__ = ("head", "prompt")

    def __init__(self, raw: bytes) -> None:
        message = parse(raw)
        if message.resume_token_ids:
            problem = "a part that requests share must not have resume_token_ids"
            raise StatusError(Reason.INVALID_FIELD, problem, field="resume_token_ids")
        self.prompt = Prompt(message.token_ids)
        self.head = inference_pb2.GenerateRequest.FromString(raw)
        self.head.ClearField("token_ids")
        if self.head.sampling.HasField("constraint"):
            self.head.sampling.constraint.Clear()
            self.head.sampling.constraint.SetInParent()


class Delivery:
    """The ledger of one request: its parameters, the delivered tokens, and whether a finish was delivered.

    `max_tokens` bounds the ledger; a worker that sends more tokens than the context holds is fenced.
    """

    def __init__(self, wire: WireRequest) -> None:
        """Raises StatusError (INVALID_FIELD) for bytes that are not a GenerateRequest."""
        self._wire = wire
        self._own = parse(wire.own)
        digests = [part.kept(_Digest) for part in wire.shared]
        self.request = self._own
        """The request. Shared parts, such as the prompt or the text of a grammar, may be missing."""
        if digests:
            self.request = inference_pb2.GenerateRequest()
            for message in (*(digest.head for digest in digests), self._own):
                self.request.MergeFrom(message)
        prompts = [digest.prompt for digest in digests if digest.prompt.num_tokens]
        has_one = len(prompts) == 1 and not self._own.token_ids
        self.prompt = prompts[0] if has_one else Prompt(*(p.tokens for p in prompts), self._own.token_ids)
        self.token_ids = array("I", self.request.resume_token_ids)
        self.max_tokens: int | None = None
        self.model_identity = self.request.model_identity
        """The model that generated the tokens, as reported by its worker; empty if unknown."""
        self.is_finished = False
        self._num_retries = 0
        self._num_cached_tokens = 0
        self._num_before = 0  # tokens when the current attempt began

    @cached_property
    def digest(self) -> bytes:
        """A hash of the content: prompt and parameters, without ids and seed."""
        own = self._own
        content = inference_pb2.GenerateRequest(
            model=own.model,
            adapter=own.adapter,
            token_ids=own.token_ids,
            sampling=own.sampling,
            prediction_token_ids=own.prediction_token_ids,
        )
        content.sampling.ClearField("seed")
        hashed = hashlib.blake2b(content.SerializeToString(deterministic=True), digest_size=16)
        for part in self._wire.shared:
            hashed.update(part.raw)
        return hashed.digest()

    @property
    def has_progressed(self) -> bool:
        """Whether the current attempt has delivered a token."""
        return len(self.token_ids) > self._num_before

    @property
    def num_delivered(self) -> int:
        """Tokens delivered through this router."""
        return len(self.token_ids) - len(self.request.resume_token_ids)

    def accept(self, raw: bytes) -> None:
        """Record a message that is about to be sent.

        Raises FencedError if it does not start right after the delivered tokens, follows a finish, makes the answer
        longer than the context, or is not a GenerateResponse.
        """
        try:
            message = inference_pb2.GenerateResponse.FromString(raw)
        except DecodeError:
            raise FencedError("its message is not a GenerateResponse") from None
        if self.is_finished:
            raise FencedError("it continued after its finish")
        if message.start_pos != len(self.token_ids):
            raise FencedError(f"it sent position {message.start_pos} where {len(self.token_ids)} was expected")
        token_ids = message.token_ids
        if self.max_tokens is not None and len(self.token_ids) + len(token_ids) > self.max_tokens:
            raise FencedError(f"it sent more than the {self.max_tokens} tokens of the context")
        self.token_ids.extend(token_ids)
        if message.HasField("num_cached_tokens"):
            self._num_cached_tokens = message.num_cached_tokens
            self.model_identity = message.model_identity or self.model_identity
        self.is_finished = message.HasField("finish")

    def without_early_end(self, raw: bytes, longest: int) -> tuple[bytes, bool]:
        """A message, and whether its worker ends the answer only because the worker's own context ends; the result then
        has no finish. Prompt and answer may have `longest` tokens together."""
        try:
            message = inference_pb2.GenerateResponse.FromString(raw)
        except DecodeError:
            return raw, False
        num_tokens, sampling = len(self.token_ids) + len(message.token_ids), self.request.sampling
        is_at_end = self.prompt.num_tokens + num_tokens >= (self.max_tokens or 0)
        room = longest - self.prompt.num_tokens
        if sampling.HasField("max_tokens"):
            room = min(room, sampling.max_tokens)
        if message.finish.reason != inference_pb2.FINISH_REASON_LENGTH or not is_at_end or num_tokens >= room:
            return raw, False
        message.ClearField("finish")
        return message.SerializeToString(), True

    def next_attempt(self, max_wait_ms: int, belief: inference_pb2.Belief, source: str = "") -> WireRequest:
        """The request for the next worker, with the belief about it, the time that the request may wait there, and the
        worker that has more of its blocks. The first has the client's own bytes, later ones resume after the delivered
        tokens."""
        wire = self._next_attempt()
        self._num_before = len(self.token_ids)
        # A field that is appended to the bytes of a message replaces the earlier field.
        bound = inference_pb2.GenerateRequest(
            max_wait_ms=max_wait_ms,
            belief=belief,
            kv_source=source,
            kv_source_tokens=belief.num_cached_tokens if source else 0,
        )
        return WireRequest(wire.own + bound.SerializeToString(), wire.shared)

    def given_back(self) -> None:
        """Do not count the last attempt, because the worker returned the request without accepting it."""
        self._num_retries -= 1

    def _next_attempt(self) -> WireRequest:
        if self._num_retries == 0:
            self._num_retries = 1
            return self._wire
        again = inference_pb2.GenerateRequest()
        again.CopyFrom(self._own)
        del again.resume_token_ids[:]
        again.resume_token_ids.extend(self.token_ids)
        if self.token_ids:
            again.model_identity = self.model_identity
        again.attempt = self.request.attempt + self._num_retries
        self._num_retries += 1
        return WireRequest(again.SerializeToString(), self._wire.shared)

    def closing_message(self, card: worker_pb2.ModelCard) -> bytes | None:
        """The message with the finish, if the delivered tokens are a complete answer; else None."""
        num_prompt_tokens = self.prompt.num_tokens
        message = closing_message(self.request, num_prompt_tokens, self.token_ids, self._num_cached_tokens, card)
        if message is None:
            return None
        if self.num_delivered == 0:
            message.num_cached_tokens = self._num_cached_tokens
        return message.SerializeToString()
