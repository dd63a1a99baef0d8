"""`python -m headrace.router`: flags in, exit status out.

Exit status: 0 after SIGTERM or SIGINT; 2 when what was asked cannot be done as asked, with one sentence on standard
error; anything else is a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import uvloop

from headrace.common.telemetry.logs import FORMATS, LEVELS, configure_logging
from headrace.common.telemetry.tracing import FLUSH_TRACES_S, TracingUnavailableError, start_tracing, stop_tracing
from headrace.common.transport.channels import Transport, TransportError
from headrace.router.dispatch.admission import AdmissionConfig
from headrace.router.dispatch.forwarding import ForwardingConfig
from headrace.router.dispatch.metrics import RouterMetrics
from headrace.router.fleet.fleet import Fleet, FleetConfig
from headrace.router.fleet.leases import LeaseReader
from headrace.router.fleet.registry import MAX_WORKERS, Registry
from headrace.router.service import RequestBounds, RouterServer

log = logging.getLogger("headrace.router")

DRAIN_TIMEOUT_S = 2.0


class CannotServeError(Exception):
    """The flags cannot be honoured. The message is a sentence with the remedy."""


def split_host_port(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises CannotServeError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise CannotServeError(f"{address!r} is no address: write HOST:PORT")
    return host.strip("[]"), int(port)


def weight_of(given: str) -> tuple[str, float]:
    """Tenant and weight of NAME=WEIGHT. Raises CannotServeError."""
    name, equals, weight = given.rpartition("=")
    try:
        share = float(weight)
    except ValueError:
        share = 0.0
    if not equals or not (0 < share < math.inf):
        raise CannotServeError(f"--tenant-weight {given!r} is none: write NAME=WEIGHT with a weight over 0")
    return name, share


def refuse_if_taken(address: str) -> None:
    """Raise CannotServeError with the reason if it is impossible to listen on this address.

    gRPC says only that a bind failed; and it takes a unix socket over from a server that uses it.
    """
    path = address.removeprefix("unix:")
    if path != address:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            with contextlib.suppress(OSError):
                probe.connect(path.removeprefix("//"))
                raise CannotServeError(f"{address} is in use: stop who listens there, or choose another --listen")
        return
    host, port = split_host_port(address)
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        problem = f"cannot listen on {address} ({error.strerror}): choose another address with --listen"
        raise CannotServeError(problem) from None


@dataclass(frozen=True, slots=True)
class Router:
    """A router, wired and not yet listening. `drain_timeout_s` is how long streams may go on when it stops."""

    server: RouterServer
    metrics: RouterMetrics
    leases: LeaseReader | None
    drain_timeout_s: float
    probe: str | None

    async def start(self) -> None:
        """Link the fleet and answer calls. Raises CannotServeError if the address for probes is taken."""
        if self.probe is not None:
            try:
                await self.server.start_probe(self.probe)
            except RuntimeError:
                problem = f"cannot answer probes on {self.probe}: choose another address with --probe"
                raise CannotServeError(problem) from None
        await self.server.start()
        if self.leases is not None:
            self.leases.start()

    async def stop(self) -> None:
        """Let streams end, then end them; a gateway resumes them elsewhere."""
        if self.leases is not None:
            await self.leases.close()
        await self.server.stop(self.drain_timeout_s)


async def serve(listen: str, metrics_address: str | None, router: Router) -> None:
    """Listen until SIGTERM or SIGINT. Raises CannotServeError."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    refuse_if_taken(listen)
    try:
        port = router.server.bind(listen)
    except OSError:
        problem = f"cannot listen on {listen}: choose another address with --listen"
        raise CannotServeError(problem) from None
    if metrics_address is not None:
        try:
            router.metrics.serve(*split_host_port(metrics_address))
        except OSError as error:
            problem = f"cannot serve metrics on {metrics_address} ({error.strerror}): choose another with --metrics"
            raise CannotServeError(problem) from None
    await router.start()
    where = listen if listen.startswith("unix:") else f"{listen.rpartition(':')[0]}:{port}"
    log.info("listening on %s", where)
    await stop.wait()
    log.info("stopping; running streams may go on for %g s", router.drain_timeout_s)
    await router.stop()


def wired(
    registry: Registry, fleet_config: FleetConfig, admission: AdmissionConfig, options: Mapping[str, Any]
) -> Router:
    """Put a router together. Raises CannotServeError."""
    metrics = RouterMetrics()
    try:
        transport = Transport(options["tls_dir"], options["join_token_file"])
        transport.refuse_strangers(options["listen"], options["insecure"])
    except TransportError as error:
        raise CannotServeError(str(error)) from None
    fleet = Fleet(registry, fleet_config, transport=transport)
    metrics.observe(fleet)
    leases = None
    if options["redis_url"]:
        try:
            leases = LeaseReader(
                options["redis_url"], fleet.leases_seen, fleet.leases_lost, max_workers=options["max_workers"]
            )
        except ValueError as error:
            # Without the URL: it may have a password.
            raise CannotServeError(f"--redis is not a Redis URL: {error}") from None
        metrics.observe_leases(leases)
    forwarding = ForwardingConfig(max_attempts=options["max_attempts"])
    bounds = RequestBounds(options["max_in_flight"], options["max_request_mb"] << 20)
    server = RouterServer(fleet, metrics, forwarding, admission, bounds, transport, leases)
    return Router(server, metrics, leases, options["drain_timeout"], options["probe"])


