"""Finds the smallest fleet that meets the objectives under a load, and the load at which it no longer does.

A trial simulates a fleet under a load with several seeds: the real scheduler, KV cache, policy and reports, with steps
that take as long as the calibration says. Trials are remembered, because searches meet the same ones again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from headrace.plan.fleet import MAX_WAIT_S, Fleet
from headrace.plan.load import Load, chain_ends
from headrace.plan.objectives import Limit, Objectives, percentile, time_text
from headrace.protos.load_report import kv_use
from headrace.sim.router import POLICIES
from headrace.sim.simulation import JobRecord, Simulation
from headrace.sim.step_cost import shape_of

# The beginning of a run is left out, because caches and batches are empty then.
_WARM_UP_SHARE = 0.15
# Answers stay behind arrivals: the number in flight grows by more than chance, and by this share of the arrivals.
_BEHIND = 0.05
# The knee is found to this share of the load.
_KNEE_WIDTH = 0.04
_MAX_FACTOR = 64.0
_HOPELESS = 1.5
# A larger share of refused requests misses the objectives.
_REFUSED = 0.01
# A KV cache that is fuller than this counts as full, and workers that are busier as fully busy.
_FULL, _BUSY = 0.95, 0.9
# Without an objective, nobody waits longer for a token.
_UNUSABLE_TOKEN_S = 1.0
# Larger batches are rare, whatever their limit.
_LARGE_BATCH = 32


class Figures(NamedTuple):
    """Percentiles 50, 95 and 99 in seconds, and the one of the objective."""

    p50: float
    p95: float
    p99: float
    of_limit: float

    @classmethod
    def of(cls, values: Sequence[float], limit: Limit | None) -> Figures:
        """The figures of `values`; 0 if there are none."""
        p50, p95, p99 = (percentile(values, percent) for percent in (50.0, 95.0, 99.0))
        return cls(p50, p95, p99, percentile(values, limit.percentile) if limit is not None else 0.0)


@dataclass(frozen=True, slots=True)
class Trial:
    """The performance of a fleet under a load. Shares are from 0 to 1; rates are per second."""

    fleet: Fleet
    factor: float
    """The load, as a multiple of the planned one."""
    per_s: float
    """Requests that were answered in a second."""
    tokens_per_s: float
    """Tokens of answers."""
    ttft: Figures
    tpot: Figures
    good_share: float
    """Share of the requests that meet both limits."""
    busy: float
    """Share of the time in which workers compute."""
    prompt_share: float
    """Share of that time for prompts."""
    hit_share: float
    """Share of the tokens of prompts that were found in a cache."""
    kv_used: float
    """Largest share of a worker's KV cache that running requests held."""
    batch: int
    """Largest number of requests in a worker's batch."""
    preemptions: int
    refused_share: float
    """Share of the requests that were refused, because they would have waited too long."""
    num_requests: int
    broken: tuple[str, ...]
    """What misses the objectives, as sentences; empty if the fleet meets them."""

    @property
    def is_good(self) -> bool:
        """Whether it meets the objectives."""
        return not self.broken

    def why(self) -> str:
        """A sentence that says what the fleet lacks, if it misses an objective."""
        most = self.fleet.batch
        if self.kv_used >= _FULL or self.preemptions:
            return f"the KV cache is full: running requests hold up to {self.kv_used:.0%} of it"
        if self.batch >= most:
            return f"batches are full: {most} requests (--max-num-seqs)"
        if self.busy >= _BUSY:
            kind = (
                f"{self.prompt_share:.0%} of it for prompts" if self.prompt_share < 0.995 else "all of it for prompts"
            )
            return f"workers compute {self.busy:.0%} of the time, {kind}"
        return f"requests disturb each other's steps: workers compute {self.busy:.0%} of the time"


