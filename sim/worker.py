"""A simulated worker: the real scheduler, KV cache and load reports; steps take the time of the cost model.

    take --> [ arrived ] --begin_step--> scheduler.schedule() ... cost model's milliseconds ... --end_step--> outputs
                                                                                                    |
                                                                                       report (as EngineThread does)

Pure: the caller keeps time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from headrace.router.policy import LoadReport
from headrace.sim.step_cost import StepCost, StepShape
from headrace.sim.trace import Job
from headrace.worker.block_pool import BlockPool
from headrace.worker.engine import Engine
from headrace.worker.engine_thread import REPORT_INTERVAL_S, observe_step, report_of
from headrace.worker.kv_cache import KVCacheManager
from headrace.worker.request import Request, RequestOutput
from headrace.worker.scheduler import Sampled, Scheduler, SchedulerOutput, mixed_tokens_for
from headrace.worker.step_cost import StepShape as LearnedShape
from headrace.worker.step_rates import StepRates


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What each worker of the fleet is: `kv_tokens` tokens of KV cache in blocks of `block_size`. `None`: as a worker
    chooses."""

    cost: StepCost
    kv_tokens: int = 600_000
    block_size: int = 512
    max_num_seqs: int = 128
    max_num_batched_tokens: int = 1024
    max_num_mixed_tokens: int | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks of the KV cache."""
        return self.kv_tokens // self.block_size

    def holds(self, job: Job) -> bool:
        """Whether the job fits the whole cache; a worker would refuse it otherwise."""
        return job.num_prompt_tokens + job.num_output_tokens <= self.num_blocks * self.block_size


class Report(NamedTuple):
    """What a worker tells routers after a step. `taken` is the number of requests it had taken in by then."""

    load: LoadReport
    stored: Sequence[int]
    evicted: Sequence[int]
    taken: int


class SimulatedWorker:
    """One worker. `begin_step` and `end_step` alternate."""

    def __init__(
        self, settings: WorkerSettings, clock: Callable[[], float], *, reports_every_step: bool = False
    ) -> None:
        self.settings = settings
        self.num_taken = 0
        pool = BlockPool(settings.num_blocks, settings.block_size)
        most = settings.max_num_batched_tokens
        mixed = mixed_tokens_for(settings.max_num_mixed_tokens, settings.max_num_seqs, most)
        self.scheduler = Scheduler(KVCacheManager(pool), settings.max_num_seqs, most, mixed, clock=clock)
        # For its reports; it never steps, so it has neither runner nor sampler.
        self._engine = Engine(self.scheduler, cast("Any", None), cast("Any", None))
        self._engine.padding.change_ms, self._engine.padding.token_ms = settings.cost.change, settings.cost.per_padding
        self._rates = StepRates()
        self._arrived: list[Request] = []
        self._answers: dict[Request, Sampled] = {}
        self._output: SchedulerOutput | None = None
        self._step_ms = 0.0
        self._commands_came = False
        self._next_report_s = 0.0
        self._reports_every_step = reports_every_step

    @property
    def busy_s(self) -> float:
        """Seconds of all steps."""
        return self._engine.stats.infer_s

    @property
    def num_steps(self) -> int:
        """Steps that ended."""
        return self._engine.stats.num_steps

    @property
    def is_stepping(self) -> bool:
        """Whether a step has begun and not ended."""
        return self._output is not None

    def take(self, request: Request, job: Job) -> None:
        """A request arrives; the next step sees it."""
        assert self.settings.holds(job), f"request {job.number} does not fit the cache"
        self._arrived.append(request)
        self._answers[request] = Sampled(job.answer_token_id)

    def begin_step(self) -> float | None:
        """Schedule a step; its milliseconds, or None when there is nothing to compute."""
        assert self._output is None, "a step is running"
        self._commands_came = bool(self._arrived)
        self.num_taken += len(self._arrived)
        for request in self._arrived:
            self.scheduler.add(request)
        self._arrived.clear()
        if not self.scheduler.has_requests:
            return None
        output = self.scheduler.schedule()
        assert output.scheduled, "there are requests and none can go on"
        cost, padding = self.settings.cost, self._engine.padding
        num_padding = padding.of(output.num_tokens, is_decode=output.is_decode)
        step = [(request.num_computed_tokens, new) for request, new in output.scheduled]
        self._output = output
        self._step_ms = cost.milliseconds(StepShape.of(step, padding=num_padding, changed=padding.changed))
        if not output.is_decode:
            shape = LearnedShape.of(step, padding=num_padding)
            self.scheduler.step_cost.observe(shape, self._step_ms - padding.changed_ms)
        return self._step_ms

    def end_step(self, now_s: float) -> tuple[list[RequestOutput], Report | None]:
        """Account for the step that began; its outputs, and a report if one is due."""
        output, self._output = self._output, None
        assert output is not None, "no step is running"
        sampled = [
            self._answers[request]
            for request, new in output.scheduled
            if request.num_computed_tokens + new == request.num_tokens
        ]
        outputs = self.scheduler.update(output, sampled)
        self._engine.stats.infer_s += self._step_ms / 1000
        self._engine.stats.num_steps += 1
        observe_step(self._engine, self._rates)
        for given in outputs:
            if given.is_last:
                del self._answers[given.request]
        return outputs, self._report(now_s) if self._is_report_due(now_s) else None

    def check(self) -> None:
        """Assert the scheduler's and the pool's invariants, and that every request here is known."""
        self.scheduler.check()
        assert len(self._answers) == len(self._arrived) + len(self.scheduler.running) + len(self.scheduler.waiting)

    def _is_report_due(self, now_s: float) -> bool:
        """As EngineThread decides it."""
        at_rest = not self.scheduler.has_requests
        if now_s < self._next_report_s and not (at_rest or self._commands_came or self._reports_every_step):
            return False
        self._next_report_s = now_s + REPORT_INTERVAL_S
        return True

    def _report(self, now_s: float) -> Report:
        report = report_of(self._engine, self._rates)
        load = LoadReport(
            num_running=report.num_running,
            num_waiting=report.num_waiting,
            num_uncached_tokens=report.num_uncached_tokens,
            num_blocks=report.num_blocks,
            num_free_blocks=report.num_free_blocks,
            num_cached_blocks=report.num_cached_blocks,
            prefill_tokens_per_s=report.prefill_tokens_per_s,
            decode_step_ms=report.decode_step_ms,
            max_num_seqs=self.settings.max_num_seqs,
            received_at_s=now_s,
        )
        return Report(load, report.stored, report.evicted, self.num_taken)
