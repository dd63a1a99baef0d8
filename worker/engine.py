"""The heartbeat: schedule, build the batch, run the model, sample, account for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.protos.status import Reason, StatusError
from headrace.worker.batch import Batch, PromptRows, build_batch, padded
from headrace.worker.logits import Logits
from headrace.worker.padding import Padding
from headrace.worker.request import Request, RequestOutput, StepNote, TokenLogprobs
from headrace.worker.scheduler import Sampled, Scheduler, SchedulerOutput, SchedulerStats
from headrace.worker.step_cost import StepCostModel, StepShape

log = logging.getLogger(__name__)

# Steps that are noted of a traced request; a longer answer says nothing new.
MAX_NOTED_STEPS = 128


class ModelRunner(Protocol):
    """Computes a step. The real one is OpenVINO; tests have one that stores token ids. `infer_s` is the time that the
    last step spent in the kernels, in seconds."""

    infer_s: float

    def execute(self, batch: Batch) -> Logits:
        """Logits `[rows, vocab_size]`, rows as the batch says, valid until the next call. Updates the KV cache."""
        ...


class Sampler(Protocol):
    """Chooses tokens."""

    def sample(self, requests: Sequence[Request], logits: Logits) -> list[Sampled]:
        """The next token of each request from its row of `logits`."""
        ...

    def logprobs(self, logits: Logits, token_ids: Sequence[int], num_top: int) -> Sequence[TokenLogprobs]:
        """For each row of `logits` the log-probability and rank of its token, and the `num_top` best."""
        ...


@dataclass(slots=True)
class EngineStats:
    """Totals of the engine's time, in seconds."""

    num_steps: int = 0
    infer_s: float = 0.0
    overhead_s: float = 0.0
    num_padding_tokens: int = 0


@dataclass(slots=True)
class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls everything.

    The runner's cache has one block more than the pool, the last, for what steps are padded with.
    """

    scheduler: Scheduler
    runner: ModelRunner
    sampler: Sampler
    stats: EngineStats = field(default_factory=EngineStats)
    padding: Padding = field(default_factory=Padding)

    def warm_up(self, request: Request) -> None:
        """Run a request to its end before any other, and leave no trace of it: the first step of a model costs a
        quarter of a second more than later ones."""
        self.scheduler.add(request)
        while self.scheduler.has_requests:
            self.step()
        pool = self.scheduler.kv_cache.pool
        pool.forget_all()
        pool.take_events()
        self.scheduler.stats = SchedulerStats()
        self.scheduler.step_cost = StepCostModel()
        self.stats = EngineStats()
        self.padding = Padding()

    def step(self) -> list[RequestOutput]:
        """Compute one step and give what it gave to each request. Whatever goes wrong in it ends its requests and
        leaves the engine as good as before."""
        start = time.perf_counter()
        output = self.scheduler.schedule()
        if not output.scheduled:
            return []
        is_traced = self.scheduler.num_traced > 0
        num_padding = self.padding.of(output.num_tokens, self.scheduler.step_cost.token_ms)
        is_decode = output.num_tokens == len(output.scheduled)
        # Runs of decode steps are alike: one in four says enough.
        shape = None
        if not is_decode or self.stats.num_steps % 4 == 0:
            shape = StepShape.of((request.num_computed_tokens, new) for request, new in output.scheduled)
            shape = shape._replace(tokens=shape.tokens + num_padding)
        try:
            batch = build_batch(output.scheduled, self.scheduler.kv_cache.block_size, output.copies)
            if num_padding:
                batch = padded(batch, num_padding, self.scheduler.kv_cache.pool.num_blocks)
            logits = self.runner.execute(batch)
            num_sampled = len(batch.sampled)
            if batch.prompts:
                read_prompts(batch.prompts, logits.part(slice(num_sampled, None)), self.sampler)
                logits = logits.part(slice(num_sampled))
            outputs = self.scheduler.update(output, self.sampler.sample(batch.sampled, logits))
        except Exception as error:
            log.exception("a step of %d requests failed", len(output.scheduled))
            return self.scheduler.fail([request for request, _ in output.scheduled], _step_error(error))
        step_s = time.perf_counter() - start
        self.padding.observe(1000 * step_s, is_decode=is_decode)
        if shape is not None:
            change_ms = self.padding.change_ms if self.padding.changed else 0.0
            self.scheduler.step_cost.observe(shape, 1000 * step_s - change_ms)
        self.stats.num_steps += 1
        self.stats.num_padding_tokens += num_padding
        self.stats.infer_s += self.runner.infer_s
        self.stats.overhead_s += step_s - self.runner.infer_s
        if is_traced:
            note_step(output, step_s)
        return outputs


def note_step(output: SchedulerOutput, step_s: float) -> None:
    """Note the step that has just ended with those of its requests that are traced."""
    start_s = time.monotonic() - step_s
    for request, num_tokens in output.scheduled:
        if request.steps is not None and len(request.steps) < MAX_NOTED_STEPS:
            request.steps.append(StepNote(start_s, step_s, num_tokens, output.num_tokens, len(output.scheduled)))


def read_prompts(prompts: Sequence[PromptRows], logits: Logits, sampler: Sampler) -> None:
    """Note the log-probabilities of prompt tokens, each read from the row of the token before it."""
    first = 0
    for request, position, num_rows in prompts:
        num_top = request.sampling.num_prompt_logprobs
        assert num_top is not None
        # A prompt that was preempted is computed again from its start.
        num_known = min(max(0, len(request.prompt_logprobs) - position), num_rows)
        token_ids = request.token_ids[position + num_known + 1 : position + num_rows + 1]
        if token_ids:
            request.prompt_logprobs += sampler.logprobs(
                logits.part(slice(first + num_known, first + num_rows)), token_ids, num_top
            )
        first += num_rows


def _step_error(error: Exception) -> StatusError:
    if isinstance(error, MemoryError):
        return StatusError(Reason.NO_CAPACITY, "the worker ran out of memory in a step", retry_after_s=1.0)
    return StatusError(Reason.INTERNAL, f"a step of the engine failed: {type(error).__name__}")
