"""Envoy's external processor that picks endpoints: version 1.0 of the Endpoint Picker Protocol.

    request headers, body  ->  tokens of the prompt  ->  router: Pick  ->  the endpoints, best first, in the header and
                                                                          in the metadata of Envoy; the body unchanged
    response headers       ->  router: which one serves it
    end of the response    ->  router: the booking is released

Bodies are streamed in both directions (FULL_DUPLEX_STREAMED): the answer to the headers waits for the whole body of the
request, and pieces of the response pass at once. The picker only reads. A body that is no valid request is sent to the
least loaded worker, whose gateway says what is wrong with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import grpc
import msgspec
from google.protobuf.struct_pb2 import ListValue, Struct
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import PLAIN, SERVER_OPTIONS
from headrace.gateway.chat.generation import Plan
from headrace.gateway.picking.tls import Bind
from headrace.gateway.protocol import OpenProtocol
from headrace.gateway.upstream.routers import PickCall, Upstream
from headrace.protos import ext_proc_pb2, ext_proc_pb2_grpc
from headrace.protos.router_pb2 import ExplainRequest, PickRequest, PickResponse
from headrace.protos.status import Reason, StatusError

EXTERNAL_PROCESSOR = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_NAMES = ("", "liveness", "readiness", EXTERNAL_PROCESSOR)
DESTINATION = "x-gateway-destination-endpoint"
SERVED = f"{DESTINATION}-served"
SUBSET = f"{DESTINATION}-subset"
_NAMESPACE = "envoy.lb"
_SUBSET_NAMESPACE = "envoy.lb.subset_hint"
# As large as Envoy lets a piece of a body be.
_PIECE_BYTES = 62_000
_HEALTH_INTERVAL_S = 1.0

_log = logging.getLogger(__name__)
_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
_Response = ext_proc_pb2.ProcessingResponse


class _Asked(msgspec.Struct):
    """What every protocol's body has: the model."""

    model: str = ""


class EndpointPicker(ext_proc_pb2_grpc.ExternalProcessorServicer):
    """Answers a proxy. For one event loop."""

    def __init__(
        self, protocols: Sequence[OpenProtocol], upstream: Upstream, endpoint_port: int, max_body_bytes: int
    ) -> None:
        """Endpoints have `endpoint_port` at the hosts of workers. Larger bodies than `max_body_bytes` are refused."""
        self._protocols = protocols
        self._upstream = upstream
        self._endpoint_port = endpoint_port
        self._max_body_bytes = max_body_bytes

    async def Process(
        self, request_iterator: AsyncIterator[ext_proc_pb2.ProcessingRequest], context: _Context
    ) -> AsyncIterator[ext_proc_pb2.ProcessingResponse]:
        """One HTTP request of the proxy."""
        path, body = "", bytearray()
        subset: frozenset[str] | None = None
        pick: PickCall | None = None
        try:
            async for message in request_iterator:
                part = message.WhichOneof("request")
                if part == "request_headers":
                    path = _header(message.request_headers.headers, ":path").partition("?")[0]
                    subset = _subset_of(message.metadata_context)
                elif part == "request_body":
                    body += message.request_body.body
                if pick is None and part in ("request_headers", "request_body", "request_trailers"):
                    if len(body) > self._max_body_bytes:
                        yield _refusal(_too_large(self._max_body_bytes))
                        return
                    if not _ends(message):
                        continue
                    try:
                        pick, endpoints = await self._pick(path, bytes(body), subset)
                    except StatusError as error:
                        yield _refusal(error)
                        return
                    yield _destination(endpoints)
                    for response in _pieces(body, is_last=part == "request_body") if part != "request_headers" else ():
                        yield response
                    body.clear()
                if part == "request_trailers":
                    yield _Response(request_trailers=ext_proc_pb2.TrailersResponse())
                elif part == "response_headers":
                    served = _served(message.metadata_context)
                    if pick is not None and served:
                        await pick.served_by(served.rpartition(":")[0].strip("[]"))
                    yield _Response(response_headers=ext_proc_pb2.HeadersResponse())
                elif part == "response_body":
                    piece = message.response_body
                    yield _Response(response_body=_piece(piece.body, is_last=piece.end_of_stream))
                elif part == "response_trailers":
                    yield _Response(response_trailers=ext_proc_pb2.TrailersResponse())
        finally:
            if pick is not None:
                pick.end()

    async def _pick(self, path: str, body: bytes, subset: frozenset[str] | None) -> tuple[PickCall, list[str]]:
        """The endpoints of a request, best first, and the call that holds its booking. Raises `StatusError`."""
        hosts = {endpoint.rpartition(":")[0].strip("[]") for endpoint in subset or ()}
        if subset is not None and not hosts:
            raise StatusError(Reason.NO_CAPACITY, "the proxy names no endpoint that may serve it", retry_after_s=1.0)
        request = PickRequest(request=await self._explained(path, body), hosts=sorted(hosts))
        call, answer = await self._upstream.pick(request)
        endpoints = self._endpoints_of(answer, subset)
        if not endpoints:
            call.end()
            problem = "none of the endpoints that may serve the request has a worker"
            raise StatusError(Reason.NO_CAPACITY, problem, retry_after_s=1.0)
        return call, endpoints

    async def _explained(self, path: str, body: bytes) -> ExplainRequest:
        """The description of a request for the router. It has only the model if the tokens of the prompt are not
        known."""
        for protocol in self._protocols:
            try:
                plan = await protocol.plan_of(path, body)
            except StatusError as error:
                if error.reason in (Reason.MODEL_NOT_FOUND, Reason.MODEL_NOT_LOADED, Reason.NO_CAPACITY):
                    raise
                _log.debug("a request is picked an endpoint by load: %s", error.message)
                break
            if plan is not None:
                return _of_plan(plan)
        try:
            return ExplainRequest(model=msgspec.json.decode(body, type=_Asked).model)
        except msgspec.MsgspecError:
            return ExplainRequest()

    def _endpoints_of(self, answer: PickResponse, subset: Collection[str] | None) -> list[str]:
        """The endpoint of each picked worker, each once, those of the subset only."""
        found: dict[str, None] = {}
        for worker in answer.workers:
            endpoint = f"{worker.address.rpartition(':')[0]}:{self._endpoint_port}"
            if subset is None or endpoint in subset:
                found[endpoint] = None
        return list(found)


