"""Serves a loaded model: gRPC services, metrics, registration, and an orderly stop."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import time
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health

from headrace.common.model_files.task import task_of
from headrace.common.stores.redis_link import connect
from headrace.common.telemetry.logs import without_secrets
from headrace.common.telemetry.scrapes import serve_scrapes
from headrace.common.threads import in_thread
from headrace.common.transport.channels import SERVER_OPTIONS, Transport
from headrace.common.transport.introspection import add_introspection, set_serving, start_probe
from headrace.common.transport.session_server import SessionServer
from headrace.protos import inference_pb2_grpc, stage_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.protos.inference_pb2 import Task
from headrace.protos.model_identity import model_identity
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.encoder.files import refuse_embedder_with_cache
from headrace.worker.encoder.load import LoadedEncoder, load_encoder
from headrace.worker.engine.mailbox import Mailbox
from headrace.worker.engine.serving_thread import ServingThread
from headrace.worker.engine.watchdog import Watchdog, end_process, watch_engine
from headrace.worker.grammar.compiler import Grammars, KeptVocabulary, read_vocabulary
from headrace.worker.host.advertise import name_on_host
from headrace.worker.host.binding import keep_binding_known, read_binding
from headrace.worker.kv.host_memory import STALE_AFTER_S, HostMemory, open_memory
from headrace.worker.loading import LoadedModel, load_model
from headrace.worker.model.directory import read_model_dir
from headrace.worker.model.fingerprint import outline_of
from headrace.worker.server.adapters import AdapterDesk
from headrace.worker.server.admission import ModelLimits
from headrace.worker.server.blocks import BlockCalls
from headrace.worker.server.images import ImageDesk, Images
from headrace.worker.server.kv_events import AllBlocksCleared, EventLog, KvEventPublisher, roots_of
from headrace.worker.server.observer import RequestObserver
from headrace.worker.server.registration import REDIS_TIMEOUT_S, RedisLease, Registration
from headrace.worker.server.service import INFERENCE, SERVICE_NAMES, InferenceService, WorkerService
from headrace.worker.server.watch import WatchHub

if TYPE_CHECKING:
    from headrace.worker.pipeline.joining import StageOffers

log = logging.getLogger("headrace.worker")


async def serve(config: WorkerConfig) -> None:
    """Bind the address, load the model and serve it until SIGTERM or SIGINT. ConfigurationError if that is not
    possible."""
    stop = stop_signal()
    if config.redis_url is not None:
        check_redis_url(config.redis_url)
    task = task_of(config.model_dir)
    has_memory = config.kv_memory is not None and not task
    memory = open_memory(config.kv_memory or "", config.worker_id) if has_memory else None
    # A mistake in the flags must not destroy the cache of the previous process.
    was_kept = config.keep_kv_memory and memory is not None and memory.size_bytes > 0
    try:
        await _serve_until(stop, config, task, memory)
    except ConfigurationError:
        if not was_kept:
            _give_up(memory)
        raise
    if not config.keep_kv_memory:
        _give_up(memory)


async def _serve_until(stop: asyncio.Event, config: WorkerConfig, task: Task, memory: HostMemory | None) -> None:
    transport = Transport(config.tls_dir, config.join_token_file)
    server = bound_server(config, transport)
    joins, offers = (None, None) if task else await served_offers(config, transport)
    loading = asyncio.wrap_future(in_thread("load", lambda: load(config, task, memory, transport, offers)))
    stopping = asyncio.create_task(stop.wait())
    first_of: set[asyncio.Future[Any]] = {loading, stopping}
    await asyncio.wait(first_of, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        loading.cancel()  # its thread goes on until the process ends
        return
    model = loading.result()
    adapters = AdapterDesk(model.adapters, model.card.name, config.max_ttft_s)
    ranks = model.ranks if isinstance(model, LoadedModel) else tuple
    stages = model.stages if isinstance(model, LoadedModel) else tuple
    hub = WatchHub(time.time_ns(), model.max_num_seqs, model.card.block_size, adapters, ranks, stages)
    mailbox = Mailbox(model.max_num_seqs + config.max_num_waiting, hub.publish, bell=model.bell)
    vllm_name = model.card.name if config.vllm_metrics else ""
    observer = serve_metrics(config.metrics, hub, vllm_name) if config.metrics else RequestObserver()
    blocks = BlockCalls(model.handover, hub)
    health, sessions = add_services(server, config, model, mailbox, hub, observer, adapters, blocks)
    kv_events = _publish_kv_events(config, model, hub, adapters)
    thread = model.make_thread(mailbox, config.max_ttft_s)
    thread.start()
    # Reading the binding and collecting garbage take 0.1 s of a core, so do both before the first request.
    hub.bind(await asyncio.to_thread(read_binding, model.kv_cache))
    # The objects that exist now live as long as the process, so the garbage collector need not scan them.
    gc.collect()
    gc.freeze()
    background = [
        asyncio.create_task(keep_binding_known(model.kv_cache, hub.bind)),
        asyncio.create_task(watch_over(thread, config.stuck_after_s, hub, health)),
        *([asyncio.create_task(_keep_in_use(memory))] if memory is not None else []),
    ]
    await server.start()
    probe = await answer_probes(config.probe, health)
    await set_serving(health, SERVICE_NAMES, hub.silent_because is None)
    registrations = _registrations(config, transport, hub)
    if model.kept is not None:
        model.kept.note_ready()
    log.info("listening on %s", config.listen)
    await stopping
    for job in background:
        job.cancel()
    hub.stop()
    await set_serving(health, SERVICE_NAMES, False)
    deadline_s = time.monotonic() + config.drain_timeout_s
    # Routers hand the blocks of registered workers over.
    await blocks.wait(config.drain_timeout_s)
    await asyncio.gather(*(registration.close() for registration in registrations))
    await mailbox.wait_until_empty(max(0.0, deadline_s - time.monotonic()))
    sessions.end_when_idle()
    others = [one for one in (probe, joins) if one is not None]
    await asyncio.gather(server.stop(0.2), *(other.stop(0.0) for other in others))
    mailbox.stop()
    thread.join(1.0)
    if kv_events is not None:
        await kv_events.close()
    model.close()


async def served_offers(
    config: WorkerConfig, transport: Transport
) -> tuple[grpc.aio.Server, StageOffers] | tuple[None, None]:
    """Let stages offer themselves at --await-stages from now on. Returns the server and the offers; None without the
    flag. ConfigurationError."""
    if config.await_stages is None:
        return None, None
    from headrace.worker.pipeline.joining import StageOffers, StagesService

    server = bound_server(config, transport, config.await_stages, "--await-stages")
    await asyncio.to_thread(read_model_dir, config.model_dir)
    outline = await asyncio.to_thread(outline_of, config.model_dir)
    worker, num_stages = name_on_host(config.worker_id), config.pipeline - 1
    offers = StageOffers(worker, num_stages, config.name, outline, config.await_stages)
    stage_pb2_grpc.add_StagesServicer_to_server(StagesService(offers), server)
    await server.start()
    return server, offers


def load(
    config: WorkerConfig,
    task: Task,
    memory: HostMemory | None,
    transport: Transport,
    offers: StageOffers | None = None,
) -> LoadedModel | LoadedEncoder:
    """Make the model ready to serve for a task. ConfigurationError."""
    if task:
        if config.tensor_parallel > 1 or config.pipeline > 1:
            flag = "--tensor-parallel" if config.tensor_parallel > 1 else "--pipeline"
            raise ConfigurationError(f"{flag} divides models that generate text, and this one encodes texts")
        return load_encoder(config, task)
    refuse_embedder_with_cache(config.model_dir)
    if config.pooling is not None or config.normalizes is not None:
        raise ConfigurationError("--pooling and --normalize are for embedding models, and this model generates text")
    return load_model(config, memory, transport, offers)


async def _keep_in_use(memory: HostMemory) -> None:
    """Until cancelled, mark the KV cache's file as in use for other workers."""
    while True:
        memory.touch()
        await asyncio.sleep(STALE_AFTER_S / 10)


