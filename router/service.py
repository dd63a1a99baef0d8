"""The router's gRPC services: Inference, the same as that of workers, and Router.

Generate and GetTokenizer have no serializers: requests and responses are passed on as the bytes that arrived.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncIterator, Awaitable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias, TypeVar, cast

import grpc
from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from headrace.common.kubernetes.watches import ServiceWatches
from headrace.common.retries import AT_WORKERS, Verdict, verdict_of
from headrace.common.tasks import end_tasks
from headrace.common.telemetry.logs import NO_REQUEST, request_id_of, request_id_var
from headrace.common.telemetry.span import Span
from headrace.common.telemetry.tracing import serving_span, traceparent_of
from headrace.common.transport.channels import PLAIN, SERVER_OPTIONS, Transport
from headrace.common.transport.introspection import add_introspection, set_serving, start_probe
from headrace.common.transport.session_server import SessionServer
from headrace.common.transport.sessions import CallContext
from headrace.common.transport.wire_request import HeldBytes, WireRequest
from headrace.protos import keda_pb2_grpc, router_pb2
from headrace.protos.status import Reason, StatusError, abort
from headrace.router.dispatch.admission import Admission, AdmissionConfig
from headrace.router.dispatch.attempt import UpstreamError
from headrace.router.dispatch.cold_start import ColdStarts
from headrace.router.dispatch.forwarding import Forwarding, ForwardingConfig
from headrace.router.dispatch.generation import Generation, Metadata
from headrace.router.dispatch.holding import Holding, OnDemand
from headrace.router.dispatch.metrics import RequestLoad, RouterMetrics
from headrace.router.dispatch.scaling import Scaling, ScalingConfig, ScalingSignal
from headrace.router.draining import Handovers, drain_worker
from headrace.router.explain import explain
from headrace.router.fleet.fleet import Fleet
from headrace.router.fleet.fleet_adapters import FleetAdapters, ServedList
from headrace.router.fleet.leases import LeaseReader
from headrace.router.fleet.links import LinkState
from headrace.router.fleet.registry import check_target
from headrace.router.keda import SCALER, ExternalScaler, start_scaler
from headrace.router.picking import Picking

log = logging.getLogger(__name__)

INFERENCE = "headrace.v1.Inference"
ROUTER = "headrace.v1.Router"
REDIS = "redis"
"""A name in gRPC health, not a service: the state of the leases' Redis, if there is one."""
GENERATE_SPAN = f"{INFERENCE}/Generate"
PASSED_ON_METADATA = ("x-request-id", "traceparent")
_HEALTH_POLL_S = 5.0
# Number of calls at a time besides Generate. Further ones are refused before their messages are stored.
_OTHER_CALLS = 2048
# Calls of Explain at a time.
_MAX_EXPLAINING = 8
# Requests of at most this many bytes are decoded before their size is checked.
_SMALL_BYTES = 1 << 20
_DEADLINE_SLACK_S = 0.1  # a caller whose deadline has passed may cancel this much before it passes here

_Methods: TypeAlias = "dict[str, grpc.RpcMethodHandler[Any, Any]]"
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_GenerateContext: TypeAlias = "_Context | CallContext"
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class RequestBounds:
    """The maximum number of concurrent requests, and of their bytes on the wire."""

    max_in_flight: int = 4096
    max_request_bytes: int = 256 << 20


def passed_on(context: _GenerateContext) -> Metadata:
    """The part of the caller's metadata that is sent to the worker."""
    received = cast("Metadata", tuple(context.invocation_metadata() or ()))
    return tuple((key, value) for key, value in received if key in PASSED_ON_METADATA)


