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
from headrace.worker.engine.isolation import NOT_PLANNED, IsolatedSampler, Planned, Sampler
from headrace.worker.engine.padding import Padding
from headrace.worker.engine.scheduler import Scheduler, SchedulerOutput, SchedulerStats
from headrace.worker.engine.step_cost import StepRates, StepShape
from headrace.worker.model.batch import Batch, build_batch, padded
from headrace.worker.request.request import Request, RequestState, StepNote
from headrace.worker.request.step import RequestOutput, Sampled
from headrace.worker.sampling.logits import Logits

log = logging.getLogger(__name__)

Deliver = Callable[[list[RequestOutput]], None]

# Steps that are noted of a traced request; a longer answer says nothing new.
MAX_NOTED_STEPS = 128
# The longest step of late is expected to come again; with each step it counts a thousandth less.
_FORGETTING = 0.999
# After so many failed steps in a row the engine counts as broken.
MAX_FAILED_STEPS = 8


class EngineFailedError(Exception):
    """The engine cannot compute steps any more. The text says why."""


class ModelRunner(Protocol):
    """Computes a step. The real one is OpenVINO; tests have one that stores token ids. `infer_s` is the time that the
    last step spent in the kernels, in seconds. Decode steps of up to `small_decode` sequences go through a graph of
    their own; 0: none do."""

    vocab_size: int
    block_size: int
    infer_s: float
    small_decode: int

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Take a step in. `keeps_logits`: those of the step before stay valid while it runs."""
        ...

    def run(self) -> Logits:
        """Compute it, which updates the KV cache: logits `[rows, vocab_size]`, rows as the batch says."""
        ...


@dataclass(slots=True)
class EngineStats:
    """Totals of the engine's time, in seconds."""

    num_steps: int = 0
    infer_s: float = 0.0
    overhead_s: float = 0.0
    num_padding_tokens: int = 0


class _Step(NamedTuple):
    """A step that is computed."""

    output: SchedulerOutput
    batch: Batch
    padding: Padding
    num_padding: int
    shape: StepShape
    start_s: float

    @property
    def requests(self) -> list[Request]:
        return [request for request, _ in self.output.scheduled]


class _Late(NamedTuple):
    """What was sampled from logits whose log-probabilities are still to be read."""

    requests: Sequence[Request]
    logits: Logits
    sampled: Sequence[Sampled]


class _Computed(NamedTuple):
    """What the kernels gave for a step, and how its rows are to be sampled."""

    logits: Logits
    planned: Planned


