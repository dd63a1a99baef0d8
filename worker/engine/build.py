"""Puts an engine together: KV cache, scheduler, model runner and sampler."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from headrace.worker.engine.engine import Engine, ModelRunner
from headrace.worker.engine.pipelined import PipelinedEngine
from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.engine.step_cost import StepCostModel, StepCosts, StepShape
from headrace.worker.engine.step_meter import StepLog
from headrace.worker.kv.cache import GroupBudget, KVCache
from headrace.worker.kv.fetch import NOT_PERSISTENT, Persistence
from headrace.worker.model.step_limits import StepLimits, max_logits_rows
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.controller import StepLine
from headrace.worker.speculation.draft_model import DraftModel, DraftRunner, DraftTimes
from headrace.worker.speculation.medusa import MedusaHeads
from headrace.worker.speculation.model_drafts import ModelDrafts
from headrace.worker.speculation.speculation import GrammarDrafts, SmallerModel, Speculation


class Draft(NamedTuple):
    """A smaller model, or heads, that propose tokens. The runner has allocated as many blocks as the target's."""

    runner: DraftRunner | MedusaHeads
    sampler: BatchSampler
    step_costs: StepCosts | None = None
    """The learned costs of its steps."""
    kind: Callable[[Any, BatchSampler, KVCache, DraftTimes, int], DraftModel] = DraftModel
    """Makes the object that drafts with such a runner."""
    on_take: Callable[[Sequence[int]], None] | None = None
    """Called with blocks whose content is about to change."""