def _give_up(memory: HostMemory | None) -> None:
    if memory is not None:
        memory.remove()


def stop_signal() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


def bound_server(
    config: WorkerConfig, transport: Transport, listen: str | None = None, flag: str = "--listen"
) -> grpc.aio.Server:
    """A server that has bound its port but does not answer yet: that of --listen, or of another `flag`."""
    listen = listen or config.listen
    transport.refuse_strangers(listen, config.insecure)
    server = grpc.aio.server(interceptors=transport.interceptors(), options=SERVER_OPTIONS)
    try:
        transport.bind(server, listen)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {listen}; is it in use? Choose another {flag}") from error
    return server


def _registrations(config: WorkerConfig, transport: Transport, hub: WatchHub) -> list[Registration | RedisLease]:
    """Make the worker known to its routers."""
    registrations: list[Registration | RedisLease] = [
        Registration(router, config.worker_id, config.advertise, transport) for router in config.routers
    ]
    if config.redis_url is not None:
        registrations.append(RedisLease(config.redis_url, config.worker_id, config.advertise, hub.note_lease))
    return registrations


async def watch_over(
    thread: ServingThread, stuck_after_s: float, hub: WatchHub, servicer: health.aio.HealthServicer
) -> None:
    """While the engine is stuck, send nothing to watchers and report NOT_SERVING."""

    async def fall_silent(why: str) -> None:
        log.error("the engine is at %s", thread.position())
        hub.fall_silent(why)
        await set_serving(servicer, SERVICE_NAMES, False)

    async def speak() -> None:
        hub.speak()
        await set_serving(servicer, SERVICE_NAMES, not hub.is_stopping)
        if hub.draining:
            await set_serving(servicer, [INFERENCE], False)

    try:
        await watch_engine(Watchdog(thread, stuck_after_s), fall_silent, speak, end_process)
    except Exception as error:
        end_process("the watchdog failed", error)


