"""The heartbeat: schedule, build the batch, run the model, sample, account for it.

What does not decide the next step is done while the kernels compute it, in another thread, for they leave the GIL free:
log-probabilities of the tokens before, their delivery, and what can be prepared for sampling.

    schedule, build, bind  ->  kernels                        ->  sample, account for it
                               deliver what the step before
                               gave; plan the sampling
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from msgspec.structs import replace

from headrace.protos.status import Reason, StatusError
from headrace.worker.batch import Batch, PromptRows, build_batch, padded
from headrace.worker.logits import Logits
from headrace.worker.padding import Padding
from headrace.worker.request import Request, RequestOutput, RequestState, StepNote, TokenLogprobs
from headrace.worker.sampler import Plan
from headrace.worker.scheduler import Sampled, Scheduler, SchedulerOutput, SchedulerStats
from headrace.worker.step_cost import StepCostModel, StepShape

log = logging.getLogger(__name__)

Deliver = Callable[[list[RequestOutput]], None]

# Steps that are noted of a traced request; a longer answer says nothing new.
MAX_NOTED_STEPS = 128


class ModelRunner(Protocol):
    """Computes a step. The real one is OpenVINO; tests have one that stores token ids. `infer_s` is the time that the
    last step spent in the kernels, in seconds. Decode steps of up to `small_decode` sequences go through a graph of
    their own; 0: none do."""

    vocab_size: int
    infer_s: float
    small_decode: int

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Take a step in. `keeps_logits`: those of the step before stay valid while it runs."""
        ...

    def run(self) -> Logits:
        """Compute it, which updates the KV cache: logits `[rows, vocab_size]`, rows as the batch says."""
        ...


class Sampler(Protocol):
    """Chooses tokens."""

    def plan(self, requests: Sequence[Request], vocab_size: int) -> Plan | None:
        """What can be known of how the requests are to be sampled before there are logits."""
        ...

    def sample(self, requests: Sequence[Request], logits: Logits, plan: Plan | None) -> list[Sampled]:
        """The next token of each request from its row of `logits`, as planned."""
        ...

    def logprobs(
        self, requests: Sequence[Request], logits: Logits, sampled: Sequence[Sampled]
    ) -> list[TokenLogprobs | None]:
        """Log-probabilities with which what was sampled came out of `logits`, of those requests that want them."""
        ...

    def prompt_logprobs(self, logits: Logits, token_ids: Sequence[int], num_top: int) -> Sequence[TokenLogprobs]:
        """For each row of `logits` the log-probability and rank of its token, and the `num_top` best."""
        ...


@dataclass(slots=True)
class EngineStats:
    """Totals of the engine's time, in seconds."""

    num_steps: int = 0
    infer_s: float = 0.0
    overhead_s: float = 0.0
    num_padding_tokens: int = 0


class _Step(NamedTuple):
    """A step that is computed. `shape` is what its cost is learned for, if it has prompts."""

    output: SchedulerOutput
    batch: Batch
    padding: Padding
    num_padding: int
    shape: StepShape | None
    start_s: float

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self.output.scheduled]


