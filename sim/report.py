"""The metrics of a simulated policy.

    TTFT      time from arrival to the first token, in milliseconds
    TPOT      mean time between the tokens of a request, in milliseconds
    hits      share of all prompt tokens that were cached
    cv        coefficient of variation of the workers' busy time until the last arrival; 0 is perfect balance
    goodput   share of the requests that meet both limits of the objective

Pure.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import msgspec

from headrace.sim.simulation import JobRecord, Outcome


class Objective(msgspec.Struct, frozen=True):
    """The latency limits of a good answer, in milliseconds."""

    ttft_ms: float
    tpot_ms: float


class Centiles(msgspec.Struct, frozen=True):
    """Mean and percentiles of some values; 0 if there are none."""

    mean: float
    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Centiles:
        """The mean and the percentiles of `values` by the nearest-rank method; all 0 if there are none."""
        if not values:
            return cls(0.0, 0.0, 0.0, 0.0)
        ordered = sorted(values)
        p50, p95, p99 = (ordered[max(0, math.ceil(len(ordered) * part) - 1)] for part in (0.5, 0.95, 0.99))
        return cls(statistics.fmean(ordered), p50, p95, p99)


class PolicyReport(msgspec.Struct, frozen=True):
    """The metrics of one policy; see the module's docstring. `disk_share` and `peer_share` are the parts of `hit_share`
    that came from disks and from other workers. `span_s` is the time of the last arrival, and
    `utilization` the share of the time until then in which the workers were busy."""

    policy: str
    num_routers: int
    num_requests: int
    ttft_ms: Centiles
    tpot_ms: Centiles
    hit_tokens: int
    hit_share: float
    disk_share: float
    peer_share: float
    load_cv: float
    goodput: float
    utilization: float
    num_steps: int
    num_preemptions: int
    span_s: float
    image_ttft_ms: Centiles
    """Time to the first token of requests with images; 0 if there are none."""
    num_images_encoded: int


def report_of(policy: str, num_routers: int, outcome: Outcome, objective: Objective) -> PolicyReport:
    """Compute the metrics of a policy from the `outcome` of its simulation. `objective` says which answers are good."""
    records = outcome.records
    ttfts = [_ttft_ms(record) for record in records]
    tpots = [_tpot_ms(record) for record in records if record.num_tokens > 1]
    hits = sum(record.cached_tokens for record in records)
    num_prompt_tokens = sum(record.job.num_prompt_tokens for record in records)
    span_s = records[-1].arrived_s
    mean_busy_s = statistics.fmean(outcome.busy_s)
    good = sum(
        _ttft_ms(record) <= objective.ttft_ms and (record.num_tokens < 2 or _tpot_ms(record) <= objective.tpot_ms)
        for record in records
    )
    return PolicyReport(
        policy=policy,
        num_routers=num_routers,
        num_requests=len(records),
        ttft_ms=Centiles.of(ttfts),
        tpot_ms=Centiles.of(tpots),
        hit_tokens=hits,
        hit_share=hits / num_prompt_tokens,
        disk_share=sum(record.disk_tokens for record in records) / num_prompt_tokens,
        peer_share=sum(record.peer_tokens for record in records) / num_prompt_tokens,
        load_cv=statistics.pstdev(outcome.busy_s) / mean_busy_s if mean_busy_s else 0.0,
        goodput=good / len(records),
        utilization=mean_busy_s / span_s if span_s else 0.0,
        num_steps=outcome.num_steps,
        num_preemptions=outcome.num_preemptions,
        span_s=span_s,
        image_ttft_ms=Centiles.of([_ttft_ms(record) for record in records if record.job.image_places is not None]),
        num_images_encoded=outcome.num_images_encoded,
    )


def _ttft_ms(record: JobRecord) -> float:
    return 1000 * (record.first_token_s - record.arrived_s)


def _tpot_ms(record: JobRecord) -> float:
    return 1000 * (record.ended_s - record.first_token_s) / (record.num_tokens - 1)
