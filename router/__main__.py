"""`python -m headrace.router`: flags in, exit status out.

Exit status: 0 after SIGTERM or SIGINT; 2 if the flags are wrong, with one sentence on standard error; anything else is
a crash.
"""

from __future__ import annotations

from headrace.common import startup

if __name__ == "__main__":
    startup.before_imports()

import asyncio
import contextlib
import logging
import math
import re
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import click
import uvloop

from headrace.common.commands import SectionedCommand, told
from headrace.common.flags import SECTIONS, FiniteRange, cluster_options, membership_options, observation_options
from headrace.common.kubernetes.cluster import Cluster, ClusterError
from headrace.common.kubernetes.services import is_service, service_of
from headrace.common.kubernetes.watches import ServiceWatches
from headrace.common.telemetry.logs import configure_logging
from headrace.common.telemetry.tracing import FLUSH_TRACES_S, TracingUnavailableError, start_tracing, stop_tracing
from headrace.common.transport.channels import Transport, TransportError
from headrace.router.dispatch.admission import AdmissionConfig
from headrace.router.dispatch.forwarding import ForwardingConfig
from headrace.router.dispatch.holding import COLD_START_S, OnDemand
from headrace.router.dispatch.metrics import RouterMetrics
from headrace.router.dispatch.scaling import IDLE_AFTER_S, ScalingConfig
from headrace.router.fleet.fleet import Fleet, FleetConfig
from headrace.router.fleet.leases import LeaseReader
from headrace.router.fleet.registry import MAX_WORKERS, Registry
from headrace.router.placement.demand import WINDOW_S
from headrace.router.placement.policy import LONG_PROMPT_MS
from headrace.router.service import RequestBounds, RouterServer

log = logging.getLogger("headrace.router")

DRAIN_TIMEOUT_S = 2.0


class CannotServeError(Exception):
    """The flags are wrong. The message is a sentence with the remedy."""


def split_host_port(address: str) -> tuple[str, int]:
    """Host and port of HOST:PORT. Raises CannotServeError."""
    host, _, port = address.rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or int(port) > 65535:
        raise CannotServeError(f"{address!r} is not an address: write HOST:PORT")
    return host.strip("[]"), int(port)


def check_service(address: str) -> None:
    """Raise CannotServeError if this names no Service of Kubernetes."""
    try:
        service_of(address)
    except ValueError as error:
        raise CannotServeError(f"--worker {error}") from None


def weight_of(given: str) -> tuple[str, float]:
    """Tenant and weight of NAME=WEIGHT. Raises CannotServeError."""
    name, equals, weight = given.rpartition("=")
    try:
        share = float(weight)
    except ValueError:
        share = 0.0
    if not equals or not (0 < share < math.inf):
        raise CannotServeError(
            f"--tenant-weight {given!r} is not a weight: write NAME=WEIGHT with a weight greater than 0"
        )
    return name, share


def refuse_if_taken(address: str) -> None:
    """Raise CannotServeError with the reason if the process cannot listen on this address.

    gRPC reports only that binding failed, and takes over a unix socket that another server uses.
    """
    path = address.removeprefix("unix:")
    if path != address:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.settimeout(1.0)
            with contextlib.suppress(OSError):
                probe.connect(path.removeprefix("//"))
                raise CannotServeError(
                    f"{address} is in use: stop the process that listens there, or choose another --listen"
                )
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
    """A router that does not listen yet. When it stops, streams may continue for `drain_timeout_s`."""

    server: RouterServer
    metrics: RouterMetrics
    leases: LeaseReader | None
    services: ServiceWatches | None
    drain_timeout_s: float
    probe: str | None
    scaler: str | None

    async def start(self) -> None:
        """Link the fleet and answer calls. Raises CannotServeError if the address for probes or for KEDA is in use."""
        if self.probe is not None:
            try:
                await self.server.start_probe(self.probe)
            except RuntimeError:
                problem = f"cannot answer probes on {self.probe}: choose another address with --probe"
                raise CannotServeError(problem) from None
        if self.scaler is not None:
            try:
                await self.server.start_scaler(self.scaler)
            except RuntimeError:
                problem = f"cannot answer KEDA on {self.scaler}: choose another address with --scaler"
                raise CannotServeError(problem) from None
        await self.server.start()
        if self.leases is not None:
            self.leases.start()
        if self.services is not None:
            self.services.start()

    async def stop(self) -> None:
        """Let running streams finish for a limited time, then end them; a gateway resumes them elsewhere."""
        if self.leases is not None:
            await self.leases.close()
        if self.services is not None:
            await self.services.close()
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
    log.info("stopping; running streams may continue for %g s", router.drain_timeout_s)
    await router.stop()


def wired(
    registry: Registry, fleet_config: FleetConfig, admission: AdmissionConfig, options: Mapping[str, Any]
) -> Router:
    """Assemble a router. Raises CannotServeError."""
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
    services = None
    if options["services"]:
        try:
            cluster = Cluster(options["kubernetes_api"], options["kubernetes_credentials"])
        except ClusterError as error:
            raise CannotServeError(str(error)) from None
        services = ServiceWatches(
            options["services"], cluster, fleet.pods_seen, registry=metrics.registry, prefix="headrace_router"
        )
    forwarding = ForwardingConfig(max_attempts=options["max_attempts"])
    bounds = RequestBounds(options["max_in_flight"], options["max_request_mb"] << 20)
    on_demand = OnDemand(frozenset(options["on_demand"]), options["cold_start"])
    scaling = ScalingConfig(options["idle_after"], options["scaling_window"])
    server = RouterServer(
        fleet, metrics, forwarding, admission, bounds, transport, leases, services, on_demand, scaling
    )
    return Router(server, metrics, leases, services, options["drain_timeout"], options["probe"], options["scaler"])


