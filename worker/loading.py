"""Loads a model: reads and compiles it, allocates the KV cache, builds the engine and warms it up."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.common.host_memory import GIB, available_bytes
from headrace.common.load_stages import LoadStage, line_of
from headrace.common.model_files.networks import weights_in
from headrace.common.threads import in_thread
from headrace.common.transport.channels import PLAIN, Transport
from headrace.protos import worker_pb2
from headrace.protos.inference_pb2 import CacheEviction
from headrace.worker.adapters.files import AdapterError
from headrace.worker.adapters.library import AdapterLibrary
from headrace.worker.adapters.reader import Layers
from headrace.worker.adapters.reader_process import ReaderProcess
from headrace.worker.allocation import Allocation, allocate, kept_bytes
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.engine.build import Draft, build_engine
from headrace.worker.engine.encoding import Encoding
from headrace.worker.engine.engine import Engine
from headrace.worker.engine.fetching import Fetching, without_images
from headrace.worker.engine.mailbox import Mailbox
from headrace.worker.engine.stages import Stages
from headrace.worker.engine.step_cost import ONE_STREAM, WARM_UP_TOKENS
from headrace.worker.engine.step_meter import StepLog
from headrace.worker.engine.thread import EngineThread
from headrace.worker.engine.watchdog import end_process
from headrace.worker.host.advertise import name_on_host
from headrace.worker.host.binding import RankReport, Region, StageReport
from headrace.worker.host.mapped_files import give_back, private_bytes
from headrace.worker.host.numa import num_threads_for
from headrace.worker.kv.beams import MAX_BEAMS, BeamLimits
from headrace.worker.kv.chain import Content
from headrace.worker.kv.disk_cipher import read_key
from headrace.worker.kv.disk_tier import DiskTier
from headrace.worker.kv.exclusions import refuse_flags, refuse_for_model
from headrace.worker.kv.fetch import Bell, Persistence
from headrace.worker.kv.host_memory import HostMemory
from headrace.worker.kv.kept_cache import KeptCache
from headrace.worker.kv.memory import kv_cache_budget
from headrace.worker.model.decode_graph import has_amx, wants_decode_graph
from headrace.worker.model.directory import ModelDir, read_model_dir
from headrace.worker.model.fingerprint import fingerprint_of, for_context, for_ranks, for_stages
from headrace.worker.model.step_limits import DEFAULT_TOKENS, StepLimits, step_limits
from headrace.worker.model_card import card_of
from headrace.worker.peers.handover import Handover
from headrace.worker.request.eviction_rules import add_rule, eviction_of
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.load import (
    kind_of_drafts,
    load_draft,
    read_heads,
    speculation_for,
    tree_for,
    weights_of_draft,
)
from headrace.worker.speculation.tree import TreeShape
from headrace.worker.tiers import NO_TIERS, Tiers, kv_layout, open_disk, tiers_for
from headrace.worker.vision.load import Vision, vision_for
from headrace.worker.weights.file_memory import give_back_files

if TYPE_CHECKING:
    from headrace.worker.draft_heads.eagle_runner import EagleHeads, EagleRunner
    from headrace.worker.draft_heads.medusa_runner import MedusaHeads, MedusaRunner
    from headrace.worker.model.runner import OpenVINOModelRunner
    from headrace.worker.pipeline.link import Others

log = logging.getLogger("headrace.worker")
# Steps of the draft model after each prompt of the warm-up.
_DRAFT_STEPS = 4


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to serve."""

    engine: Engine
    card: worker_pb2.ModelCard
    tokenizer_bundle: bytes
    kv_cache: Region
    max_num_seqs: int
    kept: KeptCache | None = None
    tiers: Tiers = NO_TIERS
    adapters: AdapterLibrary | None = None
    bell: Bell = field(default_factory=Bell)
    """Wakes the engine's thread when tiers have brought blocks, or images are encoded."""
    vision: Vision | None = None
    """None if it serves text only."""
    ranks: Callable[[], Sequence[RankReport]] = tuple
    """Reads the ranks of a divided model; none for a whole one."""
    stages: Callable[[], Sequence[StageReport]] = tuple
    """Reads the stages of a pipeline; none for a model whose layers are all here."""

    @property
    def handover(self) -> Handover | None:
        """Exchanges blocks with other workers; None if it does not."""
        return self.tiers.handover

    @property
    def locate(self) -> Callable[[int], tuple[int, Content] | None]:
        """Returns the function that finds a block of the prefix cache and its content by its hash; see
        `KVCache.locate`."""
        return self.engine.scheduler.kv_cache.locate

    @property
    def beams(self) -> BeamLimits | None:
        """The bounds of beam searches; None if the model takes none."""
        cache = self.engine.scheduler.kv_cache
        width = min(self.max_num_seqs, MAX_BEAMS)
        return BeamLimits(width, cache.num_blocks, cache.block_size) if cache.takes_beams else None

    def close(self) -> None:
        """End the threads and processes of the model, except the engine thread."""
        self.tiers.stop()
        if self.vision is not None:
            self.vision.encoder.close()

    def make_thread(self, mailbox: Mailbox, max_wait_s: float) -> EngineThread:
        """The thread that serves the mailbox. From now on, it can use blocks on the disk and of other workers."""
        self.tiers.start()
        scheduler, tiers, vision = self.engine.scheduler, self.tiers, self.vision
        encoding = None if vision is None else Encoding(scheduler, vision.encoder, vision.store, max_wait_s=max_wait_s)
        fetching = None
        if tiers.disk is not None or tiers.peers is not None:
            fetching = Fetching(
                scheduler,
                tiers.disk,
                tiers.peers,
                takeover=tiers.takeover,
                source=None if tiers.handover is None else tiers.handover.source,
                encode_s=without_images if encoding is None else encoding.spared_s,
            )
        stages = Stages([stage for stage in (fetching, encoding) if stage is not None])
        return EngineThread(self.engine, mailbox, max_wait_s=max_wait_s, stages=stages)


