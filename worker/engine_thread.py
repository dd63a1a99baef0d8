"""The thread that runs the engine: takes commands, steps while there is work, delivers."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict

from headrace.worker.engine import Engine
from headrace.worker.mailbox import LoadReport, Mailbox
from headrace.worker.request import RequestOutput
from headrace.worker.step_rates import StepRates

log = logging.getLogger(__name__)

# Load is reported after a step at most this often, besides when the engine comes to rest.
REPORT_INTERVAL_S = 0.02


class EngineThread(threading.Thread):
    """Owns the engine from `start` until the mailbox is stopped."""

    def __init__(self, engine: Engine, mailbox: Mailbox) -> None:
        super().__init__(name="engine", daemon=True)
        self._engine = engine
        self._mailbox = mailbox
        self._next_report_s = 0.0
        self._report: LoadReport | None = None
        self._rates = StepRates()

    def run(self) -> None:
        """Step until stopped. With nothing to compute, wait for a command."""
        scheduler = self._engine.scheduler
        self._mailbox.deliver((), report_of(self._engine, self._rates))
        while (commands := self._mailbox.take(block=not self._has_work)) is not None:
            for request, is_cancel in commands:
                if is_cancel:
                    scheduler.cancel(request)
                else:
                    scheduler.add(request)
            has_stepped = self._engine.advance(self._deliver)
            if has_stepped:
                observe_step(self._engine, self._rates)
            if has_stepped or commands:
                self._report = self._report_if_due(commands_came=bool(commands))

    @property
    def _has_work(self) -> bool:
        engine = self._engine
        return engine.scheduler.has_requests or engine.has_outputs or self._report is not None

    def _deliver(self, outputs: list[RequestOutput]) -> None:
        """Pass on what the last step gave, and the state after it."""
        report, self._report = self._report, None
        if outputs or report:
            self._mailbox.deliver(outputs, report)

    def _report_if_due(self, *, commands_came: bool) -> LoadReport | None:
        now = time.monotonic()
        at_rest = not self._engine.scheduler.has_requests
        if now < self._next_report_s and not at_rest and not commands_came:
            return None
        self._next_report_s = now + REPORT_INTERVAL_S
        return report_of(self._engine, self._rates)


def observe_step(engine: Engine, rates: StepRates) -> None:
    """Let the rates learn from the step that the engine just made, if it made one."""
    stats = engine.scheduler.stats
    seconds = engine.stats.infer_s + engine.stats.overhead_s
    rates.observe(stats.prompt_tokens_computed, stats.tokens_generated, seconds)


def report_of(engine: Engine, rates: StepRates) -> LoadReport:
    """The engine's state now; takes the pool's events."""
    scheduler = engine.scheduler
    pool = scheduler.kv_cache.pool
    stored, evicted = pool.take_events()
    uncached = sum(
        max(0, request.num_prompt_tokens - request.num_computed_tokens)
        for requests in (scheduler.running, scheduler.waiting)
        for request in requests
    )
    counters = asdict(scheduler.stats)
    counters["steps"] = engine.stats.num_steps
    counters["infer_us"] = int(engine.stats.infer_s * 1e6)
    counters["overhead_us"] = int(engine.stats.overhead_s * 1e6)
    counters["blocks_evicted"] = pool.num_evictions
    counters["padding_tokens"] = engine.stats.num_padding_tokens
    return LoadReport(
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting),
        num_uncached_tokens=uncached,
        num_blocks=pool.num_blocks,
        num_free_blocks=pool.num_free_blocks,
        num_cached_blocks=pool.num_cached_blocks,
        prefill_tokens_per_s=rates.prefill_tokens_per_s,
        decode_step_ms=rates.decode_step_ms,
        counters=counters,
        stored=stored,
        evicted=evicted,
    )
