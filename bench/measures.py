"""Figures of a run, defined as `vllm bench serve` defines them.

    ttft    from the request to the first content, a wait for --max-concurrency excluded
    tpot    mean time of a token after the first: (e2el - ttft) / (tokens - 1)
    itl     gaps between pieces of an answer; a piece may have several tokens
    e2el    from the request to the end of the answer

Percentiles interpolate linearly between ranks. Failed requests are in no figure but the count of them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from headrace.bench.load import LATE_S, Run
from headrace.bench.record import Record

METRICS: Mapping[str, tuple[str, str]] = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
    "client_queue_time": ("Client Queue Time", "Client-side Queueing"),
    "e2el_including_client_queue": ("E2EL incl. Client Queue", "Queue-inclusive End-to-end Latency"),
}
"""Names of metrics, with those that the text has for each and its section."""
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


class Distribution(NamedTuple):
    """Some times in milliseconds; zeros if there are none."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[float, float]


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts and rates of a run. Rates are per second of its duration, which ends with the last answer."""

    duration_s: float
    completed: int
    failed: int
    input_tokens: int
    output_tokens: int
    good: int
    """Requests that meet every objective."""
    peak_output_tokens_per_s: float
    """Output tokens in the busiest second."""
    peak_concurrency: int
    cached_share: float | None = None
    """Share of the prompt tokens that the server found in its cache, of the requests for which it told so; None if it
    did for none."""

    def per_s(self, count: float) -> float:
        """A count as a rate."""
        return count / self.duration_s if self.duration_s > 0 else 0.0


@dataclass(frozen=True, slots=True)
class ClientHealth:
    """Whether the client kept up. Times are in milliseconds."""

    timed_requests: int
    late_requests: int
    """Those sent more than 10 ms after they were due."""
    mean_lateness_ms: float
    max_lateness_ms: float
    p99_lag_ms: float
    """Of the client's own timers."""
    cpu_share: float
    """CPU time of the client as a share of one core."""


class Timeline(NamedTuple):
    """Each second of a run: requests in flight at its end, and output tokens in it."""

    in_flight: list[int]
    output_tokens: list[float]


def values_s(records: Sequence[Record], metric: str) -> NDArray[np.float64]:
    """All values of a metric, in seconds, of successful requests: f64 `[values]`, which may be more or fewer than the
    requests."""
    good = [record for record in records if record.succeeded]
    match metric:
        case "ttft":
            found = [record.ttft_s for record in good if record.times]
        case "tpot":
            found = [record.tpot_s for record in good if record.output_tokens > 1 and record.times]
        case "itl":
            found = [gap for record in good for gap in record.gaps_s]
        case "e2el":
            found = [record.latency_s for record in good]
        case "client_queue_time":
            found = [record.queued_s for record in good]
        case "e2el_including_client_queue":
            found = [record.latency_s + record.queued_s for record in good]
        case _:
            raise ValueError(f"there is no metric {metric}")
    return np.array(found, np.float64)


def distribution(values: NDArray[np.float64], percentiles: Sequence[float]) -> Distribution:
    """The distribution of times in seconds, in milliseconds."""
    if not len(values):
        return Distribution(0.0, 0.0, 0.0, dict.fromkeys(percentiles, 0.0))
    found: NDArray[np.float64] = np.percentile(values, np.array(percentiles, np.float64)) * 1000
    return Distribution(
        float(values.mean() * 1000),
        float(np.median(values) * 1000),
        float(values.std() * 1000),
        {p: float(value) for p, value in zip(percentiles, found, strict=True)},
    )


def is_good(record: Record, objectives_ms: Mapping[str, float]) -> bool:
    """Whether a request was answered and meets every objective. An answer without content is none."""
    times_s = {"ttft": record.ttft_s, "tpot": record.tpot_s, "e2el": record.latency_s}
    is_answered = record.succeeded and bool(record.times)
    return is_answered and all(times_s[name] * 1000 <= most for name, most in objectives_ms.items())


def totals(run: Run, objectives_ms: Mapping[str, float]) -> Totals:
    """Counts and rates."""
    good = [record for record in run.records if record.succeeded]
    line = timeline(run)
    return Totals(
        duration_s=run.duration_s,
        completed=len(good),
        failed=len(run.records) - len(good),
        input_tokens=sum(record.input_tokens for record in good),
        output_tokens=sum(record.output_tokens for record in good),
        good=sum(is_good(record, objectives_ms) for record in good),
        peak_output_tokens_per_s=max(line.output_tokens, default=0.0),
        peak_concurrency=_peak(good),
        cached_share=cached_share(good),
    )


def cached_share(records: Sequence[Record]) -> float | None:
    """See `Totals`."""
    told = [(record.cached_tokens, record.input_tokens) for record in records if record.cached_tokens is not None]
    return sum(cached for cached, _ in told) / max(1, sum(tokens for _, tokens in told)) if told else None


def health(run: Run, cpu_s: float) -> ClientHealth:
    """Whether the client kept up, given the CPU time that it took."""
    late = np.array([record.late_s for record in run.records], np.float64) * 1000
    lags = np.array(run.lags_s, np.float64) * 1000
    return ClientHealth(
        timed_requests=run.num_timed,
        late_requests=sum(record.late_s > LATE_S for record in run.records),
        mean_lateness_ms=float(late.sum() / run.num_timed) if run.num_timed else 0.0,
        max_lateness_ms=float(late.max()) if len(late) else 0.0,
        p99_lag_ms=float(np.percentile(lags, 99)) if len(lags) else 0.0,
        # Where all fail at once, preparing them took longer than the run.
        cpu_share=min(cpu_s / run.duration_s, 1.0) if run.duration_s > 0 else 0.0,
    )


def timeline(run: Run) -> Timeline:
    """Each second of a run. A piece of an answer has an equal share of its tokens."""
    num_s = max(1, math.ceil(run.duration_s))
    tokens = np.zeros(num_s)
    change = np.zeros(num_s + 1, np.int64)
    for record in run.records:
        if not record.succeeded:
            continue
        change[min(int(record.sent_s - run.began_s), num_s)] += 1
        change[min(int(record.ended_s - run.began_s), num_s)] -= 1
        if record.times:
            seconds = np.minimum((np.array(record.times) - run.began_s).astype(np.int64), num_s - 1)
            np.add.at(tokens, seconds, record.output_tokens / len(record.times))
    return Timeline([int(n) for n in change[:num_s].cumsum()], [float(n) for n in tokens])


def _peak(records: Sequence[Record]) -> int:
    """The most requests in flight at once. One that ends when another begins is not beside it."""
    events = sorted([(r.sent_s, 1) for r in records] + [(r.ended_s, -1) for r in records])
    now = most = 0
    for _, change in events:
        now += change
        most = max(most, now)
    return most