def load_model(
    config: WorkerConfig,
    memory: HostMemory | None = None,
    transport: Transport = PLAIN,
    offers: Others | None = None,
) -> LoadedModel:
    """Make a model ready to serve. This takes seconds to minutes. With `memory`, the KV cache is in that memory and
    keeps the blocks of the previous process. `transport` is for calls to other workers, and `offers` are the other
    stages of a pipeline, unless the flags name them.

    ConfigurationError if the directory holds no model that can be served, or if it does not fit this host.
    """
    bell = Bell()
    start = time.monotonic()
    found = read_files(config, memory)
    log.info(line_of(LoadStage.COMPILING))
    compiled = compile_all(config, found, transport, offers)
    opening = in_thread("vision", lambda: vision_for(config, compiled.runner.image_inputs, found.threads, bell.ring))
    log.info(line_of(LoadStage.HASHING))
    allocation = allocate(config, compiled.runner, compiled.limits, found.kept, compiled.draft)
    log_loaded(config.name, compiled.runner, allocation, found.threads, time.monotonic() - start)
    touching = in_thread("touch", compiled.runner.touch)
    fingerprint = wait_for_fingerprint(found, compiled.runner)
    layout = kv_layout(compiled.runner, allocation.limits, fingerprint)
    disk = open_disk(config, compiled.runner, layout, found.disk_key, bell)
    engine = make_engine(config, found, compiled, allocation, disk)
    log.info(line_of(LoadStage.WARMING))
    warm_up(engine, has_adapters=config.max_adapters > 0)
    adapters = load_adapters(config, compiled.runner)
    touching.result()
    compiled.runner.end_warm_up()
    give_back_weights(config)
    kv_cache = engine.scheduler.kv_cache
    if allocation.kept is not None:
        allocation.kept.restore(kv_cache, fingerprint)
    tiers = tiers_for(config, compiled.runner, layout, kv_cache, disk, allocation.kept, transport, bell)
    card = card_of(config, kv_cache, found.model_dir, fingerprint, compiled.runner, allocation.groups, tiers)
    add_rule(card, found.rule, found.longest)
    vision = opening.result()
    if vision is not None:
        card.images.CopyFrom(vision.limits)
    return LoadedModel(
        engine,
        card,
        found.model_dir.tokenizer_bundle,
        allocation.region,
        allocation.limits.max_num_seqs,
        allocation.kept,
        tiers,
        adapters,
        bell,
        vision,
        compiled.runner.ranks,
        compiled.runner.stages,
    )


class Found(NamedTuple):
    """The results of reading a model's files, before it is compiled. `longest` is the longest context in tokens, `rule`
    the rule of --cache-eviction, and `speculation` the kind of drafts, in trees of the shape `tree` unless that is
    None. `hashing` computes the fingerprint of the model's files."""

    threads: int
    model_dir: ModelDir
    longest: int
    rule: CacheEviction | None
    disk_key: bytes | None
    speculation: str
    heads: EagleHeads | MedusaHeads | None
    tree: TreeShape | None
    kept: KeptCache | None
    hashing: Future[str]