async def answer_probes(address: str | None, servicer: health.aio.HealthServicer) -> grpc.aio.Server | None:
    """Serve health checks at an address; does nothing without one. ConfigurationError if it cannot be used."""
    try:
        return None if address is None else await start_probe(address, servicer)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot answer probes on {address}; choose another --probe") from error


def check_redis_url(url: str) -> None:
    """Raise ConfigurationError if this is not a Redis URL."""
    try:
        connect(url, REDIS_TIMEOUT_S)
    except ValueError as error:
        raise ConfigurationError(f"--redis {without_secrets(url)!r} is not a Redis URL: {error}") from None


def add_services(
    server: grpc.aio.Server,
    config: WorkerConfig,
    model: LoadedModel | LoadedEncoder,
    mailbox: Mailbox,
    hub: WatchHub,
    observer: RequestObserver,
    adapters: AdapterDesk,
    blocks: BlockCalls,
) -> tuple[health.aio.HealthServicer, SessionServer]:
    """Register the worker's services. Returns its health service and its sessions."""
    card = model.card
    limits = ModelLimits(
        model=card.name,
        fingerprint=card.fingerprint,
        vocab_size=card.vocab_size,
        max_context_tokens=card.max_context_tokens,
        eos_token_ids=frozenset(card.eos_token_ids),
        model_identity=model_identity(card),
        tokenizer_sha256=card.tokenizer_sha256,
        task=card.task,
        card=card,
        beams=model.beams,
    )
    vocabulary = KeptVocabulary(lambda: read_vocabulary(config.model_dir))
    grammars = Grammars(vocabulary, card.vocab_size, card.eos_token_ids)
    images = ImageDesk(card.name, _images_of(model), observer.image_refused)
    inference = InferenceService(mailbox, hub, limits, grammars, vocabulary, observer, adapters, images)
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    described = worker_pb2.GetModelCardResponse(card=card, worker_id=config.worker_id, epoch=hub.epoch)
    servicer = add_introspection(server, SERVICE_NAMES)
    worker = WorkerService(described, model.tokenizer_bundle, mailbox, hub, adapters, blocks, servicer)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    return servicer, inference.sessions


def _publish_kv_events(
    config: WorkerConfig, model: LoadedModel | LoadedEncoder, hub: WatchHub, adapters: AdapterDesk
) -> KvEventPublisher | None:
    """Publish the changes of the prefix cache from now on, if that is wanted."""
    if config.kv_events is None:
        return None
    if model.locate is None:
        raise ConfigurationError("--kv-events is for models that generate text: an encoder has no prefix cache")
    card = model.card
    topic = config.kv_events_topic or f"kv@{config.advertise}@{card.name}"
    publisher = KvEventPublisher(config.kv_events, config.kv_events_replay, topic)

    def adapters_by_root() -> dict[int, str | None]:
        return roots_of(card.fingerprint, ((known.name, known.sha256) for known in adapters.list().adapters))

    changes = EventLog(model.locate, card.block_size, adapters_by_root)
    publisher.start()
    publisher.publish([AllBlocksCleared()])
    hub.reports.add(lambda report: publisher.publish(changes.events(report.stored, report.evicted)))
    return publisher


def _images_of(model: LoadedModel | LoadedEncoder) -> Images | None:
    vision = model.vision if isinstance(model, LoadedModel) else None
    return None if vision is None else Images(vision.family, vision.limits, vision.max_tokens)


def serve_metrics(address: str, hub: WatchHub, vllm_name: str = "") -> RequestObserver:
    """Serve Prometheus metrics at host:port in a thread of their own, also under the names of vLLM if the model's name
    is given as `vllm_name`. Returns the recorder of requests. ConfigurationError if the address cannot be used."""
    # Imported late: this takes a while.
    from headrace.common.telemetry.vllm_metrics import Waits
    from headrace.worker.server.metrics import LoadCollector, RequestMetrics, VllmCollector, new_registry

    registry = new_registry()
    registry.register(LoadCollector(hub))
    if vllm_name:
        registry.register(VllmCollector(hub, vllm_name))
    metrics = RequestMetrics(registry, vllm_name, Waits(registry) if vllm_name else None)
    host, _, port = address.rpartition(":")
    try:
        serve_scrapes(host or "0.0.0.0", int(port), registry)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot serve metrics on {address}: {error}; choose another --metrics") from error
    return RequestObserver(metrics)
