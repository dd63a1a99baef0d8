"""`python -m headrace.gateway`: wires the parts, listens, and stops within a bound when it is told to."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
import math
import resource
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import click
import grpc
import uvloop

from headrace.common.stores.redis_link import server_of
from headrace.common.telemetry.logs import FORMATS, LEVELS, configure_logging
from headrace.common.telemetry.tracing import FLUSH_TRACES_S, TracingUnavailableError, start_tracing, stop_tracing
from headrace.common.transport.channels import SERVER_OPTIONS
from headrace.common.transport.introspection import add_introspection, set_serving
from headrace.gateway.chat.answering import Answering
from headrace.gateway.chat.formats import REASONING_PARSERS, TOOL_PARSERS, Formats, parse_parsers
from headrace.gateway.chat.generation import Generator
from headrace.gateway.chat.planning import Chats
from headrace.gateway.chat.prompts import Prompts
from headrace.gateway.edge.cors import with_cors
from headrace.gateway.edge.http import HttpEdge, HttpServer, bound_socket
from headrace.gateway.edge.security import Security, SecurityError, SecuritySettings, security_options
from headrace.gateway.edge.spans import ACCESS
from headrace.gateway.endpoints import endpoints
from headrace.gateway.grpc_text.auth import DoorInterceptor
from headrace.gateway.grpc_text.service import SERVICE_NAME, TextService
from headrace.gateway.responses.background import ResponseRuns
from headrace.gateway.responses.redis_store import RedisStore
from headrace.gateway.responses.store import DEFAULT_TTL_S, TENANT_BYTES, MemoryStore, Store
from headrace.gateway.services import Services
from headrace.gateway.structure.constraints import Constraints
from headrace.gateway.telemetry.metrics import Metrics
from headrace.gateway.text.models import Models
from headrace.gateway.upstream.routers import Upstream
from headrace.protos.text_pb2_grpc import add_TextServicer_to_server

NUM_TOKENIZER_THREADS = 2
DRAIN_TIMEOUT_S = 2.0
# Beyond the drain timeout, for the last words of streams that are interrupted then.
STOP_S = 1.0
EXIT_USAGE = 2
MAX_FILES = 65_536
# gRPC calls at a time besides those that the door lets in, such as health and reflection.
OTHER_CALLS = 256

_LOG = logging.getLogger("headrace.gateway")


class CannotServeError(Exception):
    """What was asked cannot be done as asked; the message is a sentence with the remedy."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the command line says."""

    host: str
    port: int
    grpc_port: int
    """0 for no gRPC edge."""
    routers: tuple[str, ...]
    drain_timeout_s: float
    """How long running requests may take to end after SIGTERM."""
    tool_parsers: Mapping[str, str]
    """Names of formats by model; see `Formats`."""
    reasoning_parsers: Mapping[str, str]
    console: bool
    """Whether to serve the web console."""
    response_ttl_s: float
    """How long responses are kept."""
    worker_wait_s: float | None
    """How long a new request waits for a worker that is away; None: as long as its client."""
    response_redis_url: str | None
    """Where, if not in memory."""
    response_tenant_mb: int
    """How much of one tenant."""
    plain_grpc: bool
    """Whether each request is an RPC of its own."""
    security: SecuritySettings


@dataclass(frozen=True, slots=True)
class _Parts:
    """The gateway, wired."""

    upstream: Upstream
    models: Models
    edge: HttpEdge
    text: TextService
    security: Security
    runs: ResponseRuns


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises `CannotServeError` or `SecurityError` for what cannot be done."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    security = Security(settings.security)
    bound = _bind(settings.host, settings.port)
    await security.start()
    with (
        ThreadPoolExecutor(NUM_TOKENIZER_THREADS, "tokenize") as tokenizing,
        ThreadPoolExecutor(1, "translate") as translating,
        ThreadPoolExecutor(1, "load") as loading,
    ):
        parts = _wire(settings, security, tokenizing, translating, loading)
        try:
            await _run(settings, parts, bound, loading, stop)
        finally:
            await parts.upstream.close()
            await parts.runs.store.close()
            await security.close()
            for executor in (tokenizing, translating, loading):
                executor.shutdown(cancel_futures=True)
            parts.models.close()


