"""One request of a client: the request itself, the delivered part of its answer, and the results of its attempts.

A message is passed on as the bytes that arrived. It is also decoded (0.9 us; passing it on costs 37 us), because the
ledger needs `start_pos` and the token ids, 4 bytes each.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import cached_property

from google.protobuf.message import DecodeError

from headrace.common.ledger import FencedError, Ledger
from headrace.common.retries import Attempts
from headrace.common.transport.wire_request import WireRequest, without_images
from headrace.protos import inference_pb2, worker_pb2
from headrace.protos.cache_eviction import longest_context_of
from headrace.protos.status import Reason, StatusError
from headrace.router.fleet.links import WorkerLink
from headrace.router.fleet.routed_request import Prefilled, RoutedRequest
from headrace.router.placement.prompt import Prompt

Metadata = Sequence[tuple[str, str | bytes]]


class Generation:
    """One request, from its arrival to the end of its answer."""

    def __init__(
        self,
        wire: WireRequest,
        write: Callable[[bytes], Awaitable[None]],
        remaining_s: Callable[[], float | None],
        *,
        max_attempts: int,
        metadata: Metadata = (),
    ) -> None:
        """`write` sends the client a message, `remaining_s` is the time to its deadline or None. `metadata` is passed
        on to workers. The answer may lose `max_attempts` workers in a row without a token from any.

        Raises StatusError (INVALID_FIELD) for bytes that are not a GenerateRequest.
        """
        self._wire = wire
        self._own = without_images(_parsed(wire.own))
        self._write = write
        self.remaining_s = remaining_s
        self.metadata = metadata
        shared = [part.kept(_SharedPart) for part in wire.shared]
        self.request = self._own
        """The request without its images. Shared parts, such as the prompt or the text of a grammar, may be missing."""
        if shared:
            self.request = inference_pb2.GenerateRequest()
            for message in (*(part.head for part in shared), self._own):
                self.request.MergeFrom(message)
        prompts = [part.prompt for part in shared if part.prompt.num_tokens]
        has_one = len(prompts) == 1 and not self._own.token_ids
        self.prompt = prompts[0] if has_one else Prompt(*(p.tokens for p in prompts), self._own.token_ids)
        self.ledger = Ledger(self.request, self.prompt.num_tokens)
        self.attempts = Attempts(max_attempts, number=self.request.attempt)
        self.card: worker_pb2.ModelCard | None = None
        """The card of the first worker whose tokens were delivered."""
        self.longest_context = 0
        """The longest context of the answer: of a worker that has begun it, or may begin it. 0 until it is known."""
        self.waits_until_s = 0.0
        """The monotonic time until which it may wait for others, here and at its worker."""
        self.prefilled: Prefilled | None = None
        """The worker that has its tokens, if the answer has to continue elsewhere."""
        self.failed: dict[WorkerLink, int] = {}
        """The workers that failed it, with their incarnations at that time."""
        self.num_given_back = 0
        self.num_moves = 0
        """How often its answer went on elsewhere after a worker that is reserved for prompts."""

    @property
    def is_new(self) -> bool:
        """Whether no worker has accepted it, and none has returned it. A new request may wait its turn or be
        refused."""
        return not (self.attempts.number or self.num_given_back or self.ledger.token_ids)

    @property
    def identity(self) -> str:
        """The identity of the model that generated the delivered tokens, if known; empty before the first token. Its
        worker sends it with the answer, because the reported adapters may have changed before the request arrived."""
        return self.ledger.model_identity

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
        return self.ledger.has_progressed

    def routed(self, num_described: int) -> RoutedRequest:
        """The request as its next placement needs it, which describes `num_described` candidates for the log."""
        routed = RoutedRequest(self.request, self.prompt, self.ledger.token_ids, self.identity)
        routed.num_described = num_described
        routed.prefilled = self.prefilled
        return routed

    def next_attempt(self, max_wait_ms: int, belief: inference_pb2.Belief, source: str = "") -> WireRequest:
        """The request for the next worker, with `belief` about the worker's load, the time that the request may wait
        there, and `source`, a worker that has more of its blocks. The first attempt uses the client's own bytes; later
        ones resume after the delivered tokens."""
        wire = self._wire
        if self.attempts.number != self.request.attempt:
            # The images of its own bytes are not kept apart from these, because they may be large.
            again = self.ledger.resumption(_parsed(wire.own), self.attempts.number)
            wire = WireRequest(again.SerializeToString(), wire.shared)
        self.ledger.begin_attempt()
        # A field that is appended to the bytes of a message replaces the earlier field.
        bound = inference_pb2.GenerateRequest(
            max_wait_ms=max_wait_ms,
            belief=belief,
            kv_source=source,
            kv_source_tokens=belief.num_cached_tokens if source else 0,
        )
        return WireRequest(wire.own + bound.SerializeToString(), wire.shared)

    def begin_at(self, card: worker_pb2.ModelCard) -> bool:
        """Note the context of the worker that gets the next attempt. Returns whether it is shorter than the longest."""
        longest = longest_context_of(card, self.request.sampling)
        self.ledger.max_context_tokens = longest
        self.longest_context = max(self.longest_context, longest)
        return longest < self.longest_context

    def record(self, raw: bytes, card: worker_pb2.ModelCard, *, may_outgrow: bool) -> tuple[bytes, bool]:
        """Record a message of a worker with this card. Returns the bytes to send to the client, and whether the answer
        has to continue at another worker, because it has reached the end of this worker's context and `may_outgrow` it.

        Raises FencedError if the message does not continue the answer; nothing of it may be sent.
        """
        try:
            message = inference_pb2.GenerateResponse.FromString(raw)
        except DecodeError:
            raise FencedError("its message is not a GenerateResponse") from None
        is_outgrown = may_outgrow and self.ledger.take_early_end(message, self.longest_context)
        self.ledger.record(message)
        if self.card is None:
            self.card = card
        return (message.SerializeToString() if is_outgrown else raw), is_outgrown

    async def send(self, raw: bytes) -> None:
        """Send the client a message."""
        await self._write(raw)

    async def close(self, card: worker_pb2.ModelCard) -> bool:
        """Deliver the finish if the delivered tokens are a complete answer. Returns whether they are. The answer may
        continue at a worker with a longer context than that of the card."""
        if longest_context_of(card, self.request.sampling) < self.longest_context:
            shorter, card = card, worker_pb2.ModelCard()
            card.CopyFrom(shorter)
            card.max_context_tokens = self.longest_context
        return await self.close_at(card)

    async def close_at(self, card: worker_pb2.ModelCard) -> bool:
        """Deliver the finish if the delivered tokens are a complete answer in the context of this card. Returns whether
        they are."""
        message = self.ledger.closing_message(card)
        if message is None:
            return False
        self.ledger.record(message)
        await self._write(message.SerializeToString())
        return True


class _SharedPart:
    """The fields of a shared part that a router needs: its prompt, and other fields except the text of a grammar."""

    __slots__ = ("head", "prompt")

    def __init__(self, raw: bytes) -> None:
        message = _parsed(raw)
        if message.resume_token_ids:
            problem = "a part that requests share must not have resume_token_ids"
            raise StatusError(Reason.INVALID_FIELD, problem, field="resume_token_ids")
        self.prompt = Prompt(message.token_ids)
        self.head = inference_pb2.GenerateRequest.FromString(raw)
        self.head.ClearField("token_ids")
        self.head = without_images(self.head)
        if self.head.sampling.HasField("constraint"):
            self.head.sampling.constraint.Clear()
            self.head.sampling.constraint.SetInParent()


def _parsed(raw: bytes) -> inference_pb2.GenerateRequest:
    """Decode a request. Raises StatusError (INVALID_FIELD) if the bytes are not a request."""
    try:
        return inference_pb2.GenerateRequest.FromString(raw)
    except DecodeError:
        raise StatusError(Reason.INVALID_FIELD, "the body is not a GenerateRequest of headrace.v1") from None