@click.command(
    cls=SectionedCommand,
    sections=SECTIONS,
    context_settings={"auto_envvar_prefix": "HEADRACE_ROUTER", "show_default": True},
)
@click.option("--listen", required=True, metavar="ADDR", help="Address to serve on: HOST:PORT or unix:/path.sock.")
@click.option(
    "--worker",
    multiple=True,
    metavar="ADDR",
    help="Address of a worker, or kubernetes:///SERVICE[.NAMESPACE]:PORT for all pods of a Service. May be repeated. "
    "Workers with --router register themselves.",
)
@click.option(
    "--redis",
    "redis_url",
    envvar="HEADRACE_ROUTER_REDIS",
    metavar="URL",
    help="Redis with the leases of workers: redis://HOST:PORT/DB, or redis+sentinel://HOST:PORT,.../SERVICE.",
)
@cluster_options
@membership_options
@observation_options
@click.option(
    "--drain-timeout",
    type=FiniteRange(min=0),
    default=DRAIN_TIMEOUT_S,
    help="Seconds that running streams have to finish after SIGTERM. Gateways then resume them elsewhere.",
)
@click.option("--lease", type=FiniteRange(min=0.5), default=6.0, help="Seconds until a registration expires.")
@click.option(
    "--capacity-wait",
    type=FiniteRange(min=0),
    default=10.0,
    help="Seconds after which a request without a ready worker goes back to its gateway. The gateway tries again, if "
    "possible with another router, while its client waits.",
)
@click.option(
    "--on-demand",
    multiple=True,
    metavar="MODEL",
    help="Model that may have no worker, because an autoscaler starts one when needed. Its requests wait for the first "
    "worker. May be repeated.",
)
@click.option(
    "--cold-start",
    type=FiniteRange(min=0, min_open=True),
    default=COLD_START_S,
    help="Maximum seconds that requests wait for the first worker of a model on demand.",
)
@click.option(
    "--idle-after",
    type=FiniteRange(min=0),
    default=IDLE_AFTER_S,
    help="Seconds without requests after which a model on demand needs no worker.",
)
@click.option(
    "--scaling-window",
    type=FiniteRange(min=1),
    default=WINDOW_S,
    help="Seconds over which demand is averaged before the router wants fewer workers.",
)
@click.option(
    "--scaler",
    metavar="HOST:PORT",
    help="Additional address for KEDA's triggers `external` and `external-push`, without TLS.",
)
@click.option(
    "--max-ttft",
    type=FiniteRange(min=0, min_open=True),
    default=60.0,
    help="Maximum seconds that a request waits for others, here and at its worker. Longer waits are refused. Workers "
    "have a bound of their own, --max-ttft-s.",
)
@click.option(
    "--max-waiting",
    type=click.IntRange(min=0),
    default=1024,
    help="Maximum number of requests that wait while all workers are full.",
)
@click.option(
    "--max-in-flight-per-tenant",
    type=click.IntRange(min=1),
    help="Maximum number of concurrent requests of one tenant.",
)
@click.option(
    "--tenant-weight",
    "tenant_weights",
    multiple=True,
    metavar="NAME=WEIGHT",
    help="Share of a tenant when requests wait; 1 for tenants that are not named. May be repeated.",
)
@click.option(
    "--max-attempts",
    type=click.IntRange(min=1),
    default=4,
    help="Maximum number of workers that a request may lose in a row; then it fails.",
)
@click.option(
    "--max-in-flight", type=click.IntRange(min=1), default=4096, help="Maximum number of concurrent requests."
)
@click.option(
    "--max-request-mb",
    type=click.IntRange(min=16),
    default=256,
    help="Maximum size of the requests in flight, as received, in MiB. The router needs up to six times that.",
)
@click.option(
    "--max-workers",
    type=click.IntRange(min=1),
    default=MAX_WORKERS,
    help="Maximum number of workers. Further registrations are refused; further workers in Redis are ignored with a "
    "warning.",
)
@click.option(
    "--max-sessions",
    type=click.IntRange(min=1),
    default=65_536,
    help="Maximum number of sessions (prompt_cache_key) whose worker is remembered.",
)
@click.option(
    "--max-index-entries",
    type=click.IntRange(min=1),
    default=4_000_000,
    help="Maximum size of the prefix index: cached blocks, summed over the workers (up to 160 bytes each).",
)
@click.option(
    "--long-prompt-ms",
    type=FiniteRange(min=0),
    default=LONG_PROMPT_MS,
    help="Prompts that take longer to compute go to workers with --role prefill, if there are any.",
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
    """Place requests on workers, by their cached prefixes and their load."""
    configure_logging(log_level, log_format)

    services = tuple(filter(is_service, worker))
    worker = tuple(address for address in worker if not is_service(address))

    async def run() -> None:
        registry = Registry(worker, lease_s=lease, max_workers=options["max_workers"])
        bounds = FleetConfig(
            max_index_entries=max_index_entries,
            max_sessions=max_sessions,
            long_prompt_ms=options["long_prompt_ms"],
            plain_grpc=plain_grpc,
        )
        router = wired(registry, bounds, admission, {**options, "listen": listen, "services": services})
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
        for service in services:
            check_service(service)
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
    """Run the command; exit status 2 and one sentence on standard error if the flags are wrong."""
    try:
        command.main(prog_name="headrace router", standalone_mode=False)
    except click.UsageError as error:
        sys.exit(told(error))
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    startup.after_imports()
    main()
