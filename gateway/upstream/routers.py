"""The gateway's client of one or more routers, or of a single worker.

Calls use the addresses in turn. An address that is not connected, or has just failed, is skipped while another one
works. When the transport of a generation fails, the generation resumes after the delivered tokens, through the next
address or the same one. The caller of `generate` sees a pause but no gap and no repetition.

A Kubernetes Service stands for the addresses of its pods. They may change at any time: calls begin at those that are
there then, and running calls go on at those that have left.

    attempt 0   t0 t1 t2 |x            the router dies
    attempt 1            | t3 t4 ...   resume_token_ids = [t0, t1, t2], start_pos = 3

While no worker can answer, a generation waits as long as its client: the model was served a moment ago, and its worker
or router may only be restarting. The number of lost attempts is bounded.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, TypeVar

import grpc

from headrace.common.kubernetes.services import Endpoints, is_service, usable
from headrace.common.ledger import FencedError, Ledger
from headrace.common.retries import AT_ROUTERS, Attempts, Verdict, verdict_of
from headrace.common.tasks import end_tasks
from headrace.common.telemetry.span import Span
from headrace.common.transport.channels import PLAIN, Transport
from headrace.common.transport.silence import Silences
from headrace.common.transport.wire_request import SharedPart, WireRequest
from headrace.gateway.telemetry.spans import begin_attempt
from headrace.gateway.upstream.address import Address, best_of, connect, fallback_of
from headrace.gateway.upstream.bundle import MAX_BUNDLE_BYTES, BundleError
from headrace.gateway.upstream.served_adapters import (
    AdapterCards,
    list_adapters,
    load_adapter,
    served_by_worker,
    unload_adapter,
)
from headrace.protos.inference_pb2 import GenerateRequest, GenerateResponse
from headrace.protos.router_pb2 import (
    REDIS_STATE_UNSPECIFIED,
    AwaitModelRequest,
    DrainWorkerRequest,
    DrainWorkerResponse,
    ExplainRequest,
    ExplainResponse,
    ListModelsRequest,
    ListWorkersRequest,
    PickRequest,
    PickResponse,
    RedisState,
    RouterGetTokenizerRequest,
    RouterLoadAdapterRequest,
    ServedAdapter,
    WorkerInfo,
)
from headrace.protos.status import Reason, StatusError, details_of, error_of, is_peer_lost
from headrace.protos.worker_pb2 import GetModelCardRequest, GetTokenizerRequest, ModelCard

# A generation fails after this many lost attempts in a row without a token.
MAX_IN_VAIN = 12
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.5
LIST_TIMEOUT_S = 5.0
TOKENIZER_TIMEOUT_S = 60.0
EXPLAIN_TIMEOUT_S = 10.0
# Added to the time that a worker may take to drain, so that its answer arrives.
_DRAIN_SLACK_S = 2.0
# The longest attempt. A generation that takes longer is resumed, until its own time limit.
ATTEMPT_TIMEOUT_S = 3600.0
# An address that failed is skipped for this time, unless no other one is left.
AVOID_S = 1.0
# A failing address is logged again if it had no failure for this time.
LOG_AGAIN_S = 10.0

# The address lacks only the model, or the attempt was too long.
_ADDRESS_WORKS = frozenset({Reason.MODEL_NOT_FOUND, Reason.DEADLINE})
_BROKEN_OFF = StatusError(Reason.WORKER_LOST, "the stream ended before the generation did")
_NO_CARD = ModelCard()
_LOG = logging.getLogger(__name__)
_T = TypeVar("_T")

Metadata = tuple[tuple[str, str], ...]


class Backoff:
    """The pauses between the attempts of one generation at several addresses."""

    def __init__(self, num_addresses: int, number: int = 0) -> None:
        """`number` is the number of the first attempt."""
        self.attempts = Attempts(MAX_IN_VAIN, number=number)
        self._num_addresses = num_addresses
        self._num_waits = 0
        self._num_unknown = 0  # addresses that did not know the model, since the last one that did

    def after(
        self, verdict: Verdict, *, progressed: bool = False, has_begun: bool = True, was_connected: bool = True
    ) -> float | None:
        """Seconds from the beginning of the failed attempt to the next one; None to give up.

        `was_connected`: there was a connection when the attempt began. `progressed`: this attempt delivered tokens;
        `has_begun`: any attempt has. An answer that has begun waits for room and is never refused.
        """
        if progressed:
            self._num_waits = 0
        if verdict not in (Verdict.LOST, Verdict.UNKNOWN_MODEL):
            self._num_unknown = 0  # this address knows the model, and may only be waiting for its worker
        is_nobody_there = verdict is Verdict.NO_WORKER or (verdict is Verdict.LOST and not was_connected)
        if is_nobody_there or (has_begun and verdict in (Verdict.FULL, Verdict.DRAINING)):
            self._num_waits += 1
            self.attempts.waited(progressed=progressed, has_begun=has_begun)
            return self._pause_s(self._num_waits)
        if verdict is Verdict.UNKNOWN_MODEL and self._num_unknown + 1 < self._num_addresses:
            self._num_unknown += 1
            return 0.0  # routers may know different workers
        if verdict not in (Verdict.LOST, Verdict.DRAINING):
            return None
        self._num_waits = 0
        self.attempts.lost(progressed=progressed)
        return self._pause_s(self.attempts.num_in_vain) if self.attempts.are_left else None

    def _pause_s(self, number: int) -> float:
        """Seconds to wait after `number` failed attempts."""
        rounds, position = divmod(number, self._num_addresses)
        if position:  # an address that has not been tried in this round
            return 0.0
        return min(FIRST_BACKOFF_S * 2.0 ** min(rounds - 1, 16), MAX_BACKOFF_S)


class PickCall:
    """A call of Pick, which holds the booking of a request."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def served_by(self, host: str) -> None:
        """Tell the router which host serves the request. A router that is lost has no booking any more."""
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.write(PickRequest(served_host=host))

    def end(self) -> None:
        """The request has ended."""
        self._call.cancel()


