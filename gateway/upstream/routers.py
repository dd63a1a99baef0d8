"""The gateway's view of what is behind it: one or more routers, or a single worker.

Calls go to the addresses in turn, those left out that are not connected or failed a moment ago while another is there.
A generation whose transport fails is resumed, through the next address or the same one, behind the tokens that were
already delivered: whoever iterates over `generate` sees a pause, never a gap or a repeat.

    attempt 0   t0 t1 t2 |x            the router dies
    attempt 1            | t3 t4 ...   resume_token_ids = [t0, t1, t2], start_pos = 3

While nobody is there who could answer, a generation waits for as long as its client does: a model that is asked for was
served a moment ago, and its worker or router may only be restarting. What is bounded is how often it may be lost.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from headrace.common.transport.channels import PLAIN, Transport
from headrace.common.transport.silence import Silences
from headrace.common.transport.wire_request import SharedPart, WireRequest
from headrace.gateway.telemetry.spans import begin_attempt
from headrace.gateway.upstream.address import Address, connect
from headrace.gateway.upstream.bundle import MAX_BUNDLE_BYTES, BundleError
from headrace.gateway.upstream.retries import Retries
from headrace.protos.answer_bounds import closing_message
from headrace.protos.inference_pb2 import GenerateRequest, GenerateResponse
from headrace.protos.router_pb2 import (
    REDIS_STATE_UNSPECIFIED,
    ListModelsRequest,
    ListWorkersRequest,
    RedisState,
    RouterGetTokenizerRequest,
    WorkerInfo,
)
from headrace.protos.status import Reason, StatusError, error_of, is_peer_lost
from headrace.protos.worker_pb2 import GetModelCardRequest, GetTokenizerRequest, ModelCard

LIST_TIMEOUT_S = 5.0
TOKENIZER_TIMEOUT_S = 60.0
GENERATE_TIMEOUT_S = 3600.0
# An address that failed is asked again when this time is over, or when no other one is left.
AVOID_S = 1.0
# An address that goes on failing is told of again after so long without a failure.
TELL_AGAIN_S = 10.0

_NO_CARD = ModelCard()
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

Metadata = tuple[tuple[str, str], ...]


class _Answer:
    """The answer of one generation so far, over all attempts."""

    def __init__(self, request: GenerateRequest, num_prompt_tokens: int, card: ModelCard) -> None:
        self._request = request
        self._num_prompt_tokens = num_prompt_tokens
        self._card = card
        self._identity = request.model_identity
        self._num_cached_tokens = 0
        self.delivered: list[int] = list(request.resume_token_ids)

    def take(self, message: GenerateResponse) -> bool:
        """Add a message; False if it does not continue exactly after the delivered tokens: the stream is broken."""
        if message.token_ids and message.start_pos != len(self.delivered):
            return False
        self.delivered.extend(message.token_ids)
        self._identity = message.model_identity or self._identity
        self._num_cached_tokens = self._num_cached_tokens or message.num_cached_tokens
        return True

    def closing(self) -> GenerateResponse | None:
        """The last message, if the answer is complete without it; see `closing_message`."""
        return closing_message(
            self._request, self._num_prompt_tokens, self.delivered, self._num_cached_tokens, self._card
        )

    def resumption(self, attempt: int) -> GenerateRequest:
        """The request that continues after the delivered tokens, with the model that began the answer."""
        resumption = GenerateRequest()
        resumption.CopyFrom(self._request)
        del resumption.resume_token_ids[:]
        resumption.resume_token_ids.extend(self.delivered)
        resumption.attempt = attempt
        if self.delivered:
            resumption.model_identity = self._identity
        return resumption


class Upstream:
    """Client of the routers, or of the worker, at some addresses. Made and used in one event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        transport: Transport = PLAIN,
        *,
        worker_wait_s: float | None = None,
        plain_grpc: bool = False,
    ) -> None:
        """`worker_wait_s` bounds how long a generation without a token waits for somebody who could answer; None: as
        long as its client. `plain_grpc`: each generation is an RPC of its own, rather than one of many in a session."""
        assert addresses, "no address"
        self._worker_wait_s = worker_wait_s
        self._plain_grpc = plain_grpc
        self._transport = transport
        self._version = transport.version
        self._silences = Silences()
        self._endpoints = [self._connect(address) for address in addresses]
        self._turn = 0
        self.on_retry: Callable[[Reason], None] = lambda reason: None
        """Called when a generation is attempted again, with the reason of the failure; set by whoever counts."""
        self.redis: RedisState = REDIS_STATE_UNSPECIFIED
        """How the Redis of the router that was asked last for its models is."""
        self._closing: set[asyncio.Task[None]] = set()

    def _connect(self, address: str) -> Address:
        return connect(address, self._transport, self._silences, plain_grpc=self._plain_grpc)

    async def close(self) -> None:
        """End all calls and connections."""
        for task in self._closing:
            task.cancel()
        for endpoint in self._endpoints:
            await endpoint.channel.close()

    def addresses(self) -> list[tuple[str, bool]]:
        """Each address, and whether there is a connection to it."""
        return [(endpoint.address, endpoint.is_connected) for endpoint in self._endpoints]

    async def list_models(self) -> list[ModelCard]:
        """Cards of the models that are served now. Raises `StatusError`."""

        async def ask(endpoint: Address) -> list[ModelCard]:
            if not endpoint.is_worker:
                try:
                    answer = await endpoint.router.ListModels(ListModelsRequest(), timeout=LIST_TIMEOUT_S)
                    self.redis = answer.redis
                    return list(answer.models)
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                        raise
                    endpoint.is_worker = True
            answer = await endpoint.worker.GetModelCard(GetModelCardRequest(), timeout=LIST_TIMEOUT_S)
            return [answer.card]

        return await self._first_that_works(ask)

    async def list_workers(self) -> list[WorkerInfo]:
        """All workers that the router knows; none when there is no router. Raises `StatusError`."""

        async def ask(endpoint: Address) -> list[WorkerInfo]:
            try:
                answer = await endpoint.router.ListWorkers(ListWorkersRequest(), timeout=LIST_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                    return []
                raise
            return list(answer.workers)

        return await self._first_that_works(ask)

    async def get_tokenizer(self, sha256: str) -> bytes:
        """The tokenizer bundle with this hash. Raises `StatusError`, or `BundleError` if other bytes came."""

        async def ask(endpoint: Address) -> bytes:
            if not endpoint.is_worker:
                try:
                    request = RouterGetTokenizerRequest(sha256=sha256)
                    return await _joined(endpoint.router.GetTokenizer(request, timeout=TOKENIZER_TIMEOUT_S))
                except grpc.aio.AioRpcError as error:
                    if error.code() is not grpc.StatusCode.UNIMPLEMENTED:
                        raise
                    endpoint.is_worker = True
            direct = GetTokenizerRequest(sha256=sha256)
            return await _joined(endpoint.worker.GetTokenizer(direct, timeout=TOKENIZER_TIMEOUT_S))

        raw = await self._first_that_works(ask)
        if hashlib.sha256(raw).hexdigest() != sha256:
            raise BundleError(f"the tokenizer bundle that came for {sha256} has another hash")
        return raw

    async def generate(
        self,
        request: GenerateRequest,
        metadata: Metadata = (),
        deadline_s: float | None = None,
        *,
        shared: tuple[SharedPart, ...] = (),
        num_prompt_tokens: int = 0,
        card: ModelCard = _NO_CARD,
    ) -> AsyncGenerator[GenerateResponse, None]:
        """The messages of one generation, resumed as often as need be. Close the iterator to cancel it.

        `deadline_s` is the monotonic time at which nobody wants it any more; it goes along to router and worker.
        `shared` is what the request has in common with others and does not repeat, `num_prompt_tokens` the length of
        its prompt if that is there. The model's `card` tells when an answer that broke off is complete.

        The last message has a finish. Raises `StatusError` when the generation is refused, fails, or cannot be
        resumed within the bounds above.
        """
        answer = _Answer(request, num_prompt_tokens or len(request.token_ids), card)
        retries = Retries(len(self._endpoints), request.attempt)
        asked_s = time.monotonic()
        while True:
            num_before = len(answer.delivered)
            endpoint = self._next_endpoint()
            began_s, present = time.monotonic(), endpoint.is_connected
            span = begin_attempt(request, endpoint.address)
            wire = WireRequest(request.SerializeToString(), shared)
            call = endpoint.sessions.generate(wire, metadata=span.onto(metadata), timeout=_remaining_s(deadline_s))
            try:
                while (raw := await call.read()) is not grpc.aio.EOF:
                    message = GenerateResponse.FromString(raw)
                    if not answer.take(message):
                        break
                    yield message
                    if message.HasField("finish"):
                        return
                failure, lost = StatusError(Reason.WORKER_LOST, "the stream ended before the generation did"), True
                span.fail(failure.reason.name.lower(), failure.message)
            except grpc.aio.AioRpcError as error:
                failure, lost = error_of(error), is_peer_lost(error)
                span.fail(failure.reason.name.lower(), failure.message)
            finally:
                call.cancel()
                span.end()
            if (closing := answer.closing()) is not None:
                yield closing
                return
            started, progress = bool(answer.delivered), len(answer.delivered) > num_before
            delay_s = retries.after(failure, lost=lost, progress=progress, started=started, present=present)
            if delay_s is None or (not started and self._waited_enough(asked_s)):
                raise _for_clients(failure) if lost or delay_s is not None else failure
            self._retry_elsewhere(endpoint, failure, len(answer.delivered))
            await asyncio.sleep(max(0.0, began_s + delay_s - time.monotonic()))
            request = answer.resumption(retries.attempt)

    def _waited_enough(self, asked_s: float) -> bool:
        return self._worker_wait_s is not None and time.monotonic() - asked_s >= self._worker_wait_s

    def _retry_elsewhere(self, endpoint: Address, failure: StatusError, num_delivered: int) -> None:
        self._avoid(endpoint, failure)
        self.on_retry(failure.reason)
        _LOG.debug("through %s, after %d tokens: %s", endpoint.address, num_delivered, failure.message)

    async def _first_that_works(self, ask: Callable[[Address], Awaitable[_T]]) -> _T:
        """The answer of one address, or of the next one while the transport fails. Raises `StatusError`."""
        for remaining in reversed(range(len(self._endpoints))):
            endpoint = self._next_endpoint()
            try:
                return await ask(endpoint)
            except grpc.aio.AioRpcError as error:
                lost = is_peer_lost(error) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if not lost or remaining == 0:
                    raise error_of(error) from error
                self._avoid(endpoint, error_of(error))
        raise AssertionError("there is at least one address")

    def _next_endpoint(self) -> Address:
        """The next address in turn, of those that seem to work if any does."""
        if self._transport.version != self._version:
            self._renew_channels()
        endpoints = self._endpoints
        if len(endpoints) == 1:
            return endpoints[0]
        now_s = time.monotonic()
        in_turn = [endpoints[(self._turn + i) % len(endpoints)] for i in range(len(endpoints))]
        # Each is asked for its state, so that those that are away are connected to again.
        connected = [endpoint for endpoint in in_turn if endpoint.is_connected]
        unsuspected = [endpoint for endpoint in connected or in_turn if endpoint.avoided_until_s <= now_s]
        chosen = unsuspected[0] if unsuspected else min(in_turn, key=lambda endpoint: endpoint.avoided_until_s)
        self._turn = (endpoints.index(chosen) + 1) % len(endpoints)
        return chosen

    def _renew_channels(self) -> None:
        """New calls go through channels with the new certificates; running ones end on the old channels."""
        self._version = self._transport.version
        old = [endpoint.channel for endpoint in self._endpoints]
        self._endpoints = [self._connect(endpoint.address) for endpoint in self._endpoints]
        for channel in old:
            task = asyncio.create_task(channel.close(GENERATE_TIMEOUT_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _avoid(self, endpoint: Address, failure: StatusError) -> None:
        """It failed: others first for a while. One line of the log stands for all requests that it fails meanwhile."""
        now_s = time.monotonic()
        if endpoint.avoided_until_s + TELL_AGAIN_S < now_s:
            _LOG.warning("%s fails requests, which go on or wait: %s", endpoint.address, failure.message)
        endpoint.is_worker = False
        endpoint.avoided_until_s = now_s + AVOID_S


async def _joined(call: Any) -> bytes:
    """All chunks of a bundle."""
    raw = bytearray()
    async for response in call:
        raw += response.chunk
        if len(raw) > MAX_BUNDLE_BYTES:
            call.cancel()
            raise BundleError(f"the tokenizer bundle is larger than {MAX_BUNDLE_BYTES} bytes")
    return bytes(raw)


def _for_clients(failure: StatusError) -> StatusError:
    """What a client is told of a generation that nobody could end: what happened, and that it may ask again."""
    if failure.reason is Reason.WORKER_LOST:
        problem = "the connection to the model was lost, and could not be made again in time; try again"
        return StatusError(failure.reason, problem, retry_after_s=failure.retry_after_s or 1.0)
    return failure


def _remaining_s(deadline_s: float | None) -> float:
    """Seconds that one attempt may take. Raises `StatusError` when there are none left."""
    if deadline_s is None:
        return GENERATE_TIMEOUT_S
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise StatusError(Reason.DEADLINE, "the time that this request was given is over")
    return min(remaining_s, GENERATE_TIMEOUT_S)
