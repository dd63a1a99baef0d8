"""Puts an engine together: block pool, KV cache, scheduler, model runner and sampler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial

from headrace.worker.engine.engine import Engine, ModelRunner
from headrace.worker.engine.isolation import Sampler
from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.engine.step_cost import StepCosts, StepShape
from headrace.worker.kv.block_pool import BlockPool, Journal
from headrace.worker.kv.manager import KVCacheManager
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.speculation.controller import StepLine
from headrace.worker.speculation.speculation import Speculation


def build_engine(
    runner: ModelRunner,
    sampler: Sampler,
    num_blocks: int,
    limits: StepLimits,
    *,
    target_step_ms: float | None = None,
    step_costs: StepCosts | None = None,
    journal: Journal | None = None,
    speculation: str = "off",
) -> Engine:
    """An engine with an empty KV cache. The runner has allocated `num_blocks` blocks. See `build_scheduler`.

    `speculation` is "off", "auto" (as many draft tokens as pay) or "ngram" (drafts of a fixed length).
    """
    scheduler = build_scheduler(
        num_blocks,
        runner.block_size,
        limits,
        target_step_ms=target_step_ms,
        step_costs=step_costs,
        journal=journal,
    )
    if speculation != "off":
        scheduler.speculation = Speculation(
            sampler,
            partial(_step_line, scheduler.step_costs) if speculation == "auto" else None,
            most_tokens=limits.max_num_mixed_tokens,
            small_decode=runner.small_decode,
            most_ms=math.inf if target_step_ms is None else target_step_ms,
        )
    return Engine(scheduler, runner, sampler)


def build_scheduler(
    num_blocks: int,
    block_size: int,
    limits: StepLimits,
    *,
    target_step_ms: float | None = None,
    step_costs: StepCosts | None = None,
    clock: Callable[[], float] = time.monotonic,
    journal: Journal | None = None,
) -> Scheduler:
    """A scheduler without requests, over a KV cache of `num_blocks` blocks of `block_size` tokens.

    `target_step_ms` is the longest time between two tokens of a stream; None lets the worker choose. `step_costs` is
    what is known of steps so far. `journal` is told what blocks hold. ValueError if the limits leave prompts no room
    beside a full batch.
    """
    return Scheduler(
        KVCacheManager(BlockPool(num_blocks, block_size, journal)),
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_num_mixed_tokens,
        target_step_ms=target_step_ms,
        step_costs=StepCosts() if step_costs is None else step_costs,
        clock=clock,
    )


def _step_line(costs: StepCosts, contexts: Sequence[int]) -> StepLine | None:
    """The cost of decode steps with these contexts; None while too little is known."""
    model, count = costs.decode, len(contexts)
    if not model.is_learned:
        return None
    streams = [(past, 1) for past in contexts]
    base_ms = model.predict_ms(StepShape.of(streams))
    with_one_ms = model.predict_ms(StepShape.of([*streams, (1 + sum(contexts) // count, 1)]))
    return StepLine(base_ms, with_one_ms - base_ms, model.change_ms)