def _of_plan(plan: Plan) -> ExplainRequest:
    """The first request of a plan, in the form that the router needs."""
    first, job = plan.requests[0], plan.job
    request = ExplainRequest(
        model=first.model,
        adapter=first.adapter,
        token_ids=job.token_ids,
        cache_salt=job.cache_salt,
        session_key=job.session_key,
    )
    if job.sampling.max_tokens is not None:
        request.max_tokens = job.sampling.max_tokens
    return request


def _header(headers: ext_proc_pb2.HeaderMap, name: str) -> str:
    """The value of a header; empty if it is not there."""
    for header in headers.headers:
        if header.key.lower() == name:
            return header.value or header.raw_value.decode(errors="replace")
    return ""


def _subset_of(metadata: ext_proc_pb2.Metadata) -> frozenset[str] | None:
    """The endpoints to which the proxy restricts the choice; None if it does not."""
    hint = metadata.filter_metadata[_SUBSET_NAMESPACE] if _SUBSET_NAMESPACE in metadata.filter_metadata else Struct()
    if SUBSET not in hint:
        return None
    given = hint[SUBSET]
    listed = [str(endpoint) for endpoint in given] if isinstance(given, ListValue) else []
    endpoints = given.split(",") if isinstance(given, str) else listed
    return frozenset(endpoint.strip() for endpoint in endpoints if endpoint.strip())


def _served(metadata: ext_proc_pb2.Metadata) -> str:
    """The endpoint that serves the request, if the proxy says so."""
    known = metadata.filter_metadata[_NAMESPACE] if _NAMESPACE in metadata.filter_metadata else Struct()
    return str(known[SERVED]) if SERVED in known else ""


def _ends(message: ext_proc_pb2.ProcessingRequest) -> bool:
    """Whether the request is complete with this message."""
    headers, body = message.request_headers, message.request_body
    return headers.end_of_stream or body.end_of_stream or message.HasField("request_trailers")