def check_size(fleet: Fleet, num_bytes: int) -> None:
    """Raise StatusError (CONTEXT_TOO_LONG) for a request that is too large for every model here, without decoding it:
    decoding 16 MB blocks the event loop for a tenth of a second."""
    if num_bytes <= _SMALL_BYTES:
        return
    most = fleet.max_request_bytes
    if most is not None and num_bytes > most:
        problem = (
            f"the request has {num_bytes} bytes; no request that fits into the context of a model here has over {most}"
        )
        raise StatusError(Reason.CONTEXT_TOO_LONG, problem, field="token_ids")


class InferenceService:
    """Inference.Generate over the fleet. At most `max_in_flight` requests at a time, waiting ones included, with
    `max_request_bytes` on the wire in total. The memory for a request is a small multiple of its bytes."""

    def __init__(
        self,
        fleet: Fleet,
        forwarding: Forwarding,
        scaling: Scaling,
        metrics: RouterMetrics,
        bounds: RequestBounds,
    ) -> None:
        self._fleet = fleet
        self._forwarding = forwarding
        self._scaling = scaling
        self._metrics = metrics
        self.bounds = bounds
        self.sessions = SessionServer(self.serve, math.inf)  # `bounds` are checked for all calls
        self.num_in_flight = 0
        self.held = HeldBytes()

    async def generate(self, raw: bytes, context: _GenerateContext) -> None:
        """Answer one call of Generate, whose request is still encoded."""
        await self.serve(WireRequest(raw), context)

    async def serve(self, wire: WireRequest, context: _GenerateContext) -> None:
        """Answer one call from a session or a call of its own, and count its end by status."""
        metadata = cast("Metadata", tuple(context.invocation_metadata() or ()))
        request_id_var.set(request_id_of(metadata) or NO_REQUEST)
        span = serving_span(GENERATE_SPAN, traceparent_of(metadata))
        code = grpc.StatusCode.CANCELLED
        self.num_in_flight += 1
        self.held.hold(wire)
        try:
            await self._forward(wire, context)
            code = grpc.StatusCode.OK
        except StatusError as error:
            code = error.row.grpc_code
            self._metrics.refused(error.reason)
            span.fail(error.reason.name.lower(), error.message)
            await abort(context, error)
        except UpstreamError as error:
            code = error.code
            span.fail(error.code.name.lower(), error.details)
            await context.abort(error.code, error.details, error.trailing_metadata)
        except asyncio.CancelledError:
            left_s = context.time_remaining()
            if left_s is not None and left_s <= _DEADLINE_SLACK_S:
                code = grpc.StatusCode.DEADLINE_EXCEEDED
            raise
        except Exception:
            code = grpc.StatusCode.INTERNAL
            log.exception("a request failed inside the router")
            span.fail("internal")
            await abort(context, StatusError(Reason.INTERNAL, "the router failed; its log has the reason"))
        finally:
            self.num_in_flight -= 1
            self.held.release(wire)
            self._metrics.requests.labels(code.name).inc()
            _end(span, code)

    async def _forward(self, wire: WireRequest, context: _GenerateContext) -> None:
        if self.sessions.is_ending:
            raise StatusError(Reason.DRAINING, "this router is stopping", retry_after_s=1.0)
        if self.num_in_flight > self.bounds.max_in_flight:
            problem = f"this router has {self.bounds.max_in_flight} requests in flight, its maximum"
            raise StatusError(Reason.QUEUE_FULL, problem, retry_after_s=1.0)
        if self.held.total > self.bounds.max_request_bytes:
            problem = (
                f"the requests in flight here have {self.bounds.max_request_bytes} bytes, the maximum of this router "
                "(--max-request-mb)"
            )
            raise StatusError(Reason.QUEUE_FULL, problem, retry_after_s=1.0)
        check_size(self._fleet, wire.num_bytes)
        generation = Generation(
            wire,
            context.write,
            context.time_remaining,
            max_attempts=self._forwarding.config.max_attempts,
            metadata=passed_on(context),
        )
        try:
            await self._forwarding.run(generation)
        except StatusError as error:
            self._scaling.refused(generation.request.model, error.reason)
            raise
        except UpstreamError as error:
            if error.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
                self._scaling.refused(generation.request.model, Reason.QUEUE_FULL)
            raise

    def handler(self) -> grpc.GenericRpcHandler:
        """The handler of the Inference service that a gRPC server takes."""
        methods: _Methods = {
            "Generate": grpc.unary_stream_rpc_method_handler(self.generate),
            "Session": self.sessions.method(),
        }
        return grpc.method_handlers_generic_handler(INFERENCE, methods)