class Compiled(NamedTuple):
    """The compiled model, the limits of its steps, and the model or heads that propose drafts, if any."""

    runner: OpenVINOModelRunner
    limits: StepLimits
    draft: OpenVINOModelRunner | EagleRunner | MedusaRunner | None


def read_files(config: WorkerConfig, memory: HostMemory | None) -> Found:
    """Check flags, files and memory, as far as this is quick. Start the slow work that runs beside the compilation:
    hashing the model, and checking the blocks of the previous process. ConfigurationError."""
    threads = num_threads_for(config.threads)
    model_dir = read_model_dir(config.model_dir)
    check_memory(config, memory.resident_bytes if memory is not None else 0)
    disk_key = None if config.kv_disk_key is None else read_key(config.kv_disk_key)
    kept = None if memory is None else KeptCache(memory, threads, huge_pages=config.huge_pages)
    hashing = in_thread("fingerprint", partial(fingerprint_of, config.model_dir, threads))
    rule = eviction_of(config)
    refuse_flags(config)
    speculation = speculation_for(config, with_amx=has_amx())
    tree = tree_for(config, speculation)
    heads = read_heads(config.draft_model, speculation, tree)
    longest = config.max_context_tokens or model_dir.max_context_tokens
    return Found(threads, model_dir, longest, rule, disk_key, speculation, heads, tree, kept, hashing)


def compile_all(config: WorkerConfig, found: Found, transport: Transport, offers: Others | None) -> Compiled:
    """Compile the model, and the smaller model or the heads. ConfigurationError."""
    speculates, heads = found.speculation != "off", found.heads
    if config.pipeline > 1:
        runner = compile_pipeline(config, found, transport, offers, speculates=speculates)
    else:
        runner = compile_model(config, found.threads, found.longest, found.kept, speculates=speculates, heads=heads)
    limits = step_limits(
        config.max_num_seqs, config.max_num_batched_tokens, config.max_num_mixed_tokens, exact_rows=runner.exact_rows
    )
    refuse_for_model(config, runner.layer_groups)
    draft = load_draft(config.draft_model, runner, config.model_dir, heads, threads=found.threads)
    return Compiled(runner, limits, draft)


def make_engine(
    config: WorkerConfig, found: Found, compiled: Compiled, allocation: Allocation, disk: DiskTier | None
) -> Engine:
    """The engine over the allocated cache, which spills to `disk`. The warm-up then uses blocks without content
    first."""
    log_limits(allocation.limits, compiled.runner.exact_rows)
    engine = build_engine(
        compiled.runner,
        sampler_for(compiled.runner, found.threads),
        allocation.num_blocks,
        allocation.limits,
        target_step_ms=config.target_tpot_ms,
        persistence=persistence_of(allocation.kept, disk),
        speculation=found.speculation,
        draft=draft_of(compiled.draft, found.heads, found.threads, found.tree),
        groups=allocation.groups,
        step_log=opened_step_log(config),
        steps_at_once=compiled.runner.num_stages,
    )
    if allocation.kept is not None:
        engine.scheduler.kv_cache.take_last(allocation.kept.old_blocks(), allocation.kept.old_slots())
    return engine


def persistence_of(kept: KeptCache | None, disk: DiskTier | None) -> Persistence:
    """The persistence of the cache: the memory that outlives the process, and the disk. Each may be None."""
    if kept is None:
        return Persistence(spill=disk)
    return Persistence(kept.journal, kept.part_journal, disk)


def wait_for_fingerprint(found: Found, runner: OpenVINOModelRunner) -> str:
    """The fingerprint of the model in hex, which other threads compute beside the compilation. It includes the context
    if answers depend on it."""
    fingerprint = found.hashing.result()
    if runner.depends_on_context:
        fingerprint = for_context(fingerprint, found.longest)
    if runner.num_stages > 1:
        return for_stages(fingerprint, runner.ranks_of_stages, bfloat16_states=runner.bfloat16_states)
    return for_ranks(fingerprint, runner.num_ranks) if runner.num_ranks > 1 else fingerprint


def draft_of(
    runner: OpenVINOModelRunner | EagleRunner | MedusaRunner | None,
    heads: EagleHeads | MedusaHeads | None,
    threads: int,
    tree: TreeShape | None,
) -> Draft | None:
    """The model or heads that propose tokens, with trees of a shape or without branches. None if there are none."""
    if runner is None:
        return None
    from headrace.worker.draft_heads.eagle_runner import EagleRunner

    on_take = runner.store.forget if isinstance(runner, EagleRunner) else None
    return Draft(runner, sampler_for(runner, threads), kind=kind_of_drafts(heads, tree), on_take=on_take)