def _destination(endpoints: Sequence[str]) -> ext_proc_pb2.ProcessingResponse:
    """The answer to the headers of a request: its endpoints, in the header and in the metadata."""
    value = ",".join(endpoints)
    metadata = Struct()
    metadata.update({_NAMESPACE: {DESTINATION: value}})
    mutation = ext_proc_pb2.HeaderMutation(set_headers=[_set(DESTINATION, value)])
    common = ext_proc_pb2.CommonResponse(header_mutation=mutation, clear_route_cache=True)
    return _Response(request_headers=ext_proc_pb2.HeadersResponse(response=common), dynamic_metadata=metadata)


def _set(name: str, value: str) -> ext_proc_pb2.HeaderValueOption:
    header = ext_proc_pb2.HeaderValue(key=name, raw_value=value.encode())
    return ext_proc_pb2.HeaderValueOption(header=header, append_action=ext_proc_pb2.OVERWRITE_IF_EXISTS_OR_ADD)


def _pieces(body: bytearray, *, is_last: bool) -> Iterator[ext_proc_pb2.ProcessingResponse]:
    """The body of a request, unchanged. `is_last`: no trailers follow."""
    starts = range(0, max(len(body), 1), _PIECE_BYTES)
    for start in starts:
        ends = is_last and start == starts[-1]
        yield _Response(request_body=_piece(bytes(body[start : start + _PIECE_BYTES]), is_last=ends))


def _piece(body: bytes, *, is_last: bool) -> ext_proc_pb2.BodyResponse:
    streamed = ext_proc_pb2.StreamedBodyResponse(body=body, end_of_stream=is_last)
    mutation = ext_proc_pb2.BodyMutation(streamed_response=streamed)
    return ext_proc_pb2.BodyResponse(response=ext_proc_pb2.CommonResponse(body_mutation=mutation))


def _too_large(most: int) -> StatusError:
    return StatusError(
        Reason.INVALID_FIELD, f"the body is larger than {most} bytes, the maximum of the endpoint picker"
    )


def _refusal(error: StatusError) -> ext_proc_pb2.ProcessingResponse:
    """A whole response in OpenAI's form."""
    row = error.row
    headers = [_set("content-type", "application/json")]
    if error.retry_after_s is not None:
        headers.append(_set("retry-after", str(max(1, round(error.retry_after_s)))))
    content = {"message": error.message, "type": row.openai_type, "param": error.field, "code": row.openai_code}
    return _Response(
        immediate_response=ext_proc_pb2.ImmediateResponse(
            status=ext_proc_pb2.HttpStatus(code=row.http_status),
            headers=ext_proc_pb2.HeaderMutation(set_headers=headers),
            body=msgspec.json.encode({"error": content}),
            details=error.reason.name.lower(),
        )
    )


class PickerServer:
    """A listening endpoint picker, with the health services of the protocol."""

    def __init__(self, picker: EndpointPicker, is_ready: Callable[[], bool], bind: Bind = PLAIN.bind) -> None:
        """`is_ready` returns whether requests can be picked endpoints. `bind` lets the server listen: plain or TLS."""
        self._is_ready = is_ready
        self._bind = bind
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        ext_proc_pb2_grpc.add_ExternalProcessorServicer_to_server(picker, self._server)
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._following: asyncio.Task[None] | None = None

    async def start(self, address: str) -> int:
        """Listen. Returns the port. Raises RuntimeError if the address is taken."""
        port = self._bind(self._server, address)
        await self._tell(("liveness",), True)
        await self._server.start()
        self._following = asyncio.create_task(self._follow(), name="health of the endpoint picker")
        return port

    async def stop(self, grace_s: float) -> None:
        """Let running requests end for a limited time."""
        if self._following is not None:
            await end_tasks(self._following)
        await self._tell(HEALTH_NAMES, False)
        await self._server.stop(grace_s)

    async def _follow(self) -> None:
        while True:
            await self._tell(("", "readiness", EXTERNAL_PROCESSOR), self._is_ready())
            await asyncio.sleep(_HEALTH_INTERVAL_S)

    async def _tell(self, names: Iterable[str], is_serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in names:
            await self._health.set(name, status.SERVING if is_serving else status.NOT_SERVING)