class RouterService:
    """The Router service: models, workers, registration, placements and tokenizer bundles."""

    def __init__(
        self,
        fleet: Fleet,
        cold_starts: ColdStarts,
        scaling: Scaling,
        picking: Picking,
        transport: Transport = PLAIN,
        leases: LeaseReader | None = None,
    ) -> None:
        self._fleet = fleet
        self._picking = picking
        self._cold_starts = cold_starts
        self._scaling = scaling
        self._transport = transport
        self._leases = leases
        self._num_explaining = 0
        self._adapters = ServedList()

    async def list_models(
        self, request: router_pb2.ListModelsRequest, context: _Context
    ) -> router_pb2.ListModelsResponse:
        """The models of live workers, and the state of the Redis of their leases."""
        redis = router_pb2.REDIS_STATE_UNSPECIFIED if self._leases is None else self._leases.state
        models = self._fleet.models().values()
        adapters = self._adapters.of(self._fleet.links())
        on_demand = self._cold_starts.on_demand.names
        return router_pb2.ListModelsResponse(models=models, redis=redis, adapters=adapters, on_demand=on_demand)

    async def await_model(
        self, request: router_pb2.AwaitModelRequest, context: _Context
    ) -> router_pb2.AwaitModelResponse:
        """Wait until a model that is started on demand has a worker, and keep the worker if that is wanted."""
        try:
            card = await self._cold_starts.card_of(request.model)
        except StatusError as error:
            self._scaling.refused(request.model, error.reason)
            await abort(context, error)
        if request.keeps:
            with self._scaling.using(card.name):
                await asyncio.Event().wait()  # until the call is cancelled
        return router_pb2.AwaitModelResponse(card=card)

    async def pick(
        self, request_iterator: AsyncIterator[router_pb2.PickRequest], context: _Context
    ) -> AsyncIterator[router_pb2.PickResponse]:
        """Choose workers for a request that a proxy sends."""
        try:
            async for response in self._picking.answers(request_iterator):
                yield response
        except StatusError as error:
            await abort(context, error)

    async def list_scaling_signals(
        self, request: router_pb2.ListScalingSignalsRequest, context: _Context
    ) -> router_pb2.ListScalingSignalsResponse:
        """How much work there is for the workers of each model, and how many are wanted."""
        signals = self._scaling.signals()
        wanted = [_signal(signal) for signal in signals if request.model in ("", signal.model)]
        return router_pb2.ListScalingSignalsResponse(signals=wanted)

    async def list_workers(
        self, request: router_pb2.ListWorkersRequest, context: _Context
    ) -> router_pb2.ListWorkersResponse:
        """All members of the fleet, whether they are reachable or not."""
        return router_pb2.ListWorkersResponse(workers=self._fleet.workers())

    async def register(self, request: router_pb2.RegisterRequest, context: _Context) -> router_pb2.RegisterResponse:
        """Add a worker or renew its lease."""
        try:
            if not self._transport.knows_callers:
                check_target(request.address, context.peer())
            lease_s = self._fleet.register(request.worker_id, request.address)
        except StatusError as error:
            await abort(context, error)
        return router_pb2.RegisterResponse(lease_ms=round(lease_s * 1000))

    async def deregister(
        self, request: router_pb2.DeregisterRequest, context: _Context
    ) -> router_pb2.DeregisterResponse:
        """Remove a worker."""
        self._fleet.deregister(request.worker_id, request.address)
        return router_pb2.DeregisterResponse()

    async def drain_worker(
        self, request: router_pb2.DrainWorkerRequest, context: _Context
    ) -> router_pb2.DrainWorkerResponse:
        """Drain a worker, or let it take requests again. Answers when the worker does."""
        return await _answered(context, drain_worker(self._fleet, request, context.time_remaining()))

    async def explain(self, raw: bytes, context: _Context) -> router_pb2.ExplainResponse:
        """Explain where a request would be placed now. Only a few at a time, because each costs as much as a
        placement."""
        self._num_explaining += 1
        try:
            if self._num_explaining > _MAX_EXPLAINING:
                problem = f"this router explains {_MAX_EXPLAINING} placements at a time; ask again in a moment"
                raise StatusError(Reason.QUEUE_FULL, problem, retry_after_s=0.1)
            check_size(self._fleet, len(raw))
            return await explain(self._fleet, _explain_request(raw))
        except StatusError as error:
            await abort(context, error)
        finally:
            self._num_explaining -= 1

    async def get_tokenizer(self, raw: bytes, context: _Context) -> AsyncIterator[bytes]:
        """Pass on a bundle from a worker that has it. The messages of both services are the same on the wire."""
        try:
            sha256 = router_pb2.RouterGetTokenizerRequest.FromString(raw).sha256
        except DecodeError:
            sha256 = ""
        if not sha256:
            problem = "sha256 is empty: say which bundle, by tokenizer_sha256 of a model card"
            await abort(context, StatusError(Reason.INVALID_FIELD, problem, field="sha256"))
        for link in self._fleet.links():
            has_it = link.card is not None and link.card.tokenizer_sha256 == sha256
            if not has_it or link.state is LinkState.UNREACHABLE:
                continue
            num_delivered = 0
            call = link.get_tokenizer(raw, timeout=context.time_remaining(), metadata=tuple(passed_on(context)))
            try:
                while (message := await call.read()) is not grpc.aio.EOF:
                    assert isinstance(message, bytes)
                    num_delivered += 1
                    yield message
                return
            except grpc.aio.AioRpcError as error:
                if num_delivered:
                    await self._broken_off(context, error)
                log.warning("worker %s gave no tokenizer: %s", link.worker_id, error.details())
            finally:
                call.cancel()
        await abort(context, StatusError(Reason.NOT_FOUND, f"no live worker has a tokenizer bundle {sha256}"))

    async def _broken_off(self, context: _Context, error: grpc.aio.AioRpcError) -> NoReturn:
        if verdict_of(error, AT_WORKERS) is Verdict.FINAL:
            details = cast("Metadata", tuple(error.trailing_metadata() or ()))
            await context.abort(error.code(), error.details() or "", tuple(details))
        problem = "the worker was lost in the middle of the bundle: ask again"
        await abort(context, StatusError(Reason.WORKER_LOST, problem, retry_after_s=1.0))

    def handler(self) -> grpc.GenericRpcHandler:
        """The handler of the Router service that a gRPC server takes."""
        pb = router_pb2
        unary = grpc.unary_unary_rpc_method_handler
        calls = _AdapterCalls(self._fleet.adapters)
        serialize = _serialized
        methods: _Methods = {
            "ListModels": unary(self.list_models, pb.ListModelsRequest.FromString, serialize),
            "ListWorkers": unary(self.list_workers, pb.ListWorkersRequest.FromString, serialize),
            "Register": unary(self.register, pb.RegisterRequest.FromString, serialize),
            "Deregister": unary(self.deregister, pb.DeregisterRequest.FromString, serialize),
            "LoadAdapter": unary(calls.load, pb.RouterLoadAdapterRequest.FromString, serialize),
            "UnloadAdapter": unary(calls.unload, pb.RouterUnloadAdapterRequest.FromString, serialize),
            "Pick": grpc.stream_stream_rpc_method_handler(self.pick, pb.PickRequest.FromString, serialize),
            "AwaitModel": unary(self.await_model, pb.AwaitModelRequest.FromString, serialize),
            "ListScalingSignals": unary(self.list_scaling_signals, pb.ListScalingSignalsRequest.FromString, serialize),
            "DrainWorker": unary(self.drain_worker, pb.DrainWorkerRequest.FromString, serialize),
            "Explain": unary(self.explain, None, serialize),
            "GetTokenizer": grpc.unary_stream_rpc_method_handler(self.get_tokenizer),
        }
        return grpc.method_handlers_generic_handler(ROUTER, methods)


