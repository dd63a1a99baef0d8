"""`python -m headrace.worker`: flags, loading, serving, stopping."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import grpc
import uvloop
from grpc_health.v1 import health

from headrace.common.stores.redis_link import connect
from headrace.common.telemetry.logs import FORMATS, LEVELS, configure_logging, without_secrets
from headrace.common.telemetry.tracing import FLUSH_TRACES_S, TracingUnavailableError, start_tracing, stop_tracing
from headrace.common.transport.channels import SERVER_OPTIONS, Transport
from headrace.common.transport.introspection import add_introspection, set_serving, start_probe
from headrace.common.transport.session_server import SessionServer
from headrace.protos import inference_pb2, inference_pb2_grpc, worker_pb2, worker_pb2_grpc
from headrace.protos.model_identity import model_identity
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.engine.ending import end_process
from headrace.worker.engine.engine import Engine
from headrace.worker.engine.mailbox import Mailbox
from headrace.worker.engine.pauses import Pauses
from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.engine.step_cost import ONE_STREAM, WARM_UP_TOKENS
from headrace.worker.engine.thread import EngineThread
from headrace.worker.engine.watchdog import DEFAULT_STUCK_AFTER_S, Watchdog, watch_engine
from headrace.worker.grammar.compiler import Grammars, Vocabulary
from headrace.worker.host.advertise import advertised_address, way_to_the_fleet
from headrace.worker.host.binding import Region, keep_binding_known
from headrace.worker.host.numa import bind_memory, num_threads_for
from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.manager import KVCacheManager
from headrace.worker.kv.memory import GIB, available_bytes, available_on_node, kv_cache_budget
from headrace.worker.model.decode_graph import wants_decode_graph
from headrace.worker.model.directory import WEIGHTS, ModelDir, read_model_dir
from headrace.worker.model.fingerprint import fingerprint_of
from headrace.worker.model.step_limits import StepLimits, step_limits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.server.admission import ModelLimits
from headrace.worker.server.observer import RequestObserver
from headrace.worker.server.registration import REDIS_TIMEOUT_S, RedisLease, Registration
from headrace.worker.server.service import INFERENCE, SERVICE_NAMES, InferenceService, WorkerService
from headrace.worker.server.watch import WatchHub

log = logging.getLogger("headrace.worker")

DRAIN_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve."""

    engine: Engine
    card: worker_pb2.ModelCard
    tokenizer_bundle: bytes
    kv_cache: Region
    max_num_seqs: int


def load_model(config: WorkerConfig) -> LoadedModel:
    """Read, compile, allocate, warm up."""
    threads = num_threads_for(config.threads)
    model_dir = read_model_dir(config.model_dir)
    if config.kv_cache_bytes is not None:
        # Loading takes up to minutes; what cannot be is refused before it.
        weights = (config.model_dir / WEIGHTS).stat().st_size
        kv_cache_budget(config.kv_cache_bytes, config.kv_cache_share, available_bytes() - weights)
    start = time.monotonic()
    hashing = ThreadPoolExecutor(1).submit(fingerprint_of, config.model_dir, threads)
    # Not before a wrong directory was refused: importing OpenVINO takes its time.
    from headrace.worker.model.runner import OpenVINOModelRunner
    from headrace.worker.sampling.vocabulary_reducer import reducer_for

    has_decode_graph = wants_decode_graph(
        config.decode_graph,
        config.model_dir,
        kv_precision=config.kv_precision,
        execution_mode=config.execution_mode,
        available=available_bytes(),
    )
    runner = OpenVINOModelRunner(
        config.model_dir,
        threads=threads,
        kv_precision=config.kv_precision,
        execution_mode=config.execution_mode,
        decode_graph=has_decode_graph,
    )
    on_node = available_on_node(config.memory_node) if config.memory_node is not None else None
    most = int(on_node * config.kv_cache_node_share) if on_node is not None else None
    budget = kv_cache_budget(config.kv_cache_bytes, config.kv_cache_share, available_bytes(), most)
    num_blocks = budget // runner.block_bytes - 1  # the runner has one more, for padding
    if num_blocks < 1:
        raise ConfigurationError(
            f"a KV cache of {budget / GIB:.3f} GiB holds no block of {runner.block_bytes / GIB:.3f} GiB; "
            "ask for more with --kv-cache-gb, or free memory"
        )
    arena = runner.allocate(num_blocks, huge_pages=config.huge_pages)
    log.info(
        "%s loaded in %.1f s: %d threads, %s, KV cache %.2f GiB of %s, %d blocks of %d tokens",
        config.name,
        time.monotonic() - start,
        threads,
        "a graph of its own for small decode steps" if has_decode_graph else "one graph",
        num_blocks * runner.block_bytes / GIB,
        runner.kv_precision,
        num_blocks,
        runner.block_size,
    )
    pool = BlockPool(num_blocks, runner.block_size)
    limits = step_limits(
        config.max_num_seqs, config.max_num_batched_tokens, config.max_num_mixed_tokens, exact_rows=runner.exact_rows
    )
    tell_limits(limits, runner.exact_rows)
    scheduler = scheduler_of(config, pool, limits)
    # The first pages are taken while the first kernels are made: a quarter of a second less until the worker is ready.
    touching = threading.Thread(target=runner.touch, name="touch")
    touching.start()
    engine = Engine(scheduler, runner, BatchSampler(reducer_for(runner.vocab_size, threads)))
    warm_up(engine, pool)
    touching.join()
    precision, fingerprint = runner.kv_precision, hashing.result()
    card = model_card(config, pool, model_dir, fingerprint, kv_precision=precision, vocab_size=runner.vocab_size)
    region = Region(arena.address, arena.size_bytes)
    return LoadedModel(engine, card, model_dir.tokenizer_bundle, region, limits.max_num_seqs)


