"""The gateway as a process: connects the parts, listens, and stops within a time limit."""

from __future__ import annotations

import asyncio
import importlib
import logging
import math
import signal
import socket
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from headrace.common.aliases import Aliases
from headrace.common.kubernetes.cluster import Cluster, ClusterError
from headrace.common.kubernetes.services import is_service
from headrace.common.kubernetes.watches import ServiceWatches
from headrace.common.tasks import end_tasks
from headrace.common.transport.channels import PLAIN, Transport
from headrace.gateway.chat.answering import Answering
from headrace.gateway.chat.formats import Formats
from headrace.gateway.chat.generation import Generator
from headrace.gateway.chat.planning import Chats
from headrace.gateway.chat.prompts import Prompts, SpecialTokensInText
from headrace.gateway.chat.shadowing import ChatCopies, Shadows
from headrace.gateway.edge.cors import with_cors
from headrace.gateway.edge.grpc_edge import GrpcService, start_grpc_server
from headrace.gateway.edge.http import HttpEdge, HttpServer, bound_socket
from headrace.gateway.edge.settings import EdgeControls, EdgeSettings
from headrace.gateway.encoding.planning import Encodings
from headrace.gateway.encoding.running import EncodingCopies, EncodingRunner
from headrace.gateway.images.loading import ImageLoader
from headrace.gateway.images.sources import ImageSources
from headrace.gateway.picking.picker import EndpointPicker, PickerServer
from headrace.gateway.picking.tls import PickerTls, PickerTlsError, picker_bind
from headrace.gateway.protocol import CannotServeError, OpenProtocol, Setup
from headrace.gateway.protocols import PROTOCOLS, endpoints
from headrace.gateway.services import Services
from headrace.gateway.structure.fields import Constraints
from headrace.gateway.telemetry.metrics import Metrics
from headrace.gateway.text.models import Models
from headrace.gateway.upstream.model_host import ModelHost
from headrace.gateway.upstream.routers import Upstream

NUM_TOKENIZER_THREADS = 2
NUM_IMAGE_THREADS = 2
# Added to the drain timeout, for the last events of streams that it interrupts.
STOP_S = 1.0

_LOG = logging.getLogger("headrace.gateway")


@dataclass(frozen=True, slots=True)
class Settings:
    """The values of the command line."""

    host: str
    port: int
    grpc_port: int
    """0: no gRPC."""
    routers: tuple[str, ...]
    drain_timeout_s: float
    """How long running requests may take to end after SIGTERM."""
    tool_parsers: Mapping[str, str]
    """Names of formats by model; see `Formats`."""
    reasoning_parsers: Mapping[str, str]
    chat_templates: Mapping[str, str]
    """The sources of chat templates that requests name."""
    special_tokens_in_text: SpecialTokensInText
    worker_wait_s: float | None
    """How long a new request waits if no worker is reachable; None: as long as its client."""
    plain_grpc: bool
    """Whether each request is a separate RPC."""
    endpoint_picker: str | None
    """Address for proxies that ask where to send their requests."""
    endpoint_port: int
    """Port of the endpoints that it names."""
    endpoint_picker_tls: PickerTls | None
    """How proxies speak with the picker; None: as the fleet's processes do, but without certificates of their own."""
    model_host: str | None
    """Address of the host that loads and unloads models."""
    await_model_host: bool
    """Whether requests wait until the host's models are known."""
    kubernetes_api: str | None
    """URL of the API server for routers that are named as a Service; None: that of the cluster of this process."""
    kubernetes_credentials: Path
    """Directory with the credentials for it."""
    aliases: Aliases
    """Other names of models."""
    images: ImageSources
    """From where images may be fetched."""
    controls: EdgeSettings
    protocol_flags: Mapping[str, Any]
    """Values of the protocols' own options, by parameter name."""


