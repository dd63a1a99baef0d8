"""The HTTP edge: finds the endpoint of a request, admits the request and counts its outcome.

Starlette only finds the route; requests are read and answered on the bare ASGI messages (see `exchange`), so that a
chunk of a stream costs one prepared write. `gateway/protocols.py` lists the endpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import cast

import uvicorn
from starlette.routing import Route, Router

from headrace.common.telemetry.logs import request_id_var
from headrace.gateway.access.admission import AdmissionControl
from headrace.gateway.edge.connections import ConnectionBounds, connections_within
from headrace.gateway.edge.cors import Application
from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.edge.exchange import Bodies, Exchange, Message, Receive, Send
from headrace.gateway.edge.failures import HttpError, draining
from headrace.gateway.edge.spans import begin_request, end_request
from headrace.gateway.edge.tls import EdgeTls
from headrace.gateway.telemetry.metrics import Metrics, outcome_of
from headrace.gateway.telemetry.recent import FAULTS
from headrace.protos.status import Reason, StatusError

KEEP_CONNECTION_S = 75
_LOG = logging.getLogger(__name__)
_MAX_SHOWN_CHARS = 200


class HttpEdge:
    """The ASGI application."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        metrics: Metrics,
        *,
        admission: AdmissionControl | None = None,
        bodies: Bodies | None = None,
    ) -> None:
        """Without `admission`, every request is admitted."""
        self._admission = AdmissionControl() if admission is None else admission
        self.bodies = Bodies() if bodies is None else bodies
        self.early_headers_s = self._admission.bounds.early_headers_s
        self._metrics = metrics
        self._running: set[Exchange] = set()
        resources: dict[str, dict[str, Endpoint]] = {}
        for endpoint in endpoints:
            resources.setdefault(endpoint.path, {})[endpoint.method] = endpoint
        self.paths = [(path, method) for path, by_method in resources.items() for method in by_method]
        """The routes: each path with each of its methods."""
        routes = [Route(path, _Resource(self, by_method)) for path, by_method in resources.items()]
        self._router = Router(routes, redirect_slashes=False, default=_Nowhere(self, endpoints))

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request. A slash at the end of a path means nothing."""
        path = scope["path"]
        if path.endswith("/") and path != "/":
            scope = {**scope, "path": path.rstrip("/") or "/"}
        await self._router(scope, receive, send)

    def interrupt(self) -> None:
        """End all requests that are still being answered, with an error that says the gateway stops."""
        for exchange in list(self._running):
            exchange.interrupt()

    async def answer(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Run an endpoint, answer every exception with an error in its format, and count the outcome."""
        outcome = "ok"
        self._running.add(exchange)
        self._metrics.in_flight.inc(not endpoint.is_probe)
        request_id_var.set(exchange.caller.request_id)
        span = begin_request(exchange, endpoint)
        try:
            try:
                await self._admit(exchange, endpoint)
            except asyncio.CancelledError:
                outcome = "cancelled"
                task = asyncio.current_task()
                if exchange.disconnected:
                    if task is not None:
                        task.uncancel()
                    return
                if not exchange.interrupted:
                    raise
                if task is not None:
                    task.uncancel()
                raise draining() from None
        except HttpError as error:
            outcome = error.code
            await exchange.fail(error)
        except StatusError as error:
            outcome = outcome_of(error, has_deadline=exchange.caller.deadline_s is not None)
            if outcome in FAULTS:
                _LOG.warning("%s failed: %s", endpoint.name, error.message)
            await exchange.fail(error)
        except Exception:
            outcome = "internal"
            _LOG.exception("%s failed", endpoint.name)
            await exchange.fail(StatusError(Reason.INTERNAL, "the gateway failed; its log has the reason"))
        finally:
            self._running.discard(exchange)
            self._metrics.in_flight.dec(not endpoint.is_probe)
            self._metrics.request_ended(endpoint.name, outcome, time.monotonic() - exchange.caller.arrived_s)
            end_request(span, exchange, endpoint, outcome)
            await exchange.close()

    async def _admit(self, exchange: Exchange, endpoint: Endpoint) -> None:
        """Authorize and admit a request, then run its endpoint. Raises the errors of admission and of the handler."""
        bounds = self._admission.bounds
        if bounds.wants_certificate and endpoint.name != "health" and not exchange.has_certificate:
            raise HttpError(403, "certificate_required", "the connection needs a client certificate")
        is_open = endpoint.is_open or (endpoint.name == "metrics" and bounds.open_metrics)
        key = None if is_open or endpoint.admits(exchange) else self._admission.identify(exchange.header)
        authorization = self._admission.authorize(key)
        timeout_s = exchange.timeout_s()
        exchange.enter(authorization, timeout_s)
        counted = endpoint.method == "POST" and endpoint.makes_work
        async with self._admission.admitted(authorization, counted=counted, timeout_s=timeout_s):
            await endpoint.handler(exchange)