class _Late(NamedTuple):
    """What was sampled from logits whose log-probabilities are still to be read."""

    requests: Sequence[Request]
    logits: Logits
    sampled: Sequence[Sampled]


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
    small_padding: Padding = field(default_factory=Padding)
    _is_computing: bool = False
    _outputs: list[RequestOutput] = field(default_factory=list)
    _late: _Late | None = None
    _failed: set[Request] = field(default_factory=set)
    _seen_counts: set[tuple[int, int]] = field(default_factory=set)
    _beside: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "beside-engine"))

    @property
    def has_outputs(self) -> bool:
        """Whether there is something to deliver."""
        return bool(self._outputs)

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
        self.padding, self.small_padding = Padding(), Padding()

    def step(self) -> list[RequestOutput]:
        """Compute the next step and give what it gave to each request."""
        outputs: list[RequestOutput] = []
        self.advance(outputs.extend)
        return outputs + self._take_outputs()

    def advance(self, deliver: Deliver) -> bool:
        """Compute the next step if there is one, and tell whether there was. While the kernels run, deliver what the
        step before gave. Whatever goes wrong in a step ends its requests and leaves the engine as good as before."""
        start_s = time.perf_counter()
        output = self.scheduler.schedule()
        if not output.scheduled:
            deliver(self._take_outputs())
            return False
        try:
            step = self._prepare(output, start_s)
        except Exception as error:
            deliver(self._take_outputs())
            self._outputs += self._fail([request for request, _ in output.scheduled], error)
            return True
        is_traced = self.scheduler.num_traced > 0
        self._is_computing = True
        try:
            outputs = self._compute(step, deliver)
        except Exception as error:
            outputs = self._fail(step.requests, error)
        else:
            step_s = time.perf_counter() - step.start_s
            self._observe(step, step_s)
            if is_traced:
                note_step(step.output, step_s)
        self._is_computing = False
        if self._failed:
            outputs = [output for output in outputs if output.request not in self._failed]
            self._end_failed()
        self._outputs += outputs
        return True

    def _prepare(self, output: SchedulerOutput, start_s: float) -> _Step:
        # Each graph keeps its own count.
        is_small = output.is_decode and output.num_tokens <= self.runner.small_decode
        padding = self.small_padding if is_small else self.padding
        num_padding = padding.of(output.num_tokens, is_decode=output.is_decode)
        shape = None
        if not output.is_decode:
            step = ((request.num_computed_tokens, new) for request, new in output.scheduled)
            shape = StepShape.of(step, padding=num_padding)
        batch = build_batch(output.scheduled, self.scheduler.kv_cache.block_size, output.copies)
        if num_padding:
            batch = padded(batch, num_padding, self.scheduler.kv_cache.pool.num_blocks)
        self.runner.bind(batch, keeps_logits=self._late is not None)
        return _Step(output, batch, padding, num_padding, shape, start_s)

    def _compute(self, step: _Step, deliver: Deliver) -> list[RequestOutput]:
        batch = step.batch
        requests = batch.sampled
        if self._late is None and all(request.sampling.is_plain for request in requests):
            # Nothing that is worth waking a thread.
            deliver(self._take_outputs())
            plan, logits = None, self.runner.run()
        else:
            beside = self._beside.submit(self._deliver_and_plan, deliver, requests)
            try:
                logits = self.runner.run()
            finally:
                plan = beside.result()
        if batch.prompts:
            read_prompts(batch.prompts, logits.part(slice(len(requests), None)), self.sampler)
            logits = logits.part(slice(len(requests)))
        sampled = self.sampler.sample(requests, logits, plan)
        if any(request.sampling.num_logprobs is not None for request in requests):
            self._late = _Late(requests, logits, sampled)
        return self.scheduler.update(step.output, sampled)

    def _deliver_and_plan(self, deliver: Deliver, requests: Sequence[Request]) -> Plan | None:
        deliver(self._take_outputs())
        return self.sampler.plan(requests, self.runner.vocab_size)

    def _take_outputs(self) -> list[RequestOutput]:
        """What the steps before gave to each request. Log-probabilities are only read now."""
        outputs, self._outputs = self._outputs, []
        late, self._late = self._late, None
        if late is None:
            return outputs
        try:
            entries = dict(zip(late.requests, self.sampler.logprobs(*late), strict=True))
        except Exception as error:
            return self._without_logprobs(outputs, error)
        return [
            replace(output, logprobs=(entry,))
            if (entry := entries.get(output.request)) and output.token_ids
            else output
            for output in outputs
        ]

    def _observe(self, step: _Step, step_s: float) -> None:
        padding = step.padding
        padding.observe(1000 * step_s, is_decode=step.output.is_decode)
        # The first step with a number of tokens builds kernels for it, which says nothing of others.
        count = (id(padding), step.output.num_tokens + step.num_padding)
        is_first = count not in self._seen_counts
        self._seen_counts.add(count)
        if step.shape is not None and not is_first:
            self.scheduler.step_cost.observe(step.shape, 1000 * step_s - padding.changed_ms)
        self.stats.num_steps += 1
        self.stats.num_padding_tokens += step.num_padding
        self.stats.infer_s += self.runner.infer_s
        self.stats.overhead_s += step_s - self.runner.infer_s

    def _fail(self, requests: Sequence[Request], error: Exception) -> list[RequestOutput]:
        log.error("a step of %d requests failed", len(requests), exc_info=error)
        return self.scheduler.fail(requests, _step_error(error))

    def _without_logprobs(self, outputs: Sequence[RequestOutput], error: Exception) -> list[RequestOutput]:
        """Errors instead of the outputs that miss their log-probabilities. If a step is being computed, their requests
        end with it, for they are in it."""
        log.error("log-probabilities of a step could not be read", exc_info=error)
        status = _step_error(error)
        given = []
        for output in outputs:
            request = output.request
            if request.sampling.num_logprobs is None or output.error is not None:
                given.append(output)
                continue
            given.append(RequestOutput(request, output.start_pos, (), error=status))
            if request.state is not RequestState.FINISHED:
                self._failed.add(request)
        if not self._is_computing:
            self._end_failed()
        return given

    def _end_failed(self) -> None:
        """End the requests that were told that they have failed."""
        self.scheduler.fail(self._failed, _ENDED)
        self._failed.clear()


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
            request.prompt_logprobs += sampler.prompt_logprobs(
                logits.part(slice(first + num_known, first + num_rows)), token_ids, num_top
            )
        first += num_rows


# Ends requests whose error was given before.
_ENDED = StatusError(Reason.INTERNAL, "the request has failed")


def _step_error(error: Exception) -> StatusError:
    if isinstance(error, MemoryError):
        return StatusError(Reason.NO_CAPACITY, "the worker ran out of memory in a step", retry_after_s=1.0)
    return StatusError(Reason.INTERNAL, f"a step of the engine failed: {type(error).__name__}")