def scheduler_of(config: WorkerConfig, pool: BlockPool, limits: StepLimits) -> Scheduler:
    """The scheduler of a worker, without requests."""
    return Scheduler(
        KVCacheManager(pool),
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_num_mixed_tokens,
        target_step_ms=config.target_tpot_ms,
        pauses=Pauses() if config.max_pause_ms is None else Pauses(config.max_pause_ms / 1000),
    )


def tell_limits(limits: StepLimits, exact_rows: int) -> None:
    """Say in the log how large steps are, and whether prompts are exact in them."""
    sizes = limits.max_num_batched_tokens, limits.max_num_mixed_tokens, limits.max_num_seqs
    log.info("steps of up to %d tokens, %d where streams have a part; batches of up to %d", *sizes)
    if not limits.is_exact:
        log.warning(
            "prompts may not be exact: in steps of up to %d tokens, low bits of keys, values and logits may depend on "
            "how a prompt is cut; on this CPU steps are known to be exact up to %d tokens (--max-num-batched-tokens)",
            limits.max_num_batched_tokens,
            exact_rows,
        )


def warm_up(engine: Engine, pool: BlockPool) -> None:
    """Compute short prompts and tokens behind them, so that the first caller does not wait for what comes once; and
    again, to learn what steps cost."""
    most = pool.num_blocks * pool.block_size - 2
    sampling = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
    start = time.monotonic()
    for num_tokens in (*WARM_UP_TOKENS, *WARM_UP_TOKENS):
        engine.warm_up(Request("warm-up", [0] * min(num_tokens, most), sampling, 0))
    log.info(
        "warm after %.2f s: a step takes about %.0f ms, and %.2f ms for each token of a prompt",
        time.monotonic() - start,
        engine.scheduler.step_costs.decode.predict_ms(ONE_STREAM),
        engine.scheduler.step_costs.prompts.token_ms,
    )


def model_card(
    config: WorkerConfig,
    pool: BlockPool,
    model_dir: ModelDir,
    fingerprint: str,
    *,
    kv_precision: str,
    vocab_size: int,
) -> worker_pb2.ModelCard:
    """The card of the loaded model. A context longer than the whole KV cache is not promised."""
    longest = config.max_context_tokens or model_dir.max_context_tokens
    whole = ("top_k", "max_tokens")
    sampling = {name: int(value) if name in whole else value for name, value in model_dir.sampling.items()}
    return worker_pb2.ModelCard(
        name=config.name,
        fingerprint=fingerprint,
        tokenizer_sha256=model_dir.tokenizer_sha256,
        max_context_tokens=min(longest, pool.num_blocks * pool.block_size),
        vocab_size=vocab_size,
        block_size=pool.block_size,
        eos_token_ids=model_dir.eos_token_ids,
        default_sampling=inference_pb2.SamplingParams(**sampling),  # type: ignore[arg-type]
        created_s=model_dir.created_s,
        kv_precision=kv_precision,
    )


