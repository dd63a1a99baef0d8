"""The fleet for operators: all workers, draining one, and where a prompt would go.

    GET  /v1/fleet           the routers, workers and models; with an API key or the admin key
    POST /v1/fleet/drain     drain a worker or let it take requests again; with the admin key
    POST /v1/fleet/explain   where a prompt would go; with an API key for its own tenant, with the admin key for any

Workers and explanations are the messages of router.proto in the JSON form of Protocol Buffers.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Any

import msgspec
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from headrace.common.version import headrace_version
from headrace.gateway.access.admission import Authorization
from headrace.gateway.adapters.admin_key import AdminKey
from headrace.gateway.edge.endpoint import Endpoint, Operation
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import Shape, decode_body, encode
from headrace.gateway.services import Services
from headrace.gateway.text.models import ListedModel
from headrace.protos.cache_scope import cache_scope, scoped_salt
from headrace.protos.router_pb2 import DrainWorkerRequest, ExplainRequest
from headrace.protos.status import Reason, StatusError

MAX_WAIT_S = 3600.0
_MAX_TOKEN = 2**32 - 1


class FleetRouter(Shape):
    """A router, or a worker that is used without one."""

    address: str
    connected: bool


class FleetModel(Shape):
    """A model or an alias that callers may name. `state` is loaded, loading, unloaded, unloading or failed."""

    id: str
    state: str
    problem: str
    alias_of: str
    max_context_tokens: int | None


class FleetGateway(Shape):
    """The gateway that answers."""

    host: str
    version: str


class Fleet(Shape):
    """The fleet as this gateway sees it. `problem` says why there are no workers; it is empty if they are known.
    `workers` are WorkerInfo messages."""

    gateway: FleetGateway
    routers: list[FleetRouter]
    problem: str
    workers: list[dict[str, Any]]
    models: list[FleetModel]


class DrainBody(msgspec.Struct, kw_only=True):
    """Body of POST /v1/fleet/drain."""

    worker: str
    """Its name or its address."""
    undo: bool = False
    """Let it take requests again."""
    wait_s: float = 10.0
    """Seconds to wait for its requests and for the handover of its cached blocks."""


class Drained(Shape):
    """A worker, and the requests that it still has."""

    worker: str
    num_running: int


class ExplainBody(msgspec.Struct, kw_only=True):
    """Body of POST /v1/fleet/explain: a prompt in tokens, and what else decides where it goes."""

    tokens: list[int]
    model: str = ""
    adapter: str = ""
    cache_salt: str = ""
    session_key: str = ""
    max_tokens: int | None = None
    tenant: str | None = None
    """Operators only: the tenant of the API key to explain for."""
    cache_group: str | None = None
    """Operators only: the cache group of that key."""


def endpoints(services: Services, admin_key: AdminKey) -> Sequence[Endpoint]:
    """All endpoints for the fleet."""
    own = _FleetView(services, admin_key)
    shown = Operation("The routers, workers and models of the fleet", Fleet)
    drain = Operation("Drain a worker, or let it take requests again", Drained, (DrainBody,))
    explain = Operation("Where a prompt would go now, and why", dict[str, Any], (ExplainBody,))
    return [
        Endpoint("GET", "/v1/fleet", "fleet", own.show, shown, admits=admin_key.admits),
        Endpoint("POST", "/v1/fleet/drain", "fleet", own.drain, drain, is_open=True, makes_work=False),
        Endpoint("POST", "/v1/fleet/explain", "fleet", own.explain, explain, admits=admin_key.admits),
    ]


class _FleetView:
    def __init__(self, services: Services, admin_key: AdminKey) -> None:
        self._services = services
        self._admin_key = admin_key
        self._gateway = FleetGateway(socket.gethostname(), headrace_version())

    async def show(self, exchange: Exchange) -> None:
        upstream = self._services.upstream
        problem = ""
        try:
            workers = await upstream.list_workers()
            if not workers:
                problem = "the router knows no worker, or the gateway is connected to a worker without a router"
            models = await self._services.models.overview()
        except StatusError as error:
            workers, models, problem = [], [], error.message
        routers = [FleetRouter(address, connected) for address, connected in upstream.addresses()]
        shown = [_json(worker) for worker in workers]
        fleet = Fleet(self._gateway, routers, problem, shown, [_model(model) for model in models])
        await exchange.respond(encode(fleet), headers=[(b"cache-control", b"no-store")])

    async def drain(self, exchange: Exchange) -> None:
        self._admin_key.check(exchange)
        body = decode_body(await exchange.body(), DrainBody)
        if not 0 < body.wait_s <= MAX_WAIT_S:
            problem = f"wait_s must be more than 0 and at most {MAX_WAIT_S:g} seconds"
            raise StatusError(Reason.INVALID_FIELD, problem, field="wait_s")
        request = DrainWorkerRequest(worker=body.worker, undo=body.undo)
        answer = await self._services.upstream.drain_worker(request, body.wait_s)
        await exchange.respond(encode(Drained(answer.worker_id, answer.num_running)))

    async def explain(self, exchange: Exchange) -> None:
        body = decode_body(await exchange.body(), ExplainBody)
        for token in body.tokens:
            if not 0 <= token <= _MAX_TOKEN:
                raise StatusError(Reason.INVALID_FIELD, f"tokens: {token} is no token id", field="tokens")
        if body.max_tokens is not None and not 1 <= body.max_tokens <= _MAX_TOKEN:
            raise StatusError(Reason.INVALID_FIELD, "max_tokens must be a number of tokens", field="max_tokens")
        model = await self._services.models.find(body.model, loads=False)
        authorization = exchange.caller.authorization
        if authorization is not None:
            authorization.check(model.asked_as, 0)
        card = model.card
        request = ExplainRequest(
            model=card.parent or card.name,
            adapter=body.adapter or (card.name if card.parent else ""),
            token_ids=body.tokens,
            max_tokens=body.max_tokens,
        )
        scope = _scope(authorization, body)
        request.cache_salt = body.cache_salt if scope is None else scoped_salt(scope, body.cache_salt)
        if body.session_key:
            request.session_key = body.session_key if scope is None else scoped_salt(scope, body.session_key)
        await exchange.respond(encode(_json(await self._services.upstream.explain(request))))


def _scope(authorization: Authorization | None, body: ExplainBody) -> str | None:
    """The cache scope for which to explain; None without one. An API key gets its own scope only, because hits in other
    scopes would reveal what other callers have asked. Raises StatusError (PERMISSION_DENIED) if it names another
    one."""
    if authorization is None:
        is_named = body.tenant is not None or body.cache_group is not None
        return cache_scope(body.tenant or "", body.cache_group) if is_named else None
    named = "tenant" if body.tenant is not None else "cache_group" if body.cache_group is not None else ""
    if named:
        problem = f"{named} needs the admin key: an API key is told of its own tenant only"
        raise StatusError(Reason.PERMISSION_DENIED, problem, field=named)
    return cache_scope(authorization.key.tenant, authorization.key.cache_group)


def _json(message: Message) -> dict[str, Any]:
    found: dict[str, Any] = MessageToDict(
        message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True
    )
    return found


def _model(model: ListedModel) -> FleetModel:
    most = None if model.card is None else int(model.card.max_context_tokens)
    return FleetModel(model.name, model.state, model.problem, model.alias_of, most)
