"""The thread that runs the engine: receives commands, computes steps while there is work, delivers outputs.

An exception here leaves the engine in an unknown state, so the process exits. Routers resume its streams on other
workers, and the supervisor restarts the process.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

from headrace.protos.load_report import LoadReport
from headrace.worker.engine.engine import Engine, EngineStats
from headrace.worker.engine.forecast import Forecast
from headrace.worker.engine.mailbox import Command, EngineReport, LearnedCost, Mailbox
from headrace.worker.engine.pacing import Pacing
from headrace.worker.engine.scheduler import Scheduler, SchedulerStats
from headrace.worker.engine.serving_thread import ServingThread
from headrace.worker.engine.stages import Stages
from headrace.worker.engine.watchdog import end_process
from headrace.worker.request.step import RequestOutput

# The shortest time between two load reports, unless commands came or the engine becomes idle.
REPORT_INTERVAL_S = 0.02
# How long to wait for requests in stages, in seconds: while other work needs their blocks, and otherwise.
_POLL_S = 0.001
_LOOK_S = 0.1
# Reading the fields by name is four times as fast as asdict().
_COUNTERS = tuple(counter.name for counter in fields(SchedulerStats))


class EngineThread(ServingThread):
    """Owns the engine from `start` until the mailbox is stopped. Refuses requests that would wait longer than
    `max_wait_s` for others."""

    def __init__(
        self,
        engine: Engine,
        mailbox: Mailbox,
        on_failure: Callable[[str, BaseException], None] = end_process,
        max_wait_s: float = math.inf,
        stages: Stages = Stages(),  # noqa: B008  without stages it has no state
    ) -> None:
        """`stages` hold requests before they are scheduled."""
        super().__init__("engine", mailbox, on_failure)
        self._engine = engine
        self._stages = stages
        self._next_report_s = 0.0
        self._report: EngineReport | None = None
        self._num_taken = 0
        self._forecast = Forecast(engine.scheduler, max_wait_s, stages=stages)
        self._pacing = Pacing(engine.scheduler, stages)

    @property
    def longest_expected_step_s(self) -> float:
        """The longest time in seconds that the current step may take, by the learned cost of its size; infinite while
        that is unknown."""
        return self._engine.meter.longest_expected_step_s

    def serve(self) -> None:
        """Step until stopped. With nothing to compute, wait for a command."""
        self._mailbox.deliver((), self._report_now())
        while (commands := self._receive()) is not None:
            self._apply(commands)
            for request in self._stages.take_ready():
                self._engine.scheduler.add(request)
            is_paused = self._pacing.left_s > 0
            has_stepped = not is_paused and self._step()
            if has_stepped:
                self.num_turns += 1
                self._forecast.observe()
            elif self._engine.scheduler.has_requests and not is_paused:
                time.sleep(_POLL_S)  # the pool waits for blocks that are fetched
            has_news = self._end_held() | self._refuse_overdue() | self._stages.take_news()
            if has_stepped or commands or has_news:
                self._report = self._report_if_due(commands_came=bool(commands))
            if self._pacing.left_s:
                self._engine.settle(self._deliver)

    def _step(self) -> bool:
        """Compute the next step, if there is one. Returns whether there was one."""
        self._pacing.begin()
        has_stepped = self._engine.advance(self._deliver, self._stages.begin_late)
        self._pacing.end()
        return has_stepped

    def _apply(self, commands: Sequence[Command]) -> None:
        scheduler = self._engine.scheduler
        refused = []
        for request, is_cancel in commands:
            if is_cancel:
                if not self._stages.cancel(request):
                    scheduler.cancel(request)
                continue
            self._num_taken += 1
            error = self._forecast.refusal(request)
            if error is not None:
                refused.append(scheduler.refuse(request, error))
            elif not self._stages.begin(request):
                scheduler.add(request)
        if refused:
            self._mailbox.deliver(refused, None)

    def _end_held(self) -> bool:
        """Deliver the last outputs of requests that ended in a stage. Returns whether there were any."""
        outputs = self._stages.take_outputs()
        if outputs:
            self._mailbox.deliver(outputs, None)
        return bool(outputs)

    def _refuse_overdue(self) -> bool:
        """End requests that have waited too long for their first step. Returns whether there were any."""
        scheduler = self._engine.scheduler
        overdue = [scheduler.give_back(request, error) for request, error in self._forecast.overdue()]
        if overdue:
            self._mailbox.deliver(overdue, None)
        return bool(overdue)

    def _receive(self) -> list[Command] | None:
        """The new commands. Waits for one if there is nothing to do, and for the end of a pause between two steps; None
        means stop."""
        if self._has_work:
            pause_s = self._pacing.left_s
            return self._mailbox.take(block=pause_s > 0, timeout_s=pause_s)
        self.num_turns += 1
        self.is_idle = True
        commands = self._mailbox.take(block=True, timeout_s=_LOOK_S if self._stages.num_held else None)
        self._forecast.begin()
        self.is_idle = False
        return commands

    @property
    def _has_work(self) -> bool:
        engine = self._engine
        return engine.scheduler.has_requests or engine.has_outputs or self._report is not None

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Pass on the outputs of a step, and the last report."""
        report, self._report = self._report, None
        if outputs or report:
            self._mailbox.deliver(outputs, report)

    def _report_if_due(self, *, commands_came: bool) -> EngineReport | None:
        now = time.monotonic()
        is_idle = not self._engine.scheduler.has_requests
        if now < self._next_report_s and not is_idle and not commands_came:
            return None
        self._next_report_s = now + REPORT_INTERVAL_S
        return self._report_now()

    def _report_now(self) -> EngineReport:
        return self._stages.report(report_of(self._engine.scheduler, self._engine.stats, self._num_taken))


def load_of(scheduler: Scheduler, **more: Any) -> LoadReport:
    """The load of a scheduler now. `more` are numbers that others know."""
    rates = scheduler.step_costs.rates
    uncached = sum(
        max(0, request.num_prompt_tokens - request.num_computed_tokens)
        for requests in (scheduler.running, scheduler.waiting)
        for request in requests
    )
    return LoadReport(
        num_running=scheduler.num_sequences,
        num_waiting=len(scheduler.waiting),
        num_running_background=sum(request.num_sequences for request in scheduler.running if request.is_background),
        num_waiting_background=sum(request.is_background for request in scheduler.waiting),
        num_uncached_tokens=uncached,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_step_ms=rates.decode_token_ms,
        **scheduler.kv_cache.figures()._asdict(),
        **more,
    )


def report_of(scheduler: Scheduler, stats: EngineStats, num_taken: int = 0) -> EngineReport:
    """The engine's state now, after it has received `num_taken` requests. Takes the changes of the cache."""
    counters = {name: getattr(scheduler.stats, name) for name in _COUNTERS}
    counters["steps"] = stats.num_steps
    counters["infer_us"] = int(stats.infer_s * 1e6)
    counters["overhead_us"] = int(stats.overhead_s * 1e6)
    counters |= scheduler.kv_cache.counters()
    counters["padding_tokens"] = stats.num_padding_tokens
    if scheduler.speculation is not None:
        counters |= scheduler.speculation.counters
    costs = scheduler.step_costs
    return EngineReport(
        load=load_of(scheduler),
        counters=counters,
        num_taken=num_taken,
        step_costs={
            name: LearnedCost(model.terms_ms, model.num_steps)
            for name, model in (("prompts", costs.prompts), ("decode", costs.decode))
            if model.is_learned
        },
        **scheduler.kv_cache.take_changes()._asdict(),
    )