class _AdapterCalls:
    """Serves LoadAdapter and UnloadAdapter."""

    def __init__(self, adapters: FleetAdapters) -> None:
        self._adapters = adapters

    async def load(
        self,
        request: router_pb2.RouterLoadAdapterRequest,
        context: _Context,
    ) -> router_pb2.RouterLoadAdapterResponse:
        """Load an adapter at all workers of its model."""
        adapter = await _answered(context, self._adapters.load(request))
        return router_pb2.RouterLoadAdapterResponse(adapter=adapter)

    async def unload(
        self,
        request: router_pb2.RouterUnloadAdapterRequest,
        context: _Context,
    ) -> router_pb2.RouterUnloadAdapterResponse:
        """Unload an adapter at all workers."""
        await _answered(context, self._adapters.unload(request.name))
        return router_pb2.RouterUnloadAdapterResponse()


async def _answered(context: _Context, work: Awaitable[_T]) -> _T:
    """Return the result of `work`. A StatusError ends the call."""
    try:
        return await work
    except StatusError as error:
        await abort(context, error)


def _signal(signal: ScalingSignal) -> router_pb2.ScalingSignal:
    return router_pb2.ScalingSignal(
        model=signal.model,
        workers_ready=signal.num_ready,
        workers_wanted=signal.num_wanted,
        queue_wait_ms=signal.queue_wait_ms,
        backlog_seconds=signal.backlog_s,
        kv_pressure=signal.kv_pressure,
        requests_waiting=signal.num_waiting,
        requests_at_workers=signal.num_at_workers,
        requests_refused=sum(signal.num_refused.values()),
    )


