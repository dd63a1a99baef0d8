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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import click
import grpc
import uvloop

from headrace.gateway.cors import with_cors
from headrace.gateway.formats import REASONING_PARSERS, TOOL_PARSERS, Formats, parse_parsers
from headrace.gateway.generation import Generator
from headrace.gateway.grpc_door import DoorInterceptor
from headrace.gateway.http import HttpEdge, HttpServer, bound_socket
from headrace.gateway.metrics import Metrics
from headrace.gateway.models import Models
from headrace.gateway.prompts import Prompts
from headrace.gateway.redis_store import RedisStore
from headrace.gateway.response_store import DEFAULT_TTL_S, MemoryStore, Store
from headrace.gateway.security import Security, SecurityError, SecuritySettings, security_options
from headrace.gateway.spans import ACCESS
from headrace.gateway.text_service import SERVICE_NAME, TextService
from headrace.gateway.upstream import Upstream
from headrace.protos.introspection import add_introspection, set_serving
from headrace.protos.logs import FORMATS, LEVELS, configure_logging
from headrace.protos.text_pb2_grpc import add_TextServicer_to_server
from headrace.protos.tracing import FLUSH_TRACES_S, TracingUnavailableError, start_tracing, stop_tracing
from headrace.protos.transport import SERVER_OPTIONS

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
    security: SecuritySettings


@dataclass(frozen=True, slots=True)
class _Parts:
    """The gateway, wired."""

    upstream: Upstream
    models: Models
    edge: HttpEdge
    text: TextService
    security: Security
    responses: Store


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
        ThreadPoolExecutor(1, "load") as loading,
    ):
        parts = _wire(settings, security, tokenizing, loading)
        try:
            await _run(settings, parts, bound, loading, stop)
        finally:
            await parts.upstream.close()
            await parts.responses.close()
            await security.close()
            tokenizing.shutdown(cancel_futures=True)
            loading.shutdown(cancel_futures=True)
            parts.models.close()


def _wire(
    settings: Settings, security: Security, tokenizing: ThreadPoolExecutor, loading: ThreadPoolExecutor
) -> _Parts:
    metrics = Metrics()
    upstream = Upstream(settings.routers, security.transport)
    models = Models(upstream, loading)
    prompts = Prompts(tokenizing)
    generator = Generator(upstream, metrics)
    formats = Formats(settings.tool_parsers, settings.reasoning_parsers)
    responses = _responses(settings)
    edge = HttpEdge(
        models,
        prompts,
        generator,
        upstream,
        metrics,
        formats,
        responses=responses,
        console=settings.console,
        door=security.door,
        bodies=security.bodies,
    )
    return _Parts(
        upstream, models, edge, TextService(models, prompts, generator, metrics, formats), security, responses
    )


def _responses(settings: Settings) -> Store:
    """Where responses are kept: in the Redis that gateways share, or here."""
    url = settings.security.redis_url
    if url is None:
        return MemoryStore(settings.response_ttl_s)
    try:
        return RedisStore(url, settings.response_ttl_s)
    except ValueError as error:
        # Without the URL: it may have a password.
        raise CannotServeError(f"--redis is no URL of Redis: {error}") from None


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
    loading.submit(importlib.import_module, "headrace.gateway.tokenizer")
    polling = asyncio.create_task(parts.models.run())
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
    await asyncio.gather(serving, parts.edge.runs.drain(settings.drain_timeout_s), *drained)
    interrupting.cancel()
    for task in (polling, stopping):
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
    help="Seconds for which responses of the Responses API are kept: in the Redis of --redis, else in memory.",
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