class LearnedDraftTimes:
    """The learned costs of the smaller model's steps, which have at most `most_tokens` tokens."""

    def __init__(self, costs: StepCosts, most_tokens: int) -> None:
        self._costs = costs
        self._most_tokens = most_tokens
        self._seen: set[int] = set()
        self._size_before = 0

    def observe(self, sequences: Sequence[tuple[int, int]], padding: int, milliseconds: float) -> None:
        """See `DraftTimes`."""
        shape = StepShape.of(sequences, padding=padding)
        shape = shape._replace(changed=shape.tokens != self._size_before)
        self._size_before = shape.tokens
        self._costs.observe(shape, milliseconds, is_first=shape.tokens not in self._seen)
        self._seen.add(shape.tokens)

    def line(self, contexts: Sequence[int]) -> StepLine:
        """See `DraftTimes`."""
        return _line_of(self._costs.decode, contexts)

    def tokens_for(self, milliseconds: float, past: int) -> int:
        """See `DraftTimes`."""
        model = self._costs.prompts
        return min(model.tokens_for(milliseconds - model.step_ms, past), self._most_tokens)

    def prompt_ms(self, past: int, num_tokens: int) -> float:
        """See `DraftTimes`."""
        model = self._costs.prompts
        num_steps = -(-num_tokens // self._most_tokens)
        return num_steps * model.step_ms + model.chunk_ms(past, num_tokens)


def build_engine(
    runner: ModelRunner,
    sampler: BatchSampler,
    num_blocks: int,
    limits: StepLimits,
    *,
    target_step_ms: float | None = None,
    step_costs: StepCosts | None = None,
    persistence: Persistence = NOT_PERSISTENT,
    speculation: str = "off",
    draft: Draft | None = None,
    groups: Sequence[GroupBudget] = (),
    step_log: StepLog | None = None,
    steps_at_once: int = 1,
) -> Engine:
    """An engine with an empty KV cache. The runner has already allocated `num_blocks` blocks, and the memory of the
    `groups` of layers that have more than blocks. Each step is written to `step_log`, unless that is None. Up to
    `steps_at_once` steps are in the stages of a pipeline at a time. For the other parameters see `build_scheduler`.

    `speculation` is "off", "auto" (as many draft tokens as make the worker faster), "ngram" (drafts of a fixed length),
    or "draft", "eagle3", "medusa" or "mtp" (as "auto", with the smaller model or heads in `draft`).
    """
    costs = StepCosts() if step_costs is None else step_costs
    on_take = None if draft is None else draft.on_take
    kv_cache = KVCache(num_blocks, runner.block_size, groups, persistence, on_take)
    num_rows = max_logits_rows(runner.vocab_size)
    drafts = None
    if speculation != "off":
        drafts = build_speculation(
            costs,
            sampler,
            replace(limits, max_num_mixed_tokens=min(limits.max_num_mixed_tokens, limits.max_num_seqs + num_rows)),
            has_controller=speculation != "ngram",
            least_tokens=runner.least_decode,
            small_decode=runner.small_decode,
            target_step_ms=target_step_ms,
            model_drafts=None if draft is None else _drafts_of(draft, kv_cache, limits, runner.vocab_size, sampler),
        )
    scheduler = build_scheduler(
        kv_cache,
        limits,
        target_step_ms=target_step_ms,
        step_costs=costs,
        speculation=drafts,
        max_prompt_rows=num_rows,
        steps_at_once=steps_at_once,
    )
    kind = Engine if steps_at_once == 1 else PipelinedEngine
    return kind(scheduler, runner, sampler, step_log)


def _drafts_of(
    draft: Draft, kv_cache: KVCache, limits: StepLimits, vocab_size: int, sampler: BatchSampler
) -> ModelDrafts:
    times = LearnedDraftTimes(draft.step_costs or StepCosts(), limits.max_num_batched_tokens)
    return ModelDrafts(draft.kind(draft.runner, draft.sampler, kv_cache, times, vocab_size), sampler)


def build_speculation(
    step_costs: StepCosts,
    grammars: GrammarDrafts,
    limits: StepLimits,
    *,
    has_controller: bool = True,
    least_tokens: int = 1,
    small_decode: int = 0,
    target_step_ms: float | None = None,
    model_drafts: SmallerModel | None = None,
    looks_up: bool = True,
) -> Speculation:
    """Drafts for a scheduler that learns `step_costs`. Without a controller they have a fixed length. Steps have at
    least `least_tokens`. `model_drafts` are those of a smaller model. Without `looks_up`, earlier text is not
    proposed."""
    return Speculation(
        grammars,
        partial(_step_line, step_costs) if has_controller else None,
        least_tokens=least_tokens,
        most_tokens=limits.max_num_mixed_tokens,
        small_decode=small_decode,
        most_ms=math.inf if target_step_ms is None else target_step_ms,
        model_drafts=model_drafts,
        looks_up=looks_up,
    )


def build_scheduler(
    kv_cache: KVCache,
    limits: StepLimits,
    *,
    target_step_ms: float | None = None,
    step_costs: StepCosts | None = None,
    clock: Callable[[], float] = time.monotonic,
    speculation: Speculation | None = None,
    max_prompt_rows: int = sys.maxsize,
    steps_at_once: int = 1,
) -> Scheduler:
    """A scheduler without requests. `target_step_ms` is the longest time between two tokens of a stream; None lets the
    worker choose. `step_costs` has the learned costs of steps. ValueError if the limits leave no room for prompts
    beside a full batch.
    """
    return Scheduler(
        kv_cache,
        limits.max_num_seqs,
        limits.max_num_batched_tokens,
        limits.max_num_mixed_tokens,
        max_prompt_rows=max_prompt_rows,
        target_step_ms=target_step_ms,
        step_costs=StepCosts() if step_costs is None else step_costs,
        speculation=speculation,
        clock=clock,
        steps_at_once=steps_at_once,
    )


def _step_line(costs: StepCosts, contexts: Sequence[int]) -> StepLine | None:
    """The cost of decode steps with these contexts; None while too little is known."""
    return _line_of(costs.decode, contexts) if costs.decode.is_learned else None


def _line_of(model: StepCostModel, contexts: Sequence[int]) -> StepLine:
    count = len(contexts)
    streams = [(past, 1) for past in contexts]
    base_ms = model.predict_ms(StepShape.of(streams))
    with_one_ms = model.predict_ms(StepShape.of([*streams, (1 + sum(contexts) // count, 1)]))
    return StepLine(base_ms, with_one_ms - base_ms, model.change_ms)