class Upstream:
    """Client of the routers, or of the worker, at some addresses. Made and used in one event loop."""

    def __init__(
        self,
        addresses: Sequence[str],
        transport: Transport = PLAIN,
        *,
        worker_wait_s: float | None = None,
        plain_grpc: bool = False,
        on_retry: Callable[[Reason], None] = lambda reason: None,
        problem_of: Callable[[str], StatusError | None] = lambda model: None,
        in_use: Counter[str] | None = None,
    ) -> None:
        """`worker_wait_s` bounds how long a generation without a token waits for a worker; None: as long as its client.
        `plain_grpc`: each generation is a separate RPC instead of one of many in a session.

        `on_retry` is called with the reason of the failure when a generation is retried. `problem_of` is called with a
        model's name when no worker takes a generation; it returns why no worker will ever take it, or None if one may.
        `in_use` counts the running generations that need each model.
        """
        assert addresses, "no address"
        self._worker_wait_s = worker_wait_s
        self._plain_grpc = plain_grpc
        self._transport = transport
        self._version = transport.version
        self._silences = Silences()
        self._sources = {address: [self._connect(_target_of(address))] for address in addresses}
        self._turn = 0
        self._on_retry = on_retry
        self._problem_of = problem_of
        self._in_use = Counter[str]() if in_use is None else in_use
        self._adapter_cards = AdapterCards()
        self.redis: RedisState = REDIS_STATE_UNSPECIFIED
        """The state of the Redis of the router that listed its models last."""
        self.on_demand: frozenset[str] = frozenset()
        """The models that the router starts on demand, according to its last list."""
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def _endpoints(self) -> list[Address]:
        """All addresses; never none."""
        return [endpoint for endpoints in self._sources.values() for endpoint in endpoints]

    def pods_seen(self, service: str, endpoints: Endpoints) -> None:
        """Use the pods of a Kubernetes Service, which is one of the addresses that this object was made with."""
        targets = sorted(usable(endpoints)) or [_target_of(service)]
        before = {endpoint.address: endpoint for endpoint in self._sources[service]}
        self._sources[service] = [
            before.pop(target) if target in before else self._connect(target) for target in targets
        ]
        for endpoint in before.values():
            _LOG.info("%s has left %s", endpoint.address, service)
            self._retire(endpoint)

    def _retire(self, endpoint: Address) -> None:
        """Let the running calls of an address end, then close its channel."""
        endpoint.sessions.retire()
        task = asyncio.create_task(endpoint.channel.close(ATTEMPT_TIMEOUT_S))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

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
        """Cards of the models that are served now, by the first address that knows any: a router that was just
        restarted knows no worker yet. Raises `StatusError`."""

        async def by_router(endpoint: Address) -> list[ModelCard]:
            answer = await endpoint.router.ListModels(ListModelsRequest(), timeout=LIST_TIMEOUT_S)
            self.redis = answer.redis
            self.on_demand = frozenset(answer.on_demand)
            return [*answer.models, *self._adapter_cards.of(answer.models, answer.adapters)]

        async def by_worker(endpoint: Address) -> list[ModelCard]:
            answer = await endpoint.worker.GetModelCard(GetModelCardRequest(), timeout=LIST_TIMEOUT_S)
            return [answer.card, *self._adapter_cards.of([answer.card], served_by_worker(answer))]

        async def ask(endpoint: Address) -> list[ModelCard]:
            return await endpoint.call(lambda: by_router(endpoint), lambda: by_worker(endpoint))

        return await self._first_that_works(ask, may_be_empty=True)

    async def await_model(self, name: str) -> None:
        """Return when a model of `on_demand` has a worker. A router that is lost does not end the wait. Raises
        `StatusError` if the model is not started in time."""
        while True:
            try:
                await self._first_that_works(lambda endpoint: endpoint.router.AwaitModel(AwaitModelRequest(model=name)))
            except StatusError as error:
                if error.reason not in (Reason.WORKER_LOST, Reason.DRAINING):
                    raise
                await asyncio.sleep(MAX_BACKOFF_S)
            else:
                return

    @asynccontextmanager
    async def using(self, models: Iterable[str]) -> AsyncIterator[None]:
        """Context manager: those of these models that are `on_demand` count as used, at each router."""

        async def use(endpoint: Address, name: str) -> None:
            with suppress(grpc.aio.AioRpcError):  # the router is lost, or a worker has no such method
                await endpoint.router.AwaitModel(AwaitModelRequest(model=name, keeps=True))

        names = self.on_demand.intersection(models)
        calls = [asyncio.create_task(use(endpoint, name)) for endpoint in self._endpoints for name in names]
        try:
            yield
        finally:
            await end_tasks(*calls)

    async def pick(self, request: PickRequest) -> tuple[PickCall, PickResponse]:
        """Let a router choose workers for a request that a proxy sends. The booking lasts until the call is ended.
        Raises `StatusError`."""

        async def ask(endpoint: Address) -> tuple[PickCall, PickResponse]:
            call = endpoint.router.Pick()
            try:
                await call.write(request)
                answer = await call.read()
            except BaseException:
                call.cancel()
                raise
            if answer is grpc.aio.EOF:
                raise StatusError(Reason.INTERNAL, "the router ended a pick without an answer")
            return PickCall(call), answer

        return await self._first_that_works(ask)

    async def list_adapters(self) -> list[ServedAdapter]:
        """The adapters that are served now, by name. Raises `StatusError`."""
        return await self._first_that_works(list_adapters)

    async def load_adapter(self, request: RouterLoadAdapterRequest) -> None:
        """Load an adapter at all workers of its model. Raises `StatusError`."""
        await self._first_that_works(lambda endpoint: load_adapter(endpoint, request))

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter at all workers. Raises `StatusError`."""
        await self._first_that_works(lambda endpoint: unload_adapter(endpoint, name))

    async def drain_worker(self, request: DrainWorkerRequest, wait_s: float) -> DrainWorkerResponse:
        """Drain a worker, or let it take requests again. Waits for its requests for at most `wait_s`. Raises
        `StatusError`."""
        timeout_s = wait_s + _DRAIN_SLACK_S
        return await self._first_that_works(
            lambda endpoint: _of_router(endpoint, endpoint.router.DrainWorker(request, timeout=timeout_s))
        )

    async def explain(self, request: ExplainRequest) -> ExplainResponse:
        """Ask the next router where it would place a request now. Raises `StatusError`."""
        return await self._first_that_works(
            lambda endpoint: _of_router(endpoint, endpoint.router.Explain(request, timeout=EXPLAIN_TIMEOUT_S))
        )

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
        """The tokenizer bundle with this hash. Raises `StatusError`, or `BundleError` if its bytes have another
        hash."""

        request = RouterGetTokenizerRequest(sha256=sha256)
        direct = GetTokenizerRequest(sha256=sha256)

        async def ask(endpoint: Address) -> bytes:
            return await endpoint.call(
                lambda: _joined(endpoint.router.GetTokenizer(request, timeout=TOKENIZER_TIMEOUT_S)),
                lambda: _joined(endpoint.worker.GetTokenizer(direct, timeout=TOKENIZER_TIMEOUT_S)),
            )

        raw = await self._first_that_works(ask, may_be_elsewhere=True)
        if hashlib.sha256(raw).hexdigest() != sha256:
            raise BundleError(f"the tokenizer bundle for {sha256} has another hash")
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
        """The messages of one generation, resumed as often as necessary. Close the iterator to cancel it.

        `deadline_s` is the monotonic time of the client's deadline, which router and worker also get. `shared` are
        parts that several requests share; `num_prompt_tokens` is the length of a shared prompt. The model's `card`
        decides whether an interrupted answer is complete. The last message has a finish. Raises `StatusError`.
        """
        ledger = Ledger(request, num_prompt_tokens or len(request.token_ids))
        backoff = Backoff(len(self._endpoints), request.attempt)
        asked_s = time.monotonic()
        base = card.parent or card.name
        lacking: set[str] = set()  # the addresses that do not know the model
        attempt = request
        with self._using(base):
            while True:
                endpoint = self._next_endpoint(lacking)
                was_connected = endpoint.is_connected
                began_s = time.monotonic()
                timeout_s = _attempt_timeout_s(deadline_s)
                ledger.begin_attempt()
                span, call = _begin(endpoint, attempt, shared, metadata, timeout_s)
                try:
                    while (raw := await call.read()) is not grpc.aio.EOF:
                        message = GenerateResponse.FromString(raw)
                        ledger.record(message)
                        yield message
                        if ledger.is_finished:
                            return
                    failure = _noted(span, _BROKEN_OFF)
                    verdict = Verdict.LOST
                except FencedError:
                    failure = _noted(span, _BROKEN_OFF)
                    verdict = Verdict.LOST
                except grpc.aio.AioRpcError as error:
                    failure = _noted(span, error_of(error))
                    verdict = verdict_of(error, AT_ROUTERS)
                    if _was_too_long(failure, timeout_s, began_s):
                        verdict = Verdict.LOST
                finally:
                    call.cancel()
                    span.end()
                if (closing := ledger.closing_message(card)) is not None:
                    yield closing
                    return
                has_begun = bool(ledger.token_ids)
                delay_s = backoff.after(
                    verdict, progressed=ledger.has_progressed, has_begun=has_begun, was_connected=was_connected
                )
                if verdict is Verdict.NO_WORKER and (hopeless := self._problem_of(base)) is not None:
                    raise hopeless
                if delay_s is None or (not has_begun and self._waited_enough(asked_s)):
                    raise _for_clients(failure) if verdict is Verdict.LOST or delay_s is not None else failure
                lacking = {endpoint.address, *lacking} if verdict is Verdict.UNKNOWN_MODEL else set()
                await self._pause(endpoint, failure, len(ledger.token_ids), began_s + delay_s)
                attempt = ledger.resumption(request, backoff.attempts.number)

    @contextmanager
    def _using(self, model: str) -> Iterator[None]:
        """Context manager: a generation needs a worker of this model."""
        self._in_use[model] += 1
        try:
            yield
        finally:
            self._in_use[model] -= 1
            if not self._in_use[model]:
                del self._in_use[model]

    def _waited_enough(self, asked_s: float) -> bool:
        return self._worker_wait_s is not None and time.monotonic() - asked_s >= self._worker_wait_s

    async def _pause(self, endpoint: Address, failure: StatusError, num_delivered: int, until_s: float) -> None:
        """Record a failure, and wait until the next attempt."""
        if failure.reason not in _ADDRESS_WORKS:
            self._avoid(endpoint, failure)
        self._on_retry(failure.reason)
        _LOG.debug("through %s, after %d tokens: %s", endpoint.address, num_delivered, failure.message)
        await asyncio.sleep(max(0.0, until_s - time.monotonic()))

    async def _first_that_works(
        self, ask: Callable[[Address], Awaitable[_T]], *, may_be_elsewhere: bool = False, may_be_empty: bool = False
    ) -> _T:
        """The answer of one address, or of the next one while the transport fails. With `may_be_elsewhere`, the next
        one is also asked if an address does not have the object, and with `may_be_empty` if an answer is empty. Raises
        `StatusError`."""
        asked = set[str]()
        empty: list[_T] = []
        while True:
            endpoint = self._next_endpoint(asked)
            asked.add(endpoint.address)
            try:
                answer = await ask(endpoint)
            except grpc.aio.AioRpcError as error:
                lost = is_peer_lost(error) or error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
                if lost:
                    self._avoid(endpoint, error_of(error))
                is_elsewhere = may_be_elsewhere and error.code() is grpc.StatusCode.NOT_FOUND
                if self._has_others(asked) and (lost or is_elsewhere):
                    continue
                if not (lost and empty):
                    raise error_of(error) from error
            else:
                if answer or not may_be_empty:
                    return answer
                empty.append(answer)
            if not self._has_others(asked):
                return empty[0]

    def _has_others(self, asked: Collection[str]) -> bool:
        return any(endpoint.address not in asked for endpoint in self._endpoints)

    def _next_endpoint(self, asked: Collection[str] = ()) -> Address:
        """The next address in turn, preferably one that seems to work. Those in `asked` come last of all."""
        if self._transport.version != self._version:
            self._renew_channels()
        endpoints = self._endpoints
        if len(endpoints) == 1:
            return endpoints[0]
        in_turn = [endpoints[(self._turn + i) % len(endpoints)] for i in range(len(endpoints))]
        chosen = best_of([endpoint for endpoint in in_turn if endpoint.address not in asked] or in_turn)
        self._turn = (endpoints.index(chosen) + 1) % len(endpoints)
        return chosen

    def _renew_channels(self) -> None:
        """Open channels with the new certificates for new calls. Running calls end on the old channels."""
        self._version = self._transport.version
        old = self._endpoints
        self._sources = {
            source: [self._connect(endpoint.address) for endpoint in endpoints]
            for source, endpoints in self._sources.items()
        }
        for endpoint in old:
            self._retire(endpoint)

    def _avoid(self, endpoint: Address, failure: StatusError) -> None:
        """Prefer other addresses for a while. All requests that fail meanwhile share one log line."""
        now_s = time.monotonic()
        if endpoint.avoided_until_s + LOG_AGAIN_S < now_s:
            _LOG.warning("%s fails; its requests use another address or wait: %s", endpoint.address, failure.message)
        endpoint.is_worker = False
        endpoint.avoided_until_s = now_s + AVOID_S


def _target_of(address: str) -> str:
    """The target to connect to until the pods of a Service are known."""
    return fallback_of(address) if is_service(address) else address


def _begin(
    endpoint: Address, request: GenerateRequest, shared: tuple[SharedPart, ...], metadata: Metadata, timeout_s: float
) -> tuple[Span, Any]:
    """Begin an attempt, with a span and a call."""
    span = begin_attempt(request, endpoint.address)
    wire = WireRequest(request.SerializeToString(), shared)
    return span, endpoint.sessions.generate(wire, metadata=span.onto(metadata), timeout=timeout_s)


def _noted(span: Span, failure: StatusError) -> StatusError:
    """Record a failure in the span of its attempt, and return the failure."""
    span.fail(failure.reason.name.lower(), failure.message)
    return failure


async def _of_router(endpoint: Address, call: Awaitable[_T]) -> _T:
    """The response to a call that only routers have. Raises grpc.aio.AioRpcError, or `StatusError` (UNSUPPORTED) if the
    address is not a router."""
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.UNIMPLEMENTED or details_of(error) is not None:
            raise
        problem = f"{endpoint.address} is a worker or an older router; this needs a router of this version"
        raise StatusError(Reason.UNSUPPORTED, problem) from None


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
    """The error for a client whose generation is lost for good."""
    if failure.reason is Reason.WORKER_LOST:
        problem = "the connection to the model was lost and could not be restored in time; try again"
        return StatusError(failure.reason, problem, retry_after_s=failure.retry_after_s or 1.0)
    return failure


def _was_too_long(failure: StatusError, timeout_s: float, began_s: float) -> bool:
    """Whether an attempt failed because it reached `ATTEMPT_TIMEOUT_S`.

    False if its request reached an earlier deadline, or if the router ended it sooner for a reason of its own.
    """
    if failure.reason is not Reason.DEADLINE or timeout_s < ATTEMPT_TIMEOUT_S:
        return False
    return time.monotonic() - began_s > 0.9 * timeout_s  # clocks differ a little


def _attempt_timeout_s(deadline_s: float | None) -> float:
    """Seconds that one attempt may take. Raises `StatusError` when there are none left."""
    if deadline_s is None:
        return ATTEMPT_TIMEOUT_S
    remaining_s = deadline_s - time.monotonic()
    if remaining_s <= 0:
        raise StatusError(Reason.DEADLINE, "the time limit of this request has passed")
    return min(remaining_s, ATTEMPT_TIMEOUT_S)