def _wire(
    settings: Settings, security: Security, tokenizing: Executor, translating: Executor, loading: Executor
) -> _Parts:
    metrics = Metrics()
    upstream = Upstream(
        settings.routers,
        security.transport,
        worker_wait_s=settings.worker_wait_s,
        plain_grpc=settings.plain_grpc,
    )
    models = Models(upstream, loading)
    formats = Formats(settings.tool_parsers, settings.reasoning_parsers)
    chats = Chats(models, Prompts(tokenizing), Constraints(translating), formats)
    generator = Generator(upstream, metrics)
    runs = ResponseRuns(_responses(settings))
    services = Services(models, chats, Answering(generator), upstream, metrics)
    served = endpoints(services, runs, with_console=settings.console)
    edge = HttpEdge(served, metrics, door=security.door, bodies=security.bodies)
    return _Parts(upstream, models, edge, TextService(models, chats, generator, metrics), security, runs)


def _responses(settings: Settings) -> Store:
    """Where responses are kept: in a Redis that gateways share, or here."""
    url, leases = settings.response_redis_url, settings.security.redis_url
    if url is None:
        return MemoryStore(settings.response_ttl_s, tenant_bytes=settings.response_tenant_mb << 20)
    if leases is not None and server_of(url) == server_of(leases):
        problem = (
            "--response-redis is the Redis of --redis: responses would fill it, and leases, limits and keys be lost"
        )
        raise CannotServeError(f"{problem}; give it a Redis of its own, or leave it out to keep responses here")
    try:
        return RedisStore(url, settings.response_ttl_s, tenant_bytes=settings.response_tenant_mb << 20)
    except ValueError as error:
        # Without the URL: it may have a password.
        raise CannotServeError(f"--response-redis is no URL of Redis: {error}") from None


async def _run(
    settings: Settings, parts: _Parts, bound: socket.socket, loading: ThreadPoolExecutor, stop: asyncio.Event
) -> None:
    grpc_server = await _start_grpc(settings, parts)
    security = parts.security
    application = with_cors(parts.edge, security.cors_origins)
    stop_timeout_s = math.ceil(settings.drain_timeout_s + STOP_S)
    http_server = HttpServer(application, stop_timeout_s, security.connections, security.tls)
    serving = asyncio.create_task(http_server.serve(sockets=[bound]))
    # OpenVINO takes a third of a second to import: by the time a router has a model, it is there.
    loading.submit(importlib.import_module, "headrace.gateway.text.tokenizer")
    polling = asyncio.create_task(parts.models.run())
    watching = asyncio.create_task(parts.runs.store.watch())
    stopping: asyncio.Task[None] = asyncio.create_task(_wait(stop))
    host, port = bound.getsockname()[:2]
    scheme = "http" if security.tls is None else "https"
    _LOG.info("listening on %s://%s", scheme, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")
    done, _ = await asyncio.wait({serving, polling, stopping}, return_when=asyncio.FIRST_COMPLETED)
    _LOG.info("stopping")
    http_server.should_exit = True
    parts.text.stopping = True
    interrupting = asyncio.get_running_loop().call_later(settings.drain_timeout_s, parts.edge.interrupt)
    drained = [grpc_server.stop(settings.drain_timeout_s)] if grpc_server is not None else []
    await asyncio.gather(serving, parts.runs.drain(settings.drain_timeout_s), *drained)
    interrupting.cancel()
    for task in (polling, watching, stopping):
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
    for task in done - {stopping}:
        task.result()


async def _start_grpc(settings: Settings, parts: _Parts) -> grpc.aio.Server | None:
    if not settings.grpc_port:
        return None
    security = parts.security
    server = grpc.aio.server(
        interceptors=[DoorInterceptor(security.door)],
        options=SERVER_OPTIONS,
        maximum_concurrent_rpcs=security.max_requests + OTHER_CALLS,
    )
    add_TextServicer_to_server(parts.text, server)
    health = add_introspection(server, [SERVICE_NAME])
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    try:
        if security.tls is None:
            server.add_insecure_port(f"{host}:{settings.grpc_port}")
        else:
            server.add_secure_port(f"{host}:{settings.grpc_port}", security.tls.grpc_credentials())
    except RuntimeError as error:
        raise CannotServeError(
            f"cannot listen for gRPC on {host}:{settings.grpc_port}; is it in use? Choose another with --grpc-port"
        ) from error
    await server.start()
    await set_serving(health, [SERVICE_NAME], True)
    _LOG.info("listening for gRPC on %s:%d", host, settings.grpc_port)
    return server


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bound_socket(host, port)
    except OSError as error:
        raise CannotServeError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --host and --port"
        ) from error


