"""The heartbeat: schedule, forward, sample, account.

`EngineThread` receives new requests and cancellations between two calls of `Engine.advance`. Work that the next step
does not need runs while the kernels compute it; see `overlap`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from headrace.protos.status import Reason, StatusError
from headrace.worker.engine.isolation import IsolatedSampler
from headrace.worker.engine.overlap import Deliver, Overlap
from headrace.worker.engine.scheduler import FetchFirst, Scheduler, SchedulerOutput, SchedulerStats
from headrace.worker.engine.step_meter import StepLog, StepMeter, StepSize
from headrace.worker.model.batch import Batch, build_batch, graph_of, padded
from headrace.worker.request.request import Request, StepNote
from headrace.worker.request.step import NOTHING_SEARCHED, RequestOutput, Sampled, Searched
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.acceptance import verify
from headrace.worker.speculation.draft_model import DraftRunner

log = logging.getLogger(__name__)

# A traced request records only this many steps, because later ones add nothing new.
MAX_NOTED_STEPS = 128
# The engine gives up after this many failed steps in a row.
MAX_FAILED_STEPS = 8


class EngineFailedError(Exception):
    """The engine cannot compute steps any more. The text says why."""


class StepFailedError(Exception):
    """A step could not be computed. `__cause__` is the original exception."""


class ModelRunner(DraftRunner, Protocol):
    """Computes a step: OpenVINO in production, a fake in tests.

    `infer_s` is the time that the last step spent in the kernels, in seconds. Decode steps of up to `small_decode`
    sequences use a second graph; 0 if there is none. Decode steps have at least `least_decode` tokens, padding
    included.
    """

    infer_s: float
    small_decode: int
    least_decode: int


@dataclass(slots=True)
class EngineStats:
    """Totals since the start: steps, seconds in the kernels (`infer_s`) and around them (`overhead_s`), and tokens that
    only fill steps up."""

    num_steps: int = 0
    infer_s: float = 0.0
    overhead_s: float = 0.0
    num_padding_tokens: int = 0


class Step(NamedTuple):
    """A step that is being computed."""

    output: SchedulerOutput
    size: StepSize
    batch: Batch


@dataclass(slots=True)
class Engine:
    """Continuous batching over one model. Not thread-safe: one thread makes all calls.

    The runner's KV cache has one more block than the pool, the last one, for padding.
    """

    scheduler: Scheduler
    runner: ModelRunner
    sampler: BatchSampler
    step_log: StepLog | None = None
    """Where steps are written, if they are."""
    stats: EngineStats = field(default_factory=EngineStats)
    meter: StepMeter = field(init=False)
    _isolated: IsolatedSampler = field(init=False)
    _overlap: Overlap = field(init=False)
    _num_failed_steps: int = 0

    def __post_init__(self) -> None:
        self.meter = StepMeter(self.scheduler)
        self._isolated = IsolatedSampler(self.sampler)
        self._overlap = Overlap(self._isolated, self.scheduler.kv_cache)

    @property
    def has_outputs(self) -> bool:
        """Whether outputs of the last step have not been delivered yet."""
        return self._overlap.has_outputs

    def step(self, fetch_first: FetchFirst | None = None) -> list[RequestOutput]:
        """Compute the next step, if there is one, and return its outputs without waiting for the step after it. See
        `advance` for `fetch_first` and errors."""
        outputs: list[RequestOutput] = []
        self.advance(outputs.extend, fetch_first)
        self._overlap.deliver(outputs.extend)
        self._end_failed([])
        return outputs

    def advance(self, deliver: Deliver, fetch_first: FetchFirst | None = None) -> bool:
        """Compute the next step, if there is one, and deliver the outputs of the previous step. Returns whether there
        was a step. `fetch_first` is as for `Scheduler.schedule`.

        If the kernels raise, all requests of the step end with an error, and the engine remains usable. If the sampler
        raises, only the affected request ends. Any other exception, from the scheduler or from `deliver`, leaves the
        engine unusable. EngineFailedError after `MAX_FAILED_STEPS` failed steps in a row.
        """
        start_s = time.perf_counter()
        is_traced = self.scheduler.num_traced > 0
        if self.scheduler.speculation is not None and self.scheduler.speculation.model_drafts is not None:
            self._overlap.deliver(deliver)  # deliver before the next drafts are computed
        output = self.scheduler.schedule(fetch_first)
        if not output.scheduled:
            self.settle(deliver)
            return False
        try:
            step = self._build(output)
            logits = self._forward(step, deliver)
        except StepFailedError as error:
            self._overlap.deliver(deliver)
            outputs = self._fail(output, error)
        else:
            sampled, errors = self._sample(step.batch, logits)
            outputs = self._account(step, sampled, self._search(step.batch, logits), errors)
            self._observe(step, sampled, start_s, is_traced=is_traced)
        self._overlap.hold(self._end_failed(outputs))
        return True

    def settle(self, deliver: Deliver) -> None:
        """Do at once the work that would overlap with the next step, because that step comes later or not at all:
        deliver the outputs of the previous step, and record new blocks."""
        self._overlap.deliver(deliver)
        self._end_failed([])
        self._overlap.seal()

    def warm_up(self, request: Request) -> None:
        """Run a request to its end before any other, because the first steps of a model are slower. Only the learned
        costs of steps are kept. The cost of a step is learned only when its size occurs for the second time, so run
        each request twice."""
        speculation, self.scheduler.speculation = self.scheduler.speculation, None
        self.scheduler.add(request)
        while self.scheduler.has_requests:
            self.step()
        self.scheduler.speculation = speculation
        self.scheduler.kv_cache.forget_all()
        self.scheduler.kv_cache.take_changes()
        self.scheduler.stats = SchedulerStats()
        self.stats = EngineStats()
        self.meter.end_warm_up()

    def _build(self, output: SchedulerOutput) -> Step:
        """Make the arrays of the step, and bind them to the runner."""
        try:
            batch = build_batch(output.scheduled, self.scheduler.kv_cache.block_size, output.plan)
            graph = graph_of(batch, self.runner.small_decode)
            size = self.meter.size(output, graph, least=self.runner.least_decode)
            if size.num_padding:
                batch = padded(batch, size.num_padding, self.scheduler.kv_cache.num_blocks)
            self.runner.bind(batch, keeps_logits=self._overlap.reads_logits)
        except Exception as error:
            raise StepFailedError from error
        return Step(output, size, batch)

    def _forward(self, step: Step, deliver: Deliver) -> Logits:
        """Run the kernels, and what overlaps with them."""
        self._overlap.begin(deliver)
        try:
            return self.runner.run()
        except Exception as error:
            raise StepFailedError from error
        finally:
            self._overlap.finish()

    def _sample(self, batch: Batch, logits: Logits) -> tuple[Sequence[Sampled], dict[Request, StatusError]]:
        """Read log-probabilities of prompts, then sample. Returns a token for each request that is sampled, and the
        errors of requests whose prompt's log-probabilities could not be read."""
        requests = batch.sampled
        errors: dict[Request, StatusError] = {}
        if batch.ahead is not None:
            return self._verify(batch, logits), errors
        if batch.prompts:
            first = len(batch.sampled) + sum(rows.num_rows for rows in batch.beams)
            errors = self._isolated.read_prompts(batch.prompts, logits.part(slice(first, None)))
        if batch.prompts or batch.beams:
            logits = logits.part(slice(len(requests)))
        sampled = self._isolated.sample(requests, logits)
        if errors:
            sampled = [
                Sampled(-1, errors[request]) if request in errors else entry
                for request, entry in zip(requests, sampled, strict=True)
            ]
        self._overlap.read_later(requests, logits, sampled)
        return sampled, errors

    def _verify(self, batch: Batch, logits: Logits) -> Sequence[Sampled]:
        """Sample the rows of a step with drafts. Returns the tokens of each request that is sampled."""
        first = logits.part(slice(len(batch.sampled))) if batch.later or batch.beams else logits
        sampled = self._isolated.sample(batch.sampled, first, batch.ahead)

        def sample_later(requests: Sequence[Request], rows: Sequence[int]) -> Sequence[Sampled]:
            return self._isolated.sample(requests, logits.part(np.asarray(rows, np.intp)))

        verified = verify(batch, sampled, sample_later)
        if batch.beams:
            logits = logits.part(slice(len(batch.sampled) + len(batch.later)))
        self._overlap.read_later((*batch.sampled, *batch.later), logits, verified.rows)
        return verified.tokens

    def _search(self, batch: Batch, logits: Logits) -> Mapping[Request, Searched]:
        """Read from the logits the tokens that may continue the beams of beam searches."""
        if not batch.beams:
            return NOTHING_SEARCHED
        first = len(batch.sampled) + len(batch.later)
        rows = slice(first, first + sum(rows.num_rows for rows in batch.beams))
        return self._isolated.candidates(batch.beams, logits.part(rows))

    def _account(
        self,
        step: Step,
        sampled: Sequence[Sampled],
        searched: Mapping[Request, Searched],
        errors: dict[Request, StatusError],
    ) -> list[RequestOutput]:
        """Add the tokens to their requests, and end those that are finished or have failed."""
        self._num_failed_steps = 0
        outputs = self.scheduler.update(step.output, sampled, searched)
        for request, error in errors.items():
            outputs += self.scheduler.fail([request], error)
        return outputs

    def _observe(self, step: Step, sampled: Sequence[Sampled], start_s: float, *, is_traced: bool) -> None:
        """Learn what a step cost that began at `start_s`, and count it."""
        step_s = time.perf_counter() - start_s
        num_more = sum(len(entry.more) for entry in sampled) if step.output.num_draft_tokens else 0
        speculation = self.scheduler.speculation
        draft_s = speculation.take_draft_s() if speculation is not None else 0.0
        self.meter.observe(step.size, step_s - draft_s, 1.0 + num_more / max(1, len(sampled)), draft_s)
        self.stats.num_steps += 1
        self.stats.num_padding_tokens += step.size.num_padding
        infer_s = self.runner.infer_s + draft_s
        self.stats.infer_s += infer_s
        self.stats.overhead_s += step_s - infer_s
        if self.step_log is not None:
            self.step_log.note(step.size, start_s, step_s)
        if is_traced:
            _note_step(step.output, step_s)

    def _fail(self, output: SchedulerOutput, failure: StepFailedError) -> list[RequestOutput]:
        """End all requests of a step that could not be computed."""
        error = failure.__cause__
        assert error is not None
        log.error("a step of %d requests failed", len(output.scheduled), exc_info=error)
        self._num_failed_steps += 1
        if self._num_failed_steps >= MAX_FAILED_STEPS:
            raise EngineFailedError(f"{MAX_FAILED_STEPS} steps in a row failed") from error
        return self.scheduler.fail([request for request, _ in output.scheduled], _step_error(error))

    def _end_failed(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """End requests whose log-probabilities could not be read, and drop their `outputs`, because their error has
        been delivered."""
        failed = self._overlap.take_failed()
        if not failed:
            return outputs
        self.scheduler.fail(failed, _ENDED)
        return [output for output in outputs if output.request not in failed]


def _note_step(output: SchedulerOutput, step_s: float) -> None:
    """Record the step that has just ended in its traced requests."""
    start_s = time.monotonic() - step_s
    for request, num_tokens in output.scheduled:
        if request.steps is not None and len(request.steps) < MAX_NOTED_STEPS:
            request.steps.append(StepNote(start_s, step_s, num_tokens, output.num_tokens, len(output.scheduled)))


# Ends requests whose error has been delivered, so no caller sees it.
_ENDED = StatusError(Reason.INTERNAL, "the request has failed")


def _step_error(error: BaseException) -> StatusError:
    if isinstance(error, MemoryError):
        return StatusError(Reason.NO_CAPACITY, "the worker ran out of memory in a step", retry_after_s=1.0)
    return StatusError(Reason.INTERNAL, f"a step of the engine failed: {type(error).__name__}")