@click.command(context_settings={"auto_envvar_prefix": "HEADRACE_ROUTER", "show_default": True})
@click.option("--listen", required=True, metavar="ADDR", help="Address to serve on: HOST:PORT or unix:/path.sock.")
@click.option("--worker", multiple=True, metavar="ADDR", help="A worker's address; may be repeated.")
@click.option(
    "--redis",
    "redis_url",
    envvar="HEADRACE_ROUTER_REDIS",
    metavar="URL",
    help="Find workers by their leases there: redis://HOST:PORT/DB, or redis+sentinel://HOST:PORT,.../SERVICE.",
)
@click.option("--metrics", metavar="HOST:PORT", help="Serve Prometheus metrics here.")
@click.option(
    "--tls-dir",
    envvar="HEADRACE_TLS_DIR",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Mutual TLS within the fleet: directory of ca.pem, cert.pem and key.pem, read again when they change.",
)
@click.option(
    "--join-token-file",
    envvar="HEADRACE_JOIN_TOKEN_FILE",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="File with the secret that every caller must present as well.",
)
@click.option(
    "--insecure",
    is_flag=True,
    envvar="HEADRACE_INSECURE",
    help="Serve beyond this host without certificates and join token: anyone who reaches the port may do everything.",
)
@click.option("--probe", metavar="HOST:PORT", help="Answer gRPC health here too, without TLS.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", help="Lowest level of log lines.")
@click.option("--log-format", type=click.Choice(FORMATS), default="text", help="Log lines as text or as JSON.")
@click.option("--otlp-endpoint", help="Send traces there by OTLP, such as http://HOST:4317; needs headrace[otel].")
@click.option(
    "--drain-timeout",
    type=click.FloatRange(min=0),
    default=DRAIN_TIMEOUT_S,
    help="Seconds for running streams after SIGTERM; then gateways resume them elsewhere.",
)
@click.option("--lease", type=click.FloatRange(min=0.5), default=6.0, help="Seconds a registration lasts.")
@click.option(
    "--capacity-wait",
    type=click.FloatRange(min=0),
    default=10.0,
    help="Seconds after which a request for which no worker is ready goes back to its gateway. The gateway asks again, "
    "another router if there is one, while its client waits.",
)
@click.option(
    "--max-ttft",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    help="Longest time that a request waits for others, here and at its worker, in seconds. Others are refused.",
)
@click.option(
    "--max-waiting", type=click.IntRange(min=0), default=1024, help="Requests that wait while all workers are full."
)
@click.option("--max-in-flight-per-tenant", type=click.IntRange(min=1), help="Requests of one tenant at a time.")
@click.option(
    "--tenant-weight",
    "tenant_weights",
    multiple=True,
    metavar="NAME=WEIGHT",
    help="A tenant's share when requests wait, 1 for those not named; may be repeated.",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(min=1),
    default=4,
    help="Workers that one request may lose, one after the other.",
)
@click.option("--max-in-flight", type=click.IntRange(min=1), default=4096, help="Requests at a time.")
@click.option(
    "--max-request-mb",
    type=click.IntRange(min=16),
    default=256,
    help="MiB of requests in flight, as received; the router needs up to six times that for them.",
)
@click.option(
    "--max-workers",
    type=click.IntRange(min=1),
    default=MAX_WORKERS,
    help="Workers that this router takes. It refuses more, and leaves out more in Redis with a warning.",
)
@click.option("--max-sessions", type=click.IntRange(min=1), default=65_536, help="Sessions whose worker is remembered.")
@click.option(
    "--max-index-entries",
    type=click.IntRange(min=1),
    default=4_000_000,
    help="Bound of the prefix index: blocks known to be cached, summed over the workers (up to 160 bytes each).",
)
@click.option(
    "--plain-grpc",
    is_flag=True,
    help="Call workers with one RPC for each request, for proxies that balance or observe RPCs.",
)
def command(
    listen: str,
    worker: tuple[str, ...],
    metrics: str | None,
    log_level: str,
    log_format: str,
    otlp_endpoint: str | None,
    lease: float,
    max_index_entries: int,
    max_sessions: int,
    plain_grpc: bool,
    tenant_weights: tuple[str, ...],
    **options: Any,
) -> None:
    """Place requests on workers, by what they have cached and how busy they are."""
    configure_logging(log_level, log_format)

    async def run() -> None:
        registry = Registry(worker, lease_s=lease, max_workers=options["max_workers"])
        bounds = FleetConfig(max_index_entries=max_index_entries, max_sessions=max_sessions, plain_grpc=plain_grpc)
        router = wired(registry, bounds, admission, {**options, "listen": listen})
        await serve(listen, metrics, router)

    try:
        admission = AdmissionConfig(
            max_ttft_s=options["max_ttft"],
            max_waiting=options["max_waiting"],
            capacity_wait_s=options["capacity_wait"],
            max_in_flight_per_tenant=options["max_in_flight_per_tenant"],
            tenant_weights=dict(map(weight_of, tenant_weights)),
        )
        if len(set(worker)) > options["max_workers"]:
            problem = f"--worker names {len(set(worker))} workers, more than --max-workers ({options['max_workers']})"
            raise CannotServeError(f"{problem}: raise it or name fewer")
        for address in (listen, *worker):
            if not address.startswith("unix:"):
                split_host_port(address)
        start_tracing("router", otlp_endpoint)
        uvloop.run(run())
    except (CannotServeError, TracingUnavailableError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    finally:
        stop_tracing(FLUSH_TRACES_S)


def main() -> None:
    """Run the command; exit status 2 and one sentence on standard error if the flags cannot be honoured."""
    try:
        command.main(prog_name="headrace router", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