@click.command(context_settings={"auto_envvar_prefix": "HEADRACE_GATEWAY", "show_default": True})
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option("--port", default=8000, type=click.IntRange(0, 65535), help="Port of the HTTP API; 0 takes a free one.")
@click.option("--grpc-port", default=0, type=click.IntRange(0, 65535), help="Port of the gRPC API; 0 for none.")
@click.option(
    "--router",
    "routers",
    multiple=True,
    required=True,
    envvar="HEADRACE_GATEWAY_ROUTER",
    help="Router (or worker) to use; may be repeated.",
)
@click.option(
    "--drain-timeout",
    default=DRAIN_TIMEOUT_S,
    type=click.FloatRange(min=0),
    help="Seconds that running requests may take to end after SIGTERM; nobody else can go on with them.",
)
@click.option(
    "--worker-wait",
    "worker_wait_s",
    type=click.FloatRange(min=0),
    help="Most seconds that a new request waits for a worker or router that is away. Default: as its client does.",
)
@click.option(
    "--tool-parser",
    "tool_parsers",
    multiple=True,
    envvar="HEADRACE_GATEWAY_TOOL_PARSER",
    callback=lambda context, parameter, values: _parsers(values, TOOL_PARSERS),
    metavar="[MODEL=]NAME",
    help=f"How models write tool calls, if not as their chat templates tell: {', '.join(TOOL_PARSERS)}.",
)
@click.option(
    "--reasoning-parser",
    "reasoning_parsers",
    multiple=True,
    envvar="HEADRACE_GATEWAY_REASONING_PARSER",
    callback=lambda context, parameter, values: _parsers(values, REASONING_PARSERS),
    metavar="[MODEL=]NAME",
    help=f"How models write reasoning, if not as their chat templates tell: {', '.join(REASONING_PARSERS)}.",
)
@click.option(
    "--response-ttl",
    "response_ttl_s",
    default=DEFAULT_TTL_S,
    type=click.FloatRange(min=1),
    help="Seconds for which responses of the Responses API are kept: in the Redis of --response-redis, else in memory.",
)
@click.option(
    "--response-redis",
    "response_redis_url",
    envvar="HEADRACE_GATEWAY_RESPONSE_REDIS",
    metavar="URL",
    help="Redis for responses, which gateways share; not that of --redis.  [default: none, the memory of this gateway]",
)
@click.option(
    "--response-tenant-mb",
    default=TENANT_BYTES >> 20,
    type=click.IntRange(min=1),
    help="MiB of responses that are kept for one tenant; the oldest give way.",
)
@click.option(
    "--plain-grpc",
    is_flag=True,
    help="Call routers with one RPC for each request, for proxies that balance or observe RPCs.",
)
@security_options
@click.option("--console/--no-console", default=True, help="Whether to serve the web console at /.")
@click.option("--log-level", default="info", type=click.Choice(LEVELS), help="Least level of log lines.")
@click.option("--log-format", default="text", type=click.Choice(FORMATS), help="Log lines for people or for machines.")
@click.option("--access-log/--no-access-log", default=False, help="Whether every request gets a log line.")
@click.option("--otlp-endpoint", help="Send traces there by OTLP, such as http://HOST:4317; needs headrace[otel].")
def command(
    log_level: str,
    log_format: str,
    access_log: bool,
    otlp_endpoint: str | None,
    drain_timeout: float,
    **options: Any,
) -> None:
    """Serve the OpenAI API for the models that routers know."""
    configure_logging(log_level, log_format)
    ACCESS.disabled = not access_log
    start_tracing("gateway", otlp_endpoint)
    _raise_file_limit()
    uvloop.run(serve(Settings(drain_timeout_s=drain_timeout, **options)))


def _parsers(values: tuple[str, ...], known: Sequence[str]) -> dict[str, str]:
    try:
        return parse_parsers(values, known)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


def _raise_file_limit() -> None:
    """Let there be as many connections as the system lets this process have: shells give it few."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Run the command; exit status 2 and one sentence on standard error if what was asked cannot be done."""
    try:
        command.main(prog_name="headrace gateway", standalone_mode=False)
    except (click.ClickException, CannotServeError, SecurityError, TracingUnavailableError) as error:
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        click.echo(f"error: {message}", err=True)
        sys.exit(EXIT_USAGE)
    finally:
        stop_tracing(FLUSH_TRACES_S)


if __name__ == "__main__":
    main()