@dataclass(slots=True)
class Engine:
    """Continuous batching over one model. Not thread-safe: one thread calls everything.

    The runner's cache has one block more than the pool, the last, for what steps are padded with.
    """

    scheduler: Scheduler
    runner: ModelRunner
    sampler: Sampler
    stats: EngineStats = field(default_factory=EngineStats)
    longest_expected_step_s: float = 0.0
    """How long the step that is being computed may take, by those before and by what it is predicted to cost."""
    padding: Padding = field(default_factory=Padding)
    small_padding: Padding = field(default_factory=Padding)
    _is_computing: bool = False
    _outputs: list[RequestOutput] = field(default_factory=list)
    _late: _Late | None = None
    _failed: set[Request] = field(default_factory=set)
    _num_failed_steps: int = 0
    _longest_step_s: float = 0.0
    _seen_counts: set[tuple[bool, int]] = field(default_factory=set)
    _isolated: IsolatedSampler = field(init=False)
    _beside: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "beside-engine"))

    def __post_init__(self) -> None:
        self._isolated = IsolatedSampler(self.sampler)

    @property
    def has_outputs(self) -> bool:
        """Whether there is something to deliver."""
        return bool(self._outputs)

    def warm_up(self, request: Request) -> None:
        """Run a request to its end before any other: the first step of a model costs a quarter of a second more than
        later ones. Nothing of it stays but what was learned of the cost of steps, so a request of the same length has
        to be run again for that."""
        self.scheduler.add(request)
        while self.scheduler.has_requests:
            self.step()
        pool = self.scheduler.kv_cache.pool
        pool.forget_all()
        pool.take_events()
        self.scheduler.stats = SchedulerStats()
        self.scheduler.step_costs.rates = StepRates()
        self.stats = EngineStats()
        self.padding, self.small_padding = Padding(), Padding()
        self.longest_expected_step_s = self._longest_step_s = 0.0

    def step(self) -> list[RequestOutput]:
        """Compute the next step and give what it gave to each request."""
        outputs: list[RequestOutput] = []
        self.advance(outputs.extend)
        return outputs + self._take_outputs()

    def advance(self, deliver: Deliver) -> bool:
        """Compute the next step if there is one, and tell whether there was. While the kernels run, deliver what the
        step before gave.

        A step whose kernels raise ends all of its requests with an error and leaves the engine as good as before. What
        raises in sampling ends its own request only. Anything else that raises, in the scheduler or in `deliver`,
        leaves the engine unfit for further steps: the caller has to give it up. EngineFailedError after many failed
        steps in a row."""
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
        computed = self._compute(step, deliver)
        if isinstance(computed, Exception):
            outputs = self._fail(step.requests, computed)
        else:
            outputs = self._account_for(step, computed)
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
        costs = self.scheduler.step_costs
        token_ms = costs.of(is_decode=output.is_decode).token_ms
        num_padding = padding.of(
            output.num_tokens, is_decode=output.is_decode, token_ms=token_ms, change_ms=costs.decode.change_ms
        )
        step = ((request.num_computed_tokens, new) for request, new in output.scheduled)
        shape = StepShape.of(step, padding=num_padding, changed=padding.changed)
        self._expect(shape)
        batch = build_batch(output.scheduled, self.scheduler.kv_cache.block_size, output.copies)
        if num_padding:
            batch = padded(batch, num_padding, self.scheduler.kv_cache.pool.num_blocks)
        self.runner.bind(batch, keeps_logits=self._late is not None)
        return _Step(output, batch, padding, num_padding, shape, start_s)

    def _compute(self, step: _Step, deliver: Deliver) -> _Computed | Exception:
        """Run the kernels; what they raised if they did."""
        requests = step.batch.sampled
        beside = None
        if self._late is None and all(request.sampling.is_plain for request in requests):
            # Nothing that is worth waking a thread.
            deliver(self._take_outputs())
        else:
            beside = self._beside.submit(self._deliver_and_plan, deliver, requests)
        computed: Logits | Exception
        try:
            computed = self.runner.run()
        except Exception as error:
            computed = error
        planned = NOT_PLANNED if beside is None else beside.result()
        return computed if isinstance(computed, Exception) else _Computed(computed, planned)

    def _account_for(self, step: _Step, computed: _Computed) -> list[RequestOutput]:
        """Sample the step's rows and give each request what came of it."""
        self._num_failed_steps = 0
        batch, logits = step.batch, computed.logits
        requests = batch.sampled
        failures: dict[Request, StatusError] = {}
        if batch.prompts:
            failures = self._isolated.read_prompts(batch.prompts, logits.part(slice(len(requests), None)))
            logits = logits.part(slice(len(requests)))
        sampled = self._isolated.sample(requests, logits, computed.planned)
        if failures:
            sampled = [
                Sampled(-1, failures[request]) if request in failures else entry
                for request, entry in zip(requests, sampled, strict=True)
            ]
        if any(request.sampling.num_logprobs is not None for request in requests):
            self._late = _Late(requests, logits, sampled)
        outputs = self.scheduler.update(step.output, sampled)
        for request, error in failures.items():
            outputs += self.scheduler.fail([request], error)
        return outputs

    def _deliver_and_plan(self, deliver: Deliver, requests: Sequence[Request]) -> Planned:
        deliver(self._take_outputs())
        return self._isolated.plan(requests, self.runner.vocab_size)

    def _take_outputs(self) -> list[RequestOutput]:
        """What the steps before gave to each request. Log-probabilities are only read now. A request whose own cannot
        be read gets an error instead of its output, and ends; if a step is being computed, it ends with that, for it
        takes part in it."""
        outputs, self._outputs = self._outputs, []
        late, self._late = self._late, None
        if late is None:
            return outputs
        entries = dict(zip(late.requests, self._isolated.logprobs(*late), strict=True))
        given = []
        for output in outputs:
            request = output.request
            entry = entries.get(request) if output.token_ids else None
            if entry is None:
                given.append(output)
            elif isinstance(entry, StatusError):
                given.append(RequestOutput(request, output.start_pos, (), error=entry))
                if request.state is not RequestState.FINISHED:
                    self._failed.add(request)
            else:
                given.append(replace(output, logprobs=(entry,)))
        if not self._is_computing:
            self._end_failed()
        return given

    def _expect(self, shape: StepShape) -> None:
        cost = self.scheduler.step_costs.of(is_decode=shape.prompt_tokens == 0)
        predicted_s = cost.predict_ms(shape) / 1000 if cost.num_steps else 0.0
        self.longest_expected_step_s = max(self._longest_step_s, predicted_s)

    def _observe(self, step: _Step, step_s: float) -> None:
        # The first step with a number of tokens builds kernels for it.
        count = (step.padding is self.small_padding, step.shape.tokens)
        is_first = count not in self._seen_counts
        self._seen_counts.add(count)
        self.scheduler.step_costs.observe(step.shape, 1000 * step_s, is_first=is_first)
        self._longest_step_s = max(step_s, _FORGETTING * self._longest_step_s)
        self.stats.num_steps += 1
        self.stats.num_padding_tokens += step.num_padding
        self.stats.infer_s += self.runner.infer_s
        self.stats.overhead_s += step_s - self.runner.infer_s

    def _fail(self, requests: Sequence[Request], error: Exception) -> list[RequestOutput]:
        log.error("a step of %d requests failed", len(requests), exc_info=error)
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise EngineFailedError(f"{MAX_FAILED_STEPS} steps in a row failed") from error
        return self.scheduler.fail(requests, _step_error(error))

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


# Ends requests whose error was given before.
_ENDED = StatusError(Reason.INTERNAL, "the request has failed")


def _step_error(error: Exception) -> StatusError:
    if isinstance(error, MemoryError):
        return StatusError(Reason.NO_CAPACITY, "the worker ran out of memory in a step", retry_after_s=1.0)
    return StatusError(Reason.INTERNAL, f"a step of the engine failed: {type(error).__name__}")