class _Resource:
    """A path's ASGI application: hands the exchange to the endpoint of its method."""

    def __init__(self, edge: HttpEdge, endpoints: Mapping[str, Endpoint]) -> None:
        """Endpoints by method; the empty method is any."""
        self._edge = edge
        self._endpoints = dict(endpoints)
        if "GET" in endpoints:
            self._endpoints["HEAD"] = endpoints["GET"]
        first = next(iter(endpoints.values()))
        refusing = replace(first, method="", handler=self._wrong_method, is_open=False, makes_work=True)
        self._other = self._endpoints.get("", refusing)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        endpoint = self._endpoints.get(scope["method"], self._other)
        edge = self._edge
        exchange = Exchange(
            scope,
            receive,
            send,
            endpoint.errors,
            edge.bodies,
            edge.early_headers_s,
            request_id_header=endpoint.request_id_header,
        )
        await edge.answer(exchange, endpoint)

    async def _wrong_method(self, exchange: Exchange) -> None:
        if exchange.scope["path_params"]:
            # The name in the path could be another server's endpoint, such as /responses/compact.
            await _unknown_path(exchange)
        methods = [method for method in ("GET", "HEAD", "POST", "DELETE") if method in self._endpoints]
        usable = " or ".join(method for method in methods if method != "HEAD")
        message = f"{exchange.scope['method'][:20]} is not allowed here; use {usable}"
        raise HttpError(405, "method_not_allowed", message, [(b"allow", ", ".join(methods).encode())])


class _Nowhere:
    """The ASGI application of all paths without an endpoint. Its errors have the format of the protocol that owns the
    beginning of the path, which that protocol's clients can read."""

    def __init__(self, edge: HttpEdge, endpoints: Sequence[Endpoint]) -> None:
        self._edge = edge
        self._owners: dict[str, Endpoint] = {}
        below: dict[str, list[Endpoint]] = {}
        for endpoint in endpoints:
            path = endpoint.path.partition("{")[0].rstrip("/")
            if path:
                self._owners[path] = endpoint
            while path := path.rpartition("/")[0]:
                below.setdefault(path, []).append(endpoint)
        for path, members in below.items():
            if all(member.errors is members[0].errors for member in members):
                self._owners.setdefault(path, members[0])

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        path = scope["path"][:_MAX_SHOWN_CHARS]  # each iteration copies it
        while path and path not in self._owners:
            path = path.rpartition("/")[0]
        owner = self._owners.get(path, _UNKNOWN)
        unknown = replace(_UNKNOWN, errors=owner.errors, request_id_header=owner.request_id_header)
        await _Resource(self._edge, {"": unknown})(scope, receive, send)


async def _unknown_path(exchange: Exchange) -> None:
    path = exchange.scope["path"][:_MAX_SHOWN_CHARS]
    raise StatusError(Reason.NOT_FOUND, f"there is nothing at {path}; the API is at /v1, such as /v1/models")


_UNKNOWN = Endpoint("", "", "unknown", _unknown_path, is_open=True)


class HttpServer(uvicorn.Server):
    """The server of an `HttpEdge`, which may be wrapped. The caller handles signals and sets `should_exit`."""

    def __init__(
        self,
        application: Application,
        stop_timeout_s: int,
        bounds: ConnectionBounds | None = None,
        tls: EdgeTls | None = None,
    ) -> None:
        self._bounds = bounds or ConnectionBounds()
        config = uvicorn.Config(
            application,
            # uvicorn calls this to make a connection.
            http=cast("type[asyncio.Protocol]", connections_within(self._bounds)),
            ssl_context_factory=None if tls is None else lambda config, default: tls.context,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_CONNECTION_S,
            timeout_graceful_shutdown=stop_timeout_s,
        )
        super().__init__(config)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen. As in uvicorn, with a time limit for TLS handshakes."""
        config = self.config
        make = partial(
            cast("Callable[..., asyncio.Protocol]", config.http_protocol_class),
            config=config,
            server_state=self.server_state,
            app_state={},
        )
        timeout_s = None if config.ssl is None else self._bounds.head_timeout_s
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(
                make, sock=one, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=timeout_s
            )
            for one in sockets or ()
        ]
        self.started = True

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Do not install signal handlers."""
        yield


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address. Binding first shows whether the address is free before anything else starts.

    Port 0 binds any free port. Raises `OSError`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))
    except OSError:
        bound.close()
        raise
    bound.setblocking(False)
    return bound