def sampler_for(runner: OpenVINOModelRunner | EagleRunner | MedusaRunner, threads: int) -> BatchSampler:
    """A sampler for the model's vocabulary, which reduces logits on up to `threads` threads."""
    # Importing OpenVINO is slow, so refuse a wrong directory first.
    from headrace.worker.sampling.row_sums import reducer_for

    return BatchSampler(reducer_for(runner.vocab_size, threads))


def load_adapters(config: WorkerConfig, runner: OpenVINOModelRunner) -> AdapterLibrary | None:
    """Load the adapters that the flags name. Returns None if the worker serves without adapters. Raises
    ConfigurationError if an adapter cannot be loaded."""
    if runner.adapters is None:
        return None
    log.info(line_of(LoadStage.ADAPTERS))
    start = time.monotonic()
    library = AdapterLibrary(runner, ReaderProcess(Layers(runner.linears, runner.num_kv_heads), runner.adapters))
    for name, path in config.adapters:
        try:
            library.load_now(name, path)
        except AdapterError as error:
            raise ConfigurationError(f"--adapter {name}={path}: {error}") from error
    log.info(
        "%d adapters in %.2f s, %d fit into memory (%.1f MiB each at rank %d)",
        len(config.adapters),
        time.monotonic() - start,
        library.num_slots,
        runner.adapters.slot_bytes / (1 << 20),
        runner.adapters.rank,
    )
    return library


def log_loaded(name: str, runner: OpenVINOModelRunner, allocation: Allocation, threads: int, took_s: float) -> None:
    """Log that the model is loaded, and the size of its KV cache."""
    log.info(
        "%s loaded in %.1f s: %d threads, %s, KV cache %.2f GiB of %s, %d blocks of %d tokens",
        name,
        took_s,
        threads,
        "a second graph for small decode steps" if runner.small_decode else "one graph",
        allocation.region.size_bytes / GIB,
        runner.kv_precision,
        allocation.num_blocks,
        runner.block_size,
    )


def check_memory(config: WorkerConfig, kept_bytes: int = 0) -> None:
    """Raise ConfigurationError before loading if the requested KV cache cannot fit beside the weights. The cache
    already occupies `kept_bytes` of memory."""
    if config.kv_cache_bytes is not None:
        weights = sum(path.stat().st_size for path in _weights_of(config) if path.is_file()) // config.pipeline
        kv_cache_budget(config.kv_cache_bytes, config.kv_cache_share, available_bytes() + kept_bytes - weights)


def _weights_of(config: WorkerConfig) -> list[Path]:
    of_draft = [] if config.draft_model is None else weights_of_draft(config.draft_model)
    return [*weights_in(config.model_dir), *of_draft]


def compile_model(
    config: WorkerConfig,
    threads: int,
    max_context_tokens: int,
    kept: KeptCache | None,
    *,
    speculates: bool,
    heads: EagleHeads | MedusaHeads | None = None,
) -> OpenVINOModelRunner:
    """Read and compile the model for contexts of up to `max_context_tokens`. It gets a second graph for small decode
    steps if that pays on this CPU."""
    if config.rank_cpus:
        return compile_ranks(config, threads, max_context_tokens, speculates=speculates, heads=heads)
    from headrace.worker.model.runner import OpenVINOModelRunner

    has_decode_graph = wants_decode_graph(
        config.decode_graph,
        config.model_dir,
        kv_precision=config.kv_precision,
        execution_mode=config.execution_mode,
        available=available_bytes() + kept_bytes(kept),
    )
    return OpenVINOModelRunner(
        config.model_dir,
        threads=threads,
        kv_precision=config.kv_precision,
        execution_mode=config.execution_mode,
        decode_graph=has_decode_graph,
        max_context_tokens=max_context_tokens,
        max_adapters=config.max_adapters,
        speculates=speculates,
        states=None if heads is None else heads.reader,
        evicts=config.cache_eviction is not None,
        has_parts=config.trims_windows,
    )


def compile_ranks(
    config: WorkerConfig,
    threads: int,
    max_context_tokens: int,
    *,
    speculates: bool,
    heads: EagleHeads | MedusaHeads | None,
) -> OpenVINOModelRunner:
    """Read and compile the model, divided among the ranks. Each rank except this one gets its own process."""
    from headrace.worker.ranks.group import GroupRunner

    return GroupRunner(
        config.model_dir,
        config.rank_cpus,
        threads=threads,
        kv_precision=config.kv_precision,
        execution_mode=config.execution_mode,
        max_context_tokens=max_context_tokens,
        speculates=speculates,
        has_parts=config.trims_windows,
        max_adapters=config.max_adapters,
        states=None if heads is None else heads.reader,
        most_tokens=config.max_num_batched_tokens or DEFAULT_TOKENS,
        hangs_after_s=config.stuck_after_s,
        on_lost=end_process,
    )