class Search:
    """Trials of one load. `count` requests are simulated with each of `seeds`; `told` is called before each trial."""

    def __init__(
        self,
        load: Load,
        objectives: Objectives,
        seeds: Sequence[int],
        count: int,
        told: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._load = load
        self._objectives = objectives
        self._seeds = seeds
        self._count = count
        self._told = told
        self._trials: dict[tuple[Fleet, float], Trial] = {}

    def trial(self, fleet: Fleet, factor: float = 1.0) -> Trial:
        """Simulate a fleet under the load multiplied by `factor`."""
        known = self._trials.get((fleet, factor))
        if known is None:
            self._told(f"{fleet.kind.name}: {fleet.hosts} host{'s' * (fleet.hosts > 1)} at {factor:.3g} x the load")
            known = self._trials[fleet, factor] = self._simulated(fleet, factor)
        return known

    def smallest(self, fleet: Fleet, most_hosts: int) -> Trial | None:
        """The trial of the fewest hosts that meet the objectives; None if `most_hosts` do not."""
        least = min(least_hosts(fleet, self._load, self._objectives), most_hosts)
        low, high = least - 1, least
        while not (found := self.trial(fleet.with_hosts(high))).is_good:
            if high >= most_hosts:
                return None
            low, high = high, min(2 * high, most_hosts)
        while high - low > 1:
            middle = (low + high) // 2
            if (tried := self.trial(fleet.with_hosts(middle))).is_good:
                high, found = middle, tried
            else:
                low = middle
        return found

    def knee(self, fleet: Fleet) -> tuple[Trial | None, Trial | None]:
        """The trial of the highest load that the fleet can carry, and the trial of the lowest load that it cannot; None
        if there is none up to `_MAX_FACTOR` times the load."""
        low, high = 0.0, 1.0
        good: Trial | None = None
        bad: Trial | None = None
        while bad is None:
            tried = self.trial(fleet, high)
            if not tried.is_good:
                bad = tried
            elif high >= _MAX_FACTOR:
                return tried, None
            else:
                good, low, high = tried, high, 2 * high
        while high - low > _KNEE_WIDTH * high:
            middle = round((low + high) / 2, 4)
            tried = self.trial(fleet, middle)
            if tried.is_good:
                good, low = tried, middle
            else:
                bad, high = tried, middle
            if high < 1 / _MAX_FACTOR:
                break
        return good, bad

    def least_memory(self, fleet: Fleet) -> Trial:
        """The trial of the smallest KV cache with which a fleet that meets the objectives still does, to a factor of
        two."""
        best = self.trial(fleet)
        while True:
            less = replace(fleet, kv_bytes=best.fleet.kv_bytes_of_worker // 2)
            if less.blocks()[0] < 2:
                return best
            try:
                tried = self.trial(less)
            except DoesNotFitError:
                return best
            if not tried.is_good or tried.preemptions:
                return best
            best = tried

    def _is_hopeless(self, run: _Run) -> bool:
        """Whether a run misses a limit by so much that no other seed meets it."""
        if run.grows:
            return True
        limits = self._objectives
        served = [record for record in run.records if not record.is_refused]
        ttfts = [record.first_token_s - record.arrived_s for record in served]
        tpots = [_tpot_s(record) for record in served if record.num_tokens > 1]
        return any(
            limit is not None and percentile(values, limit.percentile) > _HOPELESS * limit.seconds
            for values, limit in ((ttfts, limits.ttft), (tpots, limits.tpot))
        )

    def _simulated(self, fleet: Fleet, factor: float) -> Trial:
        load = self._load.scaled(factor) if factor != 1.0 else self._load
        # Half of the time is for conversations to become as many as they will be.
        settle_s = load.settle_s(longest_token_s(fleet, self._objectives))
        count = max(self._count, round(2 * settle_s * load.offered_per_s))
        runs: list[_Run] = []
        for seed in self._seeds:
            runs.append(_run(fleet, load, count, seed, settle_s))
            if self._is_hopeless(runs[-1]):
                break  # other seeds would not save it
        all_records = [record for run in runs for record in run.records]
        records = [record for record in all_records if not record.is_refused]
        refused = 1 - len(records) / len(all_records)
        ttfts = [record.first_token_s - record.arrived_s for record in records]
        tpots = [_tpot_s(record) for record in records if record.num_tokens > 1]
        limits = self._objectives
        ttft, tpot = Figures.of(ttfts, limits.ttft), Figures.of(tpots, limits.tpot)
        broken = []
        if limits.ttft is not None and ttft.of_limit > limits.ttft.seconds:
            broken.append(_missed("time to the first token", ttft.of_limit, limits.ttft))
        if limits.tpot is not None and tpot.of_limit > limits.tpot.seconds:
            broken.append(_missed("time a token", tpot.of_limit, limits.tpot))
        if 2 * sum(run.grows for run in runs) > len(runs):
            broken.append("the queue grows: requests come faster than they are answered")
        if refused > _REFUSED:
            broken.append(f"{refused:.0%} of the requests would wait for more than {MAX_WAIT_S:g} s and are refused")
        prompt_tokens = sum(record.job.num_prompt_tokens for record in records)
        cached = sum(record.cached_tokens for record in records)
        num_tokens = sum(record.num_tokens for record in records)
        span_s = sum(run.span_s for run in runs)
        busy = statistics.fmean(run.busy for run in runs)
        return Trial(
            fleet=fleet,
            factor=factor,
            per_s=len(records) / span_s if span_s else 0.0,
            tokens_per_s=num_tokens / span_s if span_s else 0.0,
            ttft=ttft,
            tpot=tpot,
            good_share=sum(_is_good(record, limits) for record in records) / len(all_records),
            busy=busy,
            prompt_share=_prompt_share(fleet, prompt_tokens - cached, busy * span_s * fleet.workers),
            hit_share=cached / max(prompt_tokens, 1),
            kv_used=max(run.kv_used for run in runs),
            batch=max(run.batch for run in runs),
            preemptions=sum(run.preemptions for run in runs),
            refused_share=refused,
            num_requests=len(all_records),
            broken=tuple(broken),
        )


class DoesNotFitError(Exception):
    """Requests do not fit into a worker's KV cache, or a load into the hosts. The message says which."""


def least_hosts(fleet: Fleet, load: Load, objectives: Objectives) -> int:
    """Fewer hosts than this do not carry the load, by the costs of steps alone: half of what its tokens cost in the
    cheapest steps, because prompts and streams share steps."""
    calibration = fleet.kind.calibration
    token_ms = min(calibration.steps.milliseconds(shape_of([(0, 1)] * batch)) / batch for batch in _powers(fleet.batch))
    prompt_ms = min(
        calibration.steps.milliseconds(shape_of([(0, size)])) / size
        for size in _powers(calibration.layout.max_num_batched_tokens)
        if size > 1
    )
    prompt, answer = load.mean_tokens
    per_s = load.offered_per_s
    if load.users is not None:
        ttft_s = objectives.ttft.seconds if objectives.ttft is not None else MAX_WAIT_S
        token_s = objectives.tpot.seconds if objectives.tpot is not None else _UNUSABLE_TOKEN_S
        per_s = load.users / (load.think_s + 2 * (ttft_s + answer * token_s))
    if not math.isfinite(per_s):
        return 1
    busy = 0.5 * per_s * (prompt * prompt_ms + answer * token_ms) / 1000
    return max(1, math.ceil(busy / calibration.layout.workers))


def _powers(most: int) -> list[int]:
    """The powers of two up to `most`."""
    return [1 << place for place in range(most.bit_length())]


class _Run(NamedTuple):
    records: Sequence[JobRecord]
    """Of the time that counts."""
    span_s: float
    busy: float
    kv_used: float
    batch: int
    preemptions: int
    grows: bool


def _run(fleet: Fleet, load: Load, count: int, seed: int, settle_s: float) -> _Run:
    """One simulation. Raises DoesNotFitError."""
    settings = fleet.settings(seed)
    worker = settings.worker
    jobs = load.jobs(count, seed)
    longest = max(jobs, key=lambda job: job.num_prompt_tokens + job.num_output_tokens)
    if not worker.holds(longest):
        size = longest.num_prompt_tokens + longest.num_output_tokens
        raise DoesNotFitError(
            f"a request has {size:,} tokens, and the KV cache of a worker holds {worker.kv_tokens:,}; "
            "give more --kv-cache-gb, or shorter prompts"
        )
    watched = _Watched()
    hashed = [job.hashed(worker.block_size) for job in jobs]
    simulation = Simulation(hashed, POLICIES["headrace"], settings, lambda: watched.look(simulation))
    outcome = simulation.run()
    records = outcome.records
    if load.users is not None:  # until the first user has asked everything
        ends = chain_ends(jobs)
        last_s = min(record.arrived_s for record in records if record.job.number in ends)
    else:
        last_s = max(record.arrived_s for record in records if record.job.follows is None)
    begin_s = counts_from_s(records[0].arrived_s, last_s, settle_s)
    counted = [record for record in records if begin_s <= record.arrived_s <= last_s] or list(records)
    end_s = records[-1].arrived_s
    busy = statistics.fmean(outcome.busy_s) / end_s if end_s else 1.0
    return _Run(
        counted,
        max(last_s - begin_s, 1e-3),
        min(busy, 1.0),
        watched.kv_used,
        watched.batch,
        outcome.num_preemptions,
        load.users is None and _grows(records, last_s),
    )


def longest_token_s(fleet: Fleet, objectives: Objectives) -> float:
    """About the longest time of a token in a fleet that meets the objectives."""
    full_s = fleet.kind.calibration.decode_ms(min(fleet.batch, _LARGE_BATCH)) / 1000
    return full_s if objectives.tpot is None else min(full_s, objectives.tpot.seconds)


def counts_from_s(first_s: float, last_s: float, settle_s: float) -> float:
    """The time from which requests count, if they come from `first_s` to `last_s`, and conversations have become as
    many as they will be after `settle_s`: not those of the beginning, but half of the time at least."""
    share = max(_WARM_UP_SHARE, min(0.5, settle_s / max(last_s - first_s, 1e-3)))
    return first_s + share * (last_s - first_s)


class _Watched:
    """The highest utilisation of workers, updated whenever a request ends."""

    def __init__(self) -> None:
        self.kv_used = 0.0
        self.batch = 0

    def look(self, simulation: Simulation) -> None:
        """Update from the state of all workers."""
        for worker in simulation.workers:
            cache = worker.scheduler.kv_cache
            self.kv_used = max(self.kv_used, kv_use(cache.num_blocks, cache.num_free_blocks))
            self.batch = max(self.batch, len(worker.scheduler.running))


def _grows(records: Sequence[JobRecord], last_s: float) -> bool:
    """Whether more requests are in flight at `last_s`, until when they come, than halfway, by more than chance."""
    middle_s = (records[0].arrived_s + last_s) / 2
    in_middle = sum(record.arrived_s <= middle_s < record.ended_s for record in records)
    at_end = sum(record.arrived_s <= last_s < record.ended_s for record in records)
    return at_end > in_middle + 2 * math.sqrt(max(in_middle, 1)) + _BEHIND * len(records) / 2


def _tpot_s(record: JobRecord) -> float:
    return (record.ended_s - record.first_token_s) / (record.num_tokens - 1)


def _is_good(record: JobRecord, limits: Objectives) -> bool:
    ttft_s = record.first_token_s - record.arrived_s
    is_late = limits.ttft is not None and ttft_s > limits.ttft.seconds
    is_slow = limits.tpot is not None and record.num_tokens > 1 and _tpot_s(record) > limits.tpot.seconds
    return not (is_late or is_slow)


def _missed(name: str, seconds: float, limit: Limit) -> str:
    return f"{name}: p{limit.percentile:g} is {time_text(seconds)}, above {time_text(limit.seconds)}"


def _prompt_share(fleet: Fleet, num_tokens: int, busy_s: float) -> float:
    """The share of the busy time that so many tokens of prompts take, in steps of 256."""
    cost = fleet.kind.calibration.steps
    step_ms = cost.milliseconds(shape_of([(0, 256)])) - cost.milliseconds(shape_of([(0, 8)]))
    return min(1.0, num_tokens * step_ms / 248 / 1000 / busy_s) if busy_s > 0 else 0.0