def _explain_request(raw: bytes) -> router_pb2.ExplainRequest:
    try:
        return router_pb2.ExplainRequest.FromString(raw)
    except DecodeError:
        raise StatusError(Reason.INVALID_FIELD, "the body is not an ExplainRequest of headrace.v1") from None


def _end(span: Span, code: grpc.StatusCode) -> None:
    if span.is_recording:
        number = code.value[0]
        request_id = request_id_var.get()
        span.set({"rpc.system": "grpc", "rpc.grpc.status_code": number, "headrace.request_id": request_id})
    span.end()


def _serialized(message: Any) -> bytes:
    return cast("bytes", message.SerializeToString())


class RouterServer:
    """A listening router: both services, health and reflection.

    `bind` and `start` in this order; `stop` ends it. Health of Inference follows the fleet: SERVING while at least one
    worker is ready, or if requests are held for models on demand. Health of Router is SERVING from when the pods of all
    Services are known. With leases, health also has the name `REDIS`, SERVING while leases can be read and renewed.
    """

    def __init__(
        self,
        fleet: Fleet,
        metrics: RouterMetrics,
        forwarding: ForwardingConfig,
        admission: AdmissionConfig,
        bounds: RequestBounds = RequestBounds(),
        transport: Transport = PLAIN,
        leases: LeaseReader | None = None,
        services: ServiceWatches | None = None,
        on_demand: OnDemand = OnDemand(),  # noqa: B008  frozen
        scaling: ScalingConfig = ScalingConfig(),  # noqa: B008  frozen
    ) -> None:
        self._fleet = fleet
        self._leases = leases
        self._services = services
        self._transport = transport
        self._handovers = Handovers(fleet, metrics)
        holding = Holding(on_demand)
        self.admission = Admission(fleet, admission, holding)
        self.scaling = Scaling(fleet, self.admission, holding, scaling)
        cold_starts = ColdStarts(fleet, self.admission, holding)
        picking = Picking(fleet, self.admission, metrics)
        forwarder = Forwarding(fleet, self.admission, cold_starts, metrics, forwarding)
        self.inference = InferenceService(fleet, forwarder, self.scaling, metrics, bounds)
        metrics.observe_requests(self.admission, self)
        metrics.observe_scaling(self.scaling)
        metrics.observe_sessions(self.inference.sessions)
        most = bounds.max_in_flight + _OTHER_CALLS
        self._server = grpc.aio.server(
            interceptors=transport.interceptors(), options=SERVER_OPTIONS, maximum_concurrent_rpcs=most
        )
        self._server.add_generic_rpc_handlers(
            (
                self.inference.handler(),
                RouterService(fleet, cold_starts, self.scaling, picking, transport, leases).handler(),
            )
        )
        keda_pb2_grpc.add_ExternalScalerServicer_to_server(ExternalScaler(self.scaling), self._server)
        self._has_on_demand = bool(on_demand.models)
        self._health = add_introspection(self._server, [INFERENCE, ROUTER, SCALER])
        self._health_task: asyncio.Task[None] | None = None
        self._more_servers: list[grpc.aio.Server] = []

    @property
    def request_load(self) -> RequestLoad:
        """The requests and bytes that Generate holds now, and their limits."""
        inference = self.inference
        bounds = inference.bounds
        num_bytes = inference.held.total
        return RequestLoad(inference.num_in_flight, bounds.max_in_flight, num_bytes, bounds.max_request_bytes)

    def bind(self, address: str) -> int:
        """Bind the address. Returns its port (1 for a unix socket). Raises OSError if it is in use or invalid."""
        try:
            return self._transport.bind(self._server, address)
        except RuntimeError as error:
            raise OSError(str(error)) from error

    async def start_probe(self, address: str) -> None:
        """Answer health checks at a second address, without TLS. Raises RuntimeError if it is in use."""
        self._more_servers.append(await start_probe(address, self._health))

    async def start_scaler(self, address: str) -> None:
        """Answer KEDA's calls at another address, without TLS. Raises RuntimeError if it is in use."""
        self._more_servers.append(await start_scaler(address, self.scaling))

    async def start(self) -> None:
        """Link the fleet and answer calls."""
        await self._fleet.start()
        await self._server.start()
        self.scaling.start()
        await set_serving(self._health, [SCALER, *([ROUTER] if self._knows_pods else [])], True)
        self._health_task = asyncio.create_task(self._follow_health(), name="health")

    async def stop(self, grace_s: float) -> None:
        """Refuse new calls, let running ones continue for at most `grace_s` seconds, then end them."""
        if self._health_task is not None:
            await end_tasks(self._health_task)
        await self._health.enter_graceful_shutdown()
        self.admission.drain()
        self.inference.sessions.end_when_idle()
        await self._server.stop(grace_s)
        for server in self._more_servers:
            await server.stop(None)
        await self.scaling.close()
        await self._handovers.close()
        await self._fleet.close()

    @property
    def _knows_pods(self) -> bool:
        return self._services is None or self._services.have_listed

    async def _follow_health(self) -> None:
        while True:
            status = health_pb2.HealthCheckResponse
            await self._health.set(ROUTER, status.SERVING if self._knows_pods else status.NOT_SERVING)
            takes_requests = self._fleet.num_ready > 0 or self._has_on_demand
            await self._health.set(INFERENCE, status.SERVING if takes_requests else status.NOT_SERVING)
            if self._leases is not None:
                is_ok = self._leases.state == router_pb2.REDIS_STATE_OK
                await self._health.set(REDIS, status.SERVING if is_ok else status.NOT_SERVING)
            await self._fleet.changed(_HEALTH_POLL_S)