def compile_pipeline(
    config: WorkerConfig, found: Found, transport: Transport, offers: Others | None, *, speculates: bool
) -> OpenVINOModelRunner:
    """Read and compile the model, whose layers are divided among this process, or its ranks, and those of other
    stages."""
    from headrace.worker.pipeline.link import NamedStages, StageLink
    from headrace.worker.pipeline.runner import PipelineRunner
    from headrace.worker.ranks.staged import StagedGroupRunner

    link = StageLink(
        offers or NamedStages(config.stages),
        transport,
        end_process,
        name_on_host(config.worker_id),
        hangs_after_s=config.stuck_after_s,
    )
    asked: dict[str, Any] = {
        "threads": found.threads,
        "kv_precision": config.kv_precision,
        "execution_mode": config.execution_mode,
        "max_context_tokens": found.longest,
        "speculates": speculates,
        "fingerprint": found.hashing,
        "on_lost": end_process,
    }
    if not config.rank_cpus:
        return PipelineRunner(config.model_dir, config.pipeline, link, **asked)
    return StagedGroupRunner(
        config.model_dir,
        config.pipeline,
        link,
        config.rank_cpus,
        most_tokens=config.max_num_batched_tokens or DEFAULT_TOKENS,
        hangs_after_s=config.stuck_after_s,
        **asked,
    )


def opened_step_log(config: WorkerConfig) -> StepLog | None:
    """The log of steps; None without one. ConfigurationError."""
    try:
        return None if config.step_log is None else StepLog(config.step_log, config.worker_id)
    except OSError as error:
        raise ConfigurationError(
            f"--step-log {config.step_log} cannot be written: {error.strerror}; name another file"
        ) from None


def log_limits(limits: StepLimits, exact_rows: int) -> None:
    """Log how large steps may be, and warn if prompts are not computed exactly in them."""
    sizes = limits.max_num_batched_tokens, limits.max_num_mixed_tokens, limits.max_num_seqs
    log.info("steps of up to %d tokens, %d with running streams; batches of up to %d requests", *sizes)
    if not limits.is_exact:
        log.warning(
            "prompts may not be exact: in steps of up to %d tokens, the low bits of keys, values and logits may depend "
            "on how a prompt is divided into chunks; on this CPU steps of up to %d tokens are exact "
            "(--max-num-batched-tokens)",
            limits.max_num_batched_tokens,
            exact_rows,
        )


def warm_up(engine: Engine, *, has_adapters: bool = False) -> None:
    """Run short requests, so that the first caller does not wait for one-time work. Run them again to learn the cost of
    steps."""
    kv_cache = engine.scheduler.kv_cache
    most = kv_cache.num_blocks * kv_cache.block_size - 2
    sampling = SamplingParams(max_tokens=2, seed=0, temperature=0.0)
    start = time.monotonic()
    for num_tokens in (*WARM_UP_TOKENS, *WARM_UP_TOKENS):
        engine.warm_up(Request("warm-up", [0] * min(num_tokens, most), sampling, 0))
    for num_tokens in WARM_UP_TOKENS if has_adapters else ():  # of a slot that is empty
        engine.warm_up(Request("warm-up", [0] * min(num_tokens, most), sampling, 0, adapter_slot=0))
    speculation = engine.scheduler.speculation
    if speculation is not None and speculation.model_drafts is not None:
        speculation.model_drafts.warm_up(WARM_UP_TOKENS, _DRAFT_STEPS)
    log.info(
        "warmed up in %.2f s: a step takes about %.0f ms, and %.2f ms more for each token of a prompt",
        time.monotonic() - start,
        engine.scheduler.step_costs.decode.predict_ms(ONE_STREAM),
        engine.scheduler.step_costs.prompts.token_ms,
    )


def give_back_weights(config: WorkerConfig) -> None:
    """Free the memory of files with weights. During the warm-up, OpenVINO has made its own copies in the layout of its
    kernels."""
    given_back = sum(give_back(path) for path in _weights_of(config))
    given_back += give_back_files()
    log.info(
        "the model takes %.2f GiB of memory beside its KV cache; %.2f GiB of weights in files were given back",
        private_bytes() / GIB,
        given_back / GIB,
    )