class Threads:
    """Threads for work that would block the event loop."""

    def __init__(self) -> None:
        self.tokenizing = ThreadPoolExecutor(NUM_TOKENIZER_THREADS, "tokenize")
        self.translating = ThreadPoolExecutor(1, "translate")
        self.loading = ThreadPoolExecutor(1, "load")
        self.images = ThreadPoolExecutor(NUM_IMAGE_THREADS, "images")

    def close(self) -> None:
        """Wait for the work that runs, and drop the work that waits."""
        for executor in (self.tokenizing, self.translating, self.loading, self.images):
            executor.shutdown(cancel_futures=True)


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT. Raises `CannotServeError` or `EdgeSettingsError` if the settings are wrong."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    controls = EdgeControls(settings.controls)
    bound = _bind(settings.host, settings.port)
    await controls.start()
    threads = Threads()
    services = _services(settings, controls, threads)
    watches: ServiceWatches | None = None
    opened: list[OpenProtocol] = []
    try:
        watches = _watches(settings, services)
        if watches is not None:
            watches.start()
        for protocol in PROTOCOLS.values():
            flags = protocol.flags(settings.protocol_flags)
            opened.append(protocol.open(Setup(services, flags, settings.controls.redis_url, controls.admission)))
        await _run(settings, controls, services, opened, bound, threads, stop)
    finally:
        if watches is not None:
            await watches.close()
        await services.shadows.close()
        await services.upstream.close()
        await services.host.close()
        for one in opened:
            await one.close()
        await controls.close()
        threads.close()
        services.models.close()


def _watches(settings: Settings, services: Services) -> ServiceWatches | None:
    """The watches of the routers that are named as a Service; None if there are none. Raises `CannotServeError`."""
    named = list(filter(is_service, settings.routers))
    if not named:
        return None
    try:
        cluster = Cluster(settings.kubernetes_api, settings.kubernetes_credentials)
    except ClusterError as error:
        raise CannotServeError(str(error)) from None
    return ServiceWatches(named, cluster, services.upstream.pods_seen, registry=services.metrics.registry)


def _services(settings: Settings, controls: EdgeControls, threads: Threads) -> Services:
    return services_behind(
        settings.routers,
        threads,
        transport=controls.transport,
        model_host=settings.model_host,
        await_model_host=settings.await_model_host,
        worker_wait_s=settings.worker_wait_s,
        plain_grpc=settings.plain_grpc,
        aliases=settings.aliases,
        formats=Formats(settings.tool_parsers, settings.reasoning_parsers),
        chat_templates=settings.chat_templates,
        special_tokens_in_text=settings.special_tokens_in_text,
        images=settings.images.loader(threads.images),
        vllm_metrics=settings.controls.vllm_metrics,
    )


def services_behind(
    routers: Sequence[str],
    threads: Threads,
    *,
    transport: Transport = PLAIN,
    model_host: str | None = None,
    await_model_host: bool = False,
    worker_wait_s: float | None = None,
    plain_grpc: bool = False,
    aliases: Aliases | None = None,
    formats: Formats | None = None,
    chat_templates: Mapping[str, str] | None = None,
    special_tokens_in_text: SpecialTokensInText = SpecialTokensInText.PROMPTS,
    images: ImageLoader | None = None,
    vllm_metrics: bool = False,
) -> Services:
    """The services that endpoints use, connected with each other."""
    metrics = Metrics(vllm=vllm_metrics)
    in_use = Counter[str]()
    host = ModelHost(model_host, transport, in_use=in_use, is_awaited=await_model_host)
    upstream = Upstream(
        routers,
        transport,
        worker_wait_s=worker_wait_s,
        plain_grpc=plain_grpc,
        on_retry=metrics.retried,
        problem_of=host.problem_of,
        in_use=in_use,
    )
    models = Models(upstream, threads.loading, host=host, aliases=aliases, named_templates=chat_templates)
    prompts = Prompts(threads.tokenizing, special_tokens_in_text, images or ImageLoader(threads.images))
    generator = Generator(upstream, metrics)
    shadows, runner = Shadows(models, metrics), EncodingRunner(upstream, metrics)
    copies = ChatCopies(shadows, generator)
    chats = Chats(
        models, prompts, Constraints(threads.translating), formats or Formats(), copies, metrics.image_refused
    )
    encodings = Encodings(models, prompts, EncodingCopies(shadows, runner))
    return Services(
        models,
        chats,
        shadows,
        generator,
        Answering(generator),
        encodings,
        runner,
        upstream,
        host,
        metrics,
    )