async def serve(config: WorkerConfig) -> None:
    """Bind, load the model and serve it until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if config.redis_url is not None:
        check_redis_url(config.redis_url)
    transport = Transport(config.tls_dir, config.join_token_file)
    transport.refuse_strangers(config.listen, config.insecure)
    server = grpc.aio.server(interceptors=transport.interceptors(), options=SERVER_OPTIONS)
    try:
        transport.bind(server, config.listen)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot listen on {config.listen}; is it in use? Choose another --listen") from error
    loading = asyncio.create_task(asyncio.to_thread(load_model, config))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        return
    model = loading.result()
    hub = WatchHub(time.time_ns(), model.max_num_seqs, model.engine.scheduler.kv_cache.block_size)
    mailbox = Mailbox(model.max_num_seqs + config.max_num_waiting, hub.publish)
    observer = serve_metrics(config.metrics, hub) if config.metrics else RequestObserver()
    health, sessions = add_services(server, config, model, mailbox, hub, observer)
    thread = EngineThread(model.engine, mailbox, max_wait_s=config.max_ttft_s)
    thread.start()
    binding = asyncio.create_task(keep_binding_known(model.kv_cache, hub.bind))
    watching = asyncio.create_task(watch_over(thread, config.stuck_after_s, hub, health))
    await server.start()
    probe = await _answer_probes(config.probe, health)
    # What is there now stays: the collector need not walk it again and again while streams wait.
    gc.collect()
    gc.freeze()
    await set_serving(health, SERVICE_NAMES, hub.silent_because is None)
    registrations: list[Registration | RedisLease] = [
        Registration(router, config.worker_id, config.advertise, transport) for router in config.routers
    ]
    if config.redis_url is not None:
        registrations.append(RedisLease(config.redis_url, config.worker_id, config.advertise, hub.note_lease))
    log.info("listening on %s", config.listen)
    await stopping
    binding.cancel()
    watching.cancel()
    hub.stop()
    await set_serving(health, SERVICE_NAMES, False)
    await asyncio.gather(*(registration.close() for registration in registrations))
    await mailbox.wait_until_empty(config.drain_timeout_s)
    sessions.end_when_idle()
    await asyncio.gather(server.stop(0.2), *([probe.stop(0.0)] if probe is not None else []))
    mailbox.stop()
    thread.join(1.0)


async def watch_over(
    thread: EngineThread, stuck_after_s: float, hub: WatchHub, servicer: health.aio.HealthServicer
) -> None:
    """While no step ends although there is work, tell watchers nothing and let health say so."""

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


async def _answer_probes(address: str | None, servicer: health.aio.HealthServicer) -> grpc.aio.Server | None:
    try:
        return None if address is None else await start_probe(address, servicer)
    except RuntimeError as error:
        raise ConfigurationError(f"cannot answer probes on {address}; choose another --probe") from error


def check_redis_url(url: str) -> None:
    """Raise ConfigurationError for what is no URL of Redis."""
    try:
        connect(url, REDIS_TIMEOUT_S)
    except ValueError as error:
        raise ConfigurationError(f"--redis {without_secrets(url)!r} is no URL of Redis: {error}") from None


def add_services(
    server: grpc.aio.Server,
    config: WorkerConfig,
    model: LoadedModel,
    mailbox: Mailbox,
    hub: WatchHub,
    observer: RequestObserver,
) -> tuple[health.aio.HealthServicer, SessionServer]:
    """Let the server answer for the model; gives the health to be set, and the sessions to be ended."""
    card = model.card
    limits = ModelLimits(
        model=card.name,
        fingerprint=card.fingerprint,
        vocab_size=card.vocab_size,
        max_context_tokens=card.max_context_tokens,
        eos_token_ids=frozenset(card.eos_token_ids),
        model_identity=model_identity(card),
        tokenizer_sha256=card.tokenizer_sha256,
    )
    grammars = Grammars(lambda: _vocabulary_of(config.model_dir), card.vocab_size, card.eos_token_ids)
    inference = InferenceService(mailbox, hub, limits, grammars, observer)
    inference_pb2_grpc.add_InferenceServicer_to_server(inference, server)
    described = worker_pb2.GetModelCardResponse(card=card, worker_id=config.worker_id, epoch=hub.epoch)
    worker = WorkerService(described, model.tokenizer_bundle, mailbox, hub)
    worker_pb2_grpc.add_WorkerServicer_to_server(worker, server)
    worker.health = add_introspection(server, SERVICE_NAMES)
    return worker.health, inference.sessions


def _vocabulary_of(model_dir: Path) -> Vocabulary:
    # Only when it is wanted: it imports OpenVINO's tokenizers.
    from headrace.worker.grammar.vocabulary import read_vocabulary

    return read_vocabulary(model_dir)


def serve_metrics(address: str, hub: WatchHub) -> RequestObserver:
    """Answer scrapes at host:port from a thread of its own; what observes requests for them."""
    # Only when it is wanted: importing it takes its time.
    from prometheus_client import start_http_server

    from headrace.worker.server.metrics import LoadCollector, RequestMetrics, new_registry

    registry = new_registry()
    registry.register(LoadCollector(hub))
    metrics = RequestMetrics(registry)
    host, _, port = address.rpartition(":")
    try:
        start_http_server(int(port), host or "0.0.0.0", registry=registry)
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"cannot serve metrics on {address}: {error}; choose another --metrics") from error
    return RequestObserver(metrics)


@click.command(context_settings={"auto_envvar_prefix": "HEADRACE_WORKER", "show_default": True})
@click.option(
    "--model",
    "model_dir",
    required=True,
    envvar="HEADRACE_WORKER_MODEL",
    type=click.Path(path_type=Path),
    help="Model directory.",
)
@click.option("--name", help="Name of the model in requests; by default the directory's.")
@click.option("--worker-id", help="Stable name of this worker; by default host and listen address.")
@click.option("--listen", default="127.0.0.1:50061", help="host:port or unix:/path to serve gRPC on.")
@click.option("--advertise", help="Address for routers; by default --listen, or the way to the router.")
@click.option(
    "--router",
    "routers",
    multiple=True,
    envvar="HEADRACE_WORKER_ROUTER",
    help="Router to register with; may be given several times.",
)
@click.option(
    "--redis",
    "redis_url",
    envvar="HEADRACE_WORKER_REDIS",
    help="Redis to publish this worker in: redis://HOST:PORT/DB, or redis+sentinel://HOST:PORT,.../SERVICE.",
)
@click.option(
    "--drain-timeout",
    "drain_timeout_s",
    type=click.FloatRange(0),
    default=DRAIN_TIMEOUT_S,
    help="Seconds that running requests may take to end after SIGTERM; then routers resume them elsewhere.",
)
@click.option("--threads", type=click.IntRange(1), help="Cores to compute with; by default all usable ones.")
@click.option("--kv-cache-gb", type=click.FloatRange(0, min_open=True), help="Size of the KV cache in GiB.")
@click.option(
    "--kv-cache-share",
    type=click.FloatRange(0, 0.95, min_open=True),
    default=0.4,
    help="Part of the available memory to use for it when no size is given.",
)
@click.option("--kv-precision", type=click.Choice(["u8", "u4", "bf16", "f32"]), default="u8")
@click.option("--execution-mode", type=click.Choice(["performance", "accuracy"]), default="performance")
@click.option(
    "--decode-graph",
    type=click.Choice(["auto", "on", "off"]),
    default="auto",
    help="Hold the weights twice, and compute decode steps of few sequences faster; by default on CPUs with AMX where "
    "the copy takes a tenth of the memory at most.",
)
@click.option(
    "--max-num-seqs",
    type=click.IntRange(1),
    help="Most requests in the running batch; by default 128, or fewer where steps are smaller.",
)
@click.option(
    "--max-num-batched-tokens",
    type=click.IntRange(1),
    help="Most tokens in a step; by default 1024, or as many as are exact on this CPU.",
)
@click.option(
    "--max-num-mixed-tokens",
    type=click.IntRange(1),
    help="Most tokens in a step that computes prompts and running streams; by default --max-num-batched-tokens.",
)
@click.option(
    "--max-ttft-s",
    type=click.FloatRange(0, min_open=True),
    default=60.0,
    help="Refuse requests that would wait longer than this for others; their own prompt does not count.",
)
@click.option(
    "--stuck-after-s",
    type=click.FloatRange(0, min_open=True),
    default=DEFAULT_STUCK_AFTER_S,
    help="Count as failed while there is work and no step ends for so long; more where steps are expected to be long.",
)
@click.option(
    "--target-tpot-ms",
    type=click.FloatRange(0, min_open=True),
    help="Size steps so that running streams get a token this often; by default every 100 ms, or in twice the time "
    "that a step takes without prompts.",
)
@click.option(
    "--max-pause-ms",
    type=click.FloatRange(0),
    help="How long running streams wait for prompts in a row, half of the time at most; by default 300, "
    "and not at all with --target-tpot-ms.",
)
@click.option("--max-num-waiting", type=click.IntRange(0), default=1024, help="Most requests waiting.")
@click.option("--max-context-tokens", type=click.IntRange(2), help="Prompt and answer at most; by default the model's.")
@click.option(
    "--kv-cache-node-share",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.4,
    help="No more than this share of what its NUMA node has, where there are several.",
)
@click.option(
    "--memory-node",
    type=click.IntRange(0),
    help="NUMA node to take memory from; by default that of the CPUs it is started on.",
)
@click.option("--huge-pages/--no-huge-pages", default=True, help="Ask the kernel for huge pages for the KV cache.")
@click.option("--metrics", help="host:port to serve Prometheus metrics on.")
@click.option(
    "--tls-dir",
    envvar="HEADRACE_TLS_DIR",
    type=click.Path(path_type=Path),
    help="Mutual TLS with all others of the fleet: ca.pem, cert.pem and key.pem there, read again when they change.",
)
@click.option(
    "--join-token-file",
    envvar="HEADRACE_JOIN_TOKEN_FILE",
    type=click.Path(path_type=Path),
    help="File with the secret that every caller has to present as well.",
)
@click.option(
    "--insecure",
    is_flag=True,
    envvar="HEADRACE_INSECURE",
    help="Serve beyond this host without certificates and join token: who reaches the port may do everything.",
)
@click.option("--probe", help="host:port to answer gRPC health on too, without TLS.")
@click.option("--log-level", type=click.Choice(LEVELS), default="info", help="Least level of log lines.")
@click.option("--log-format", type=click.Choice(FORMATS), default="text", help="Log lines for people or for machines.")
@click.option("--otlp-endpoint", help="Send traces there by OTLP, such as http://HOST:4317; needs headrace[otel].")
def command(
    log_level: str, log_format: str, otlp_endpoint: str | None, kv_cache_gb: float | None, **options: Any
) -> None:
    """Serve one model on the cores of one NUMA node."""
    configure_logging(log_level, log_format)
    kv_cache_bytes = None if kv_cache_gb is None else int(kv_cache_gb * GIB)
    try:
        config = config_of(Path(str(options.pop("model_dir"))), kv_cache_bytes, options)
        # Threads inherit it from the one that starts them: before there are any.
        config = replace(config, memory_node=bind_memory(config.memory_node))
        start_tracing("worker", otlp_endpoint)
        uvloop.run(serve(config))
    except (ConfigurationError, TracingUnavailableError, ValueError) as error:
        click.echo(f"error: {error}", err=True)
        sys.stderr.flush()
        os._exit(2)
    stop_tracing(FLUSH_TRACES_S)
    sys.stderr.flush()
    # The model's memory goes with the process; taking it apart first only makes stopping slower.
    os._exit(0)


def config_of(model_dir: Path, kv_cache_bytes: int | None, options: dict[str, Any]) -> WorkerConfig:
    """The flags as one configuration, what was left out filled in. ConfigurationError for those that exclude others."""
    if options["target_tpot_ms"] is not None and options["max_pause_ms"]:
        raise ConfigurationError("streams never wait for prompts with --target-tpot-ms; leave out --max-pause-ms")
    listen, way = options["listen"], way_to_the_fleet(options["routers"], options["redis_url"])
    found = {
        "name": options["name"] or model_dir.resolve().name,
        "decode_graph": {"auto": None, "on": True, "off": False}[options["decode_graph"]],
        "worker_id": options["worker_id"] or f"{socket.gethostname()}/{listen}",
        "advertise": options["advertise"] or advertised_address(listen, way),
    }
    return WorkerConfig(**{**options, **found, "model_dir": model_dir, "kv_cache_bytes": kv_cache_bytes})


def main() -> None:
    """Run the command; exit status 2 and one sentence on standard error if what was asked cannot be done."""
    try:
        command.main(prog_name="headrace worker", standalone_mode=False)
    except click.ClickException as error:
        click.echo(f"error: {error.format_message()}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
