"""The gateway's view of what is behind it: one or more routers, or a single worker.

Calls go to the addresses in turn, those left out that are not connected or failed a moment ago while another is there.
A generation whose transport fails is resumed, through the next address or the same one, behind the tokens that were
already delivered: whoever iterates over `generate` sees a pause, never a gap or a repeat.

    attempt 0   t0 t1 t2 |x            the router dies
    attempt 1            | t3 t4 ...   resume_token_ids = [t0, t1, t2], start_pos = 3
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Any, TypeVar

import grpc

from headrace.gateway.bundle import MAX_BUNDLE_BYTES, BundleError
from headrace.gateway.spans import begin_attempt
from headrace.protos.inference_pb2 import FINISH_REASON_LENGTH, Finish, GenerateRequest, GenerateResponse
from headrace.protos.router_pb2 import ListModelsRequest, ListWorkersRequest, RouterGetTokenizerRequest, WorkerInfo
from headrace.protos.router_pb2_grpc import RouterStub
from headrace.protos.session_client import SessionClient
from headrace.protos.status import Reason, StatusError, error_of
from headrace.protos.transport import CHANNEL_OPTIONS, PLAIN, Options, Transport
from headrace.protos.worker_pb2 import GetModelCardRequest, GetTokenizerRequest, ModelCard
from headrace.protos.worker_pb2_grpc import WorkerStub

_CHANNEL_OPTIONS: Options = (
    *CHANNEL_OPTIONS,
    # A name may stand for several routers (dns:///NAME:PORT): all are connected to and asked in turn. It is resolved
    # again when a connection is lost.
    ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),
)
LIST_TIMEOUT_S = 5.0
TOKENIZER_TIMEOUT_S = 60.0
GENERATE_TIMEOUT_S = 3600.0
# Sessions with the routers behind one name.
NAMED_SESSIONS = 4

# Attempts that bring no token, before a generation is given up, and all attempts of one generation.
MAX_FRUITLESS_ATTEMPTS = 12
MAX_ATTEMPTS = 32
_CROWDED_ATTEMPTS = 4
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.5
# An address that failed is asked again when this time is over, or when no other one is left.
AVOID_S = 1.0

_DETAILS_KEY = "grpc-status-details-bin"
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class _Endpoint:
    """One address. `is_worker` is learned: a worker does not know the Router service."""

    address: str
    channel: grpc.aio.Channel
    sessions: SessionClient
    router: Any
    worker: Any
    is_worker: bool = field(default=False)
    avoided_until_s: float = field(default=0.0)

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection, and somebody answers; if not, one is made."""
        is_ready = self.channel.get_state(try_to_connect=True) is grpc.ChannelConnectivity.READY
        return is_ready and not self.sessions.is_silent


@dataclass(slots=True)
class Retries:
    """How often a generation was attempted, and whether and when it is attempted again (pure)."""

    num_addresses: int
    attempt: int = 0
    fruitless: int = 0

    def after(self, failure: StatusError, lost: bool, progress: bool, started: bool) -> float | None:
        """Seconds to wait before the next attempt; None to give up.

        `lost` means that the transport failed. `progress` means that this attempt brought tokens, `started` that the
        client has any. A refusal for want of room is final for a client that has nothing yet, and is waited out for
        one in the middle of an answer.
        """
        crowded = failure.reason in (Reason.NO_CAPACITY, Reason.QUEUE_FULL)
        if not (lost or failure.reason is Reason.DRAINING or (crowded and started)):
            return None
        self.attempt += 1
        # A router that finds no room has waited for it already.
        self.fruitless = (0 if progress else self.fruitless) + (_CROWDED_ATTEMPTS if crowded else 1)
        if self.fruitless >= MAX_FRUITLESS_ATTEMPTS or self.attempt >= MAX_ATTEMPTS:
            return None
        rounds, position = divmod(self.fruitless, self.num_addresses)
        if position:  # an address that has not been asked in this round
            return 0.0
        return min(FIRST_BACKOFF_S * 2.0 ** (rounds - 1), MAX_BACKOFF_S)