async def _run(
    settings: Settings,
    controls: EdgeControls,
    services: Services,
    opened: Sequence[OpenProtocol],
    bound: socket.socket,
    threads: Threads,
    stop: asyncio.Event,
) -> None:
    """Serve until `stop` is set, or the HTTP server or a background task ends; then drain."""
    edge = HttpEdge(endpoints(services, opened), services.metrics, admission=controls.admission, bodies=controls.bodies)
    grpc_server = await _start_grpc(settings, controls, [one for protocol in opened for one in protocol.grpc_services])
    picker = await _start_picker(settings, controls, services, opened)
    stop_timeout_s = math.ceil(settings.drain_timeout_s + STOP_S)
    application = with_cors(edge, controls.cors_origins)
    http_server = HttpServer(application, stop_timeout_s, controls.connections, controls.tls)
    serving = asyncio.create_task(http_server.serve(sockets=[bound]))
    # Importing OpenVINO takes a third of a second. It is done before a router has a model.
    threads.loading.submit(importlib.import_module, "headrace.gateway.text.tokenizer")
    works = (services.models.run(), services.host.run(), *(protocol.run() for protocol in opened), _wait(stop))
    tasks = [asyncio.create_task(work) for work in works]
    _log_address(bound, controls)
    done, _ = await asyncio.wait({serving, *tasks}, return_when=asyncio.FIRST_COMPLETED)
    _LOG.info("stopping")
    http_server.should_exit = True
    for protocol in opened:
        protocol.refuse_new()
    interrupting = asyncio.get_running_loop().call_later(settings.drain_timeout_s, edge.interrupt)
    drained = [protocol.drain(settings.drain_timeout_s) for protocol in opened]
    servers = [server for server in (grpc_server, picker) if server is not None]
    stopped = [server.stop(settings.drain_timeout_s) for server in servers]
    await asyncio.gather(serving, *drained, *stopped)
    interrupting.cancel()
    await end_tasks(*tasks)
    for task in done:
        task.result()


async def _start_picker(
    settings: Settings, controls: EdgeControls, services: Services, opened: Sequence[OpenProtocol]
) -> PickerServer | None:
    if settings.endpoint_picker is None:
        if settings.endpoint_picker_tls is not None:
            raise CannotServeError("--endpoint-picker-tls needs --endpoint-picker HOST:PORT")
        return None
    most = settings.controls.max_body_mb << 20
    picker = EndpointPicker(opened, services.upstream, settings.endpoint_port, most)
    try:
        bind = picker_bind(settings.endpoint_picker_tls, controls.transport)
        server = PickerServer(picker, lambda: services.models.ready, bind)
        await server.start(settings.endpoint_picker)
    except PickerTlsError as error:
        raise CannotServeError(str(error)) from None
    except RuntimeError as error:
        problem = f"cannot listen for proxies on {settings.endpoint_picker}; choose another with --endpoint-picker"
        raise CannotServeError(problem) from error
    _LOG.info("picking endpoints on %s", settings.endpoint_picker)
    return server


async def _start_grpc(
    settings: Settings, controls: EdgeControls, services: Sequence[GrpcService]
) -> grpc.aio.Server | None:
    if not settings.grpc_port:
        return None
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    address = f"{host}:{settings.grpc_port}"
    try:
        server, _ = await start_grpc_server(services, address, controls.admission, controls.tls)
    except RuntimeError as error:
        raise CannotServeError(
            f"cannot listen for gRPC on {address}; is it in use? Choose another with --grpc-port"
        ) from error
    _LOG.info("listening for gRPC on %s", address)
    return server


def _log_address(bound: socket.socket, controls: EdgeControls) -> None:
    host, port = bound.getsockname()[:2]
    scheme = "http" if controls.tls is None else "https"
    _LOG.info("listening on %s://%s", scheme, f"[{host}]:{port}" if ":" in host else f"{host}:{port}")


async def _wait(event: asyncio.Event) -> None:
    await event.wait()


def _bind(host: str, port: int) -> socket.socket:
    try:
        return bound_socket(host, port)
    except OSError as error:
        raise CannotServeError(
            f"cannot listen on {host}:{port}: {error.strerror or error}; choose another with --host and --port"
        ) from error
