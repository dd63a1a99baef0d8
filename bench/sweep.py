"""Raises the rate until the server no longer keeps up, and finds the highest rate that it holds: the knee.

A rate is held if requests are answered as fast as they come, so that no more are in flight at the end than halfway, if
the answers are right, and if enough of them meet the objectives.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from headrace.bench.measures import distribution, is_good, values_s
from headrace.bench.results import Result

BEHIND = 0.05
"""Fraction by which the rate of answers may be lower than that of arrivals."""
GOOD_SHARE = 0.9
"""Share of the requests that must meet the objectives."""
_GROWTH = 2.0
_MAX_RATES = 16


@dataclass(frozen=True, slots=True)
class Step:
    """A rate that was tried, in requests per second."""

    rate: float
    result: Result
    held: bool
    reason: str


@dataclass(slots=True)
class Sweep:
    """The steps of a sweep in the order in which they were tried."""

    steps: list[Step] = field(default_factory=list)

    @property
    def knee(self) -> Step | None:
        """The highest rate that was held; None if none was."""
        held = [step for step in self.steps if step.held]
        return max(held, key=lambda step: step.rate) if held else None

    @property
    def is_closed(self) -> bool:
        """Whether a higher rate was tried that was not held."""
        return any(not step.held for step in self.steps)


async def sweep(first_rate: float, refinements: int, run: Callable[[float], Awaitable[Result]]) -> Sweep:
    """Double the rate from `first_rate` until the server cannot sustain it, then halve the interval `refinements`
    times. A stopped run ends the sweep and does not count."""
    found = Sweep()

    async def held(rate: float) -> bool | None:
        result = await run(rate)
        if result.run.is_partial:
            return None
        reason = why_not_held(result, rate)
        found.steps.append(Step(rate, result, not reason, reason))
        return not reason

    low, high, rate = 0.0, math.inf, _rounded(first_rate)
    while len(found.steps) < _MAX_RATES:
        is_held = await held(rate)
        if is_held is None:
            break
        if is_held:
            low = rate
            if not math.isfinite(high):
                rate *= _GROWTH
                continue
        else:
            high = rate
            if not low:
                rate /= _GROWTH
                if len(found.steps) >= _MAX_RATES // 2:
                    break
                continue
        if not refinements:
            break
        refinements -= 1
        rate = _rounded(math.sqrt(low * high))
    return found


def _rounded(rate: float) -> float:
    """A rate that people can read, and that a file can have in its name."""
    return float(f"{rate:.3g}")


def why_not_held(result: Result, rate: float) -> str:
    """Why a server does not hold a rate; empty if it does."""
    run = result.run
    if result.totals.failed:
        return f"{result.totals.failed} requests failed"
    if not run.records:
        return "nothing was sent"
    if result.checked.findings:
        worst = max(result.checked.findings, key=lambda finding: finding.count)
        return f"wrong answers: {worst.count} of {worst.of} {worst.sentence}"
    middle_s = (run.began_s + run.last_due_s) / 2
    in_flight = sum(record.planned_s <= middle_s < record.ended_s for record in run.records)
    left = sum(record.ended_s > run.last_due_s for record in run.records)
    # The number in flight varies as its root.
    if left > in_flight + 2 * math.sqrt(max(in_flight, 1)) + BEHIND * len(run.records) / 2:
        return f"requests in flight: {in_flight} halfway, {left} at the end: the queue grows"
    lasts_s = run.last_due_s - run.began_s
    takes_s = statistics.median(record.latency_s for record in run.records)
    if takes_s > lasts_s:
        return f"an answer takes {takes_s:.1f} s and the load lasts {lasts_s:.1f} s: give more --sweep-seconds"
    objectives = result.setup.objectives_ms
    if objectives:
        good = sum(is_good(record, objectives) for record in run.records) / len(run.records)
        if good < GOOD_SHARE:
            return f"only {good:.0%} of the requests meet the objectives"
    return ""


def table(found: Sweep) -> str:
    """The steps by rate, as lines, with the knee."""
    head = f"{'rate req/s':>10} {'out tok/s':>10} {'TTFT p50':>9} {'p99 ms':>9} {'TPOT p50':>9} {'p99 ms':>8}  held"
    lines = [" Sweep of the Rate ".center(len(head) + 4, "="), head]
    for step in sorted(found.steps, key=lambda step: step.rate):
        totals = step.result.totals
        ttft, tpot = (distribution(values_s(step.result.run.records, name), (99.0,)) for name in ("ttft", "tpot"))
        figures = f"{step.rate:>10.2f} {totals.per_s(totals.output_tokens):>10.1f} {ttft.median:>9.1f} "
        figures += f"{ttft.percentiles[99.0]:>9.1f} {tpot.median:>9.1f} {tpot.percentiles[99.0]:>8.1f}"
        lines.append(f"{figures}  {'yes' if step.held else 'no: ' + step.reason}")
    objectives = found.steps[0].result.setup.objectives_ms if found.steps else {}
    if objectives:
        within = ", ".join(f"{name} {limit_ms:g} ms" for name, limit_ms in objectives.items())
        lines.append(f"Objectives, for {GOOD_SHARE:.0%} of the requests: {within}.")
    knee = found.knee
    if knee is None:
        lines.append("No rate that was tried is held.")
    elif not found.is_closed:
        lines.append(f"Every rate that was tried is held; the highest was {knee.rate:.2f} requests per second.")
    else:
        totals = knee.result.totals
        lines.append(
            f"Knee: {knee.rate:.2f} requests per second, {totals.per_s(totals.output_tokens):.1f} output tokens per "
            "second."
        )
    return "\n".join(lines)