class Upstream:
    """Client of the routers, or of the worker, at some addresses. Made and used in one event loop."""

    def __init__(self, addresses: Sequence[str], transport: Transport = PLAIN) -> None:
        assert addresses, "no address"
        self._transport = transport
        self._version = transport.version
        self._endpoints = [_endpoint(address, transport) for address in addresses]
        self._turn = 0
        self.on_retry: Callable[[Reason], None] = lambda reason: None
        """Called when a generation is attempted again, with the reason of the failure; set by whoever counts."""
        self._closing: set[asyncio.Task[None]] = set()

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

        async def ask(endpoint: _Endpoint) -> list[ModelCard]:
            if not endpoint.is_worker:
                try:
                    answer = await endpoint.router.ListModels(ListModelsRequest(), timeout=LIST_TIMEOUT_S)
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

        async def ask(endpoint: _Endpoint) -> list[WorkerInfo]:
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

        async def ask(endpoint: _Endpoint) -> bytes:
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
        self, request: GenerateRequest, metadata: Metadata = ()
    ) -> AsyncGenerator[GenerateResponse, None]:
        """The messages of one generation, resumed as often as need be. Close the iterator to cancel it.

        The last message has a finish. Raises `StatusError` when the generation is refused, fails, or cannot be
        resumed within the bounds above.
        """
        delivered: list[int] = list(request.resume_token_ids)
        retries = Retries(len(self._endpoints), request.attempt)
        while True:
            num_before = len(delivered)
            endpoint = self._next_endpoint()
            span = begin_attempt(request, endpoint.address)
            call = endpoint.sessions.generate(
                request.SerializeToString(), metadata=span.onto(metadata), timeout=GENERATE_TIMEOUT_S
            )
            try:
                while True:
                    raw = await call.read()
                    if raw is grpc.aio.EOF:
                        break
                    message = GenerateResponse.FromString(raw)
                    if not _fits(message, len(delivered)):
                        break
                    delivered.extend(message.token_ids)
                    yield message
                    if message.HasField("finish"):
                        return
                failure, lost = StatusError(Reason.WORKER_LOST, "the stream ended before the generation did"), True
                span.fail(failure.reason.name.lower(), failure.message)
            except grpc.aio.AioRpcError as error:
                failure, lost = error_of(error), _is_transport_failure(error)
                span.fail(failure.reason.name.lower(), failure.message)
            finally:
                call.cancel()
                span.end()
            if len(delivered) >= request.sampling.max_tokens > 0 and lost:
                yield _finish_of_length(len(delivered), len(request.token_ids))
                return
            delay_s = retries.after(failure, lost, len(delivered) > num_before, bool(delivered))
            if delay_s is None:
                raise failure
            self._avoid(endpoint)
            self.on_retry(failure.reason)
            _LOG.warning(
                "%s: attempt %d through %s failed behind %d tokens: %s",
                request.request_id,
                retries.attempt - 1,
                endpoint.address,
                len(delivered),
                failure.message,
            )
            await asyncio.sleep(delay_s)
            request = _resumption(request, delivered, retries.attempt)

    async def _first_that_works(self, ask: Callable[[_Endpoint], Awaitable[_T]]) -> _T:
        """The answer of one address, or of the next one while the transport fails. Raises `StatusError`."""
        for remaining in reversed(range(len(self._endpoints))):
            endpoint = self._next_endpoint()
            try:
                return await ask(endpoint)
            except grpc.aio.AioRpcError as error:
                lost = _is_transport_failure(error) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if not lost or remaining == 0:
                    raise error_of(error) from error
                self._avoid(endpoint)
        raise AssertionError("there is at least one address")

    def _next_endpoint(self) -> _Endpoint:
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
        self._endpoints = [_endpoint(endpoint.address, self._transport) for endpoint in self._endpoints]
        for channel in old:
            task = asyncio.create_task(channel.close(GENERATE_TIMEOUT_S))
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)

    def _avoid(self, endpoint: _Endpoint) -> None:
        """It failed: others first for a while."""
        endpoint.is_worker = False
        endpoint.avoided_until_s = time.monotonic() + AVOID_S


def _endpoint(address: str, transport: Transport) -> _Endpoint:
    channel = transport.channel(address, _CHANNEL_OPTIONS)
    num_sessions = NAMED_SESSIONS if _may_be_several(address) else 1
    return _Endpoint(address, channel, SessionClient(channel, num_sessions), RouterStub(channel), WorkerStub(channel))


def _may_be_several(address: str) -> bool:
    """Whether the address may stand for several routers, each of which a session is with one of."""
    if address.startswith("unix:"):
        return False
    try:
        ip_address(address.rpartition(":")[0].strip("[]"))
    except ValueError:
        return True
    return False


async def _joined(call: Any) -> bytes:
    """All chunks of a bundle."""
    raw = bytearray()
    async for response in call:
        raw += response.chunk
        if len(raw) > MAX_BUNDLE_BYTES:
            call.cancel()
            raise BundleError(f"the tokenizer bundle is larger than {MAX_BUNDLE_BYTES} bytes")
    return bytes(raw)


def _is_transport_failure(error: grpc.aio.AioRpcError) -> bool:
    """Whether the connection or its other end broke, rather than a server of ours having decided."""
    if any(key == _DETAILS_KEY for key, _ in error.trailing_metadata() or ()):
        return False
    if error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED):
        return True
    details = error.details() or ""
    return error.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN) and (
        "RST_STREAM" in details or "Stream removed" in details or "GOAWAY" in details
    )


def _fits(message: GenerateResponse, num_delivered: int) -> bool:
    """Whether the message goes on exactly behind what was delivered. If not, the stream is as good as broken."""
    return not message.token_ids or message.start_pos == num_delivered


def _resumption(request: GenerateRequest, delivered: list[int], attempt: int) -> GenerateRequest:
    resumption = GenerateRequest()
    resumption.CopyFrom(request)
    del resumption.resume_token_ids[:]
    resumption.resume_token_ids.extend(delivered)
    resumption.attempt = attempt
    return resumption


def _finish_of_length(num_generated: int, num_prompt: int) -> GenerateResponse:
    """The finish of a generation that broke off between its last token and its end."""
    finish = Finish(reason=FINISH_REASON_LENGTH, num_prompt_tokens=num_prompt, num_generated_tokens=num_generated)
    return GenerateResponse(start_pos=num_generated, finish=finish)
