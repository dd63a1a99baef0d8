"""A measured run and the same requests simulated: which requests count, and their figures. Pure.

Both sides get the same treatment, which is that of `headrace plan`: requests count that come after the beginning, when
caches and batches are empty, and until the last conversation begins.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import msgspec

from headrace.bench.datasets import Conversation
from headrace.bench.record import Record
from headrace.bench.results import Result
from headrace.plan.objectives import percentile
from headrace.plan.search import counts_from_s
from headrace.sim.simulation import JobRecord
from headrace.sim.trace import Job


class Tokens(NamedTuple):
    """The token ids of a request's prompt and of its answer."""

    prompt: Sequence[int]
    answer: Sequence[int]


class Sample(NamedTuple):
    """A request, measured or simulated. `at_s` is when it came, in seconds after the beginning. It has no times if it
    was not answered, and no `tpot_ms` if its answer has one token."""

    at_s: float
    ttft_ms: float | None
    tpot_ms: float | None
    cached_tokens: int
    prompt_tokens: int

    def is_good(self, limits_ms: Mapping[str, float]) -> bool:
        """Whether it was answered within the limits."""
        if self.ttft_ms is None or self.ttft_ms > limits_ms["ttft"]:
            return False
        return self.tpot_ms is None or self.tpot_ms <= limits_ms["tpot"]


class Figures(msgspec.Struct):
    """What is compared. Rates are per second, times in milliseconds, shares from 0 to 1."""

    goodput: float
    ttft_p50: float
    ttft_p95: float
    tpot_mean: float
    tpot_p95: float
    hit_share: float
    num_refused: int


class Side(NamedTuple):
    """The requests of one run that count, and for how many seconds such requests came."""

    samples: Sequence[Sample]
    seconds: float


def counted(samples: Iterable[Sample], starts_s: Sequence[float], settle_s: float) -> Side:
    """Those of a run whose conversations begin at `starts_s`. Conversations have become as many as they will be after
    `settle_s`."""
    first_s, last_s = min(starts_s), max(starts_s)
    begin_s = counts_from_s(first_s, last_s, settle_s)
    kept = [sample for sample in samples if begin_s <= sample.at_s <= last_s]
    return Side(kept, max(last_s - begin_s, 1e-3))


def measured(result: Result) -> list[Sample]:
    """The requests that a client has sent."""
    return [_of_client(record, result.run.began_s) for record in result.run.records]


def _of_client(record: Record, began_s: float) -> Sample:
    at_s = record.planned_s - began_s
    if not record.succeeded or not record.times:
        return Sample(at_s, None, None, 0, record.input_tokens)
    tpot_ms = 1000 * record.tpot_s if record.output_tokens > 1 else None
    return Sample(at_s, 1000 * record.ttft_s, tpot_ms, record.cached_tokens or 0, record.input_tokens)


def simulated(records: Sequence[JobRecord]) -> list[Sample]:
    """The requests of a simulation."""
    return [_of_simulation(record) for record in records]


def _of_simulation(record: JobRecord) -> Sample:
    prompt_tokens = record.job.num_prompt_tokens
    if record.is_refused:
        return Sample(record.arrived_s, None, None, 0, prompt_tokens)
    tpot_ms = None
    if record.num_tokens > 1:
        tpot_ms = 1000 * (record.ended_s - record.first_token_s) / (record.num_tokens - 1)
    ttft_ms = 1000 * (record.first_token_s - record.arrived_s)
    return Sample(record.arrived_s, ttft_ms, tpot_ms, record.cached_tokens, prompt_tokens)


def figures(sides: Sequence[Side], limits_ms: Mapping[str, float]) -> Figures:
    """The figures of several runs together."""
    samples = [sample for side in sides for sample in side.samples]
    answered = [sample for sample in samples if sample.ttft_ms is not None]
    ttfts = [sample.ttft_ms for sample in answered if sample.ttft_ms is not None]
    tpots = [sample.tpot_ms for sample in answered if sample.tpot_ms is not None]
    return Figures(
        goodput=sum(sample.is_good(limits_ms) for sample in samples) / sum(side.seconds for side in sides),
        ttft_p50=percentile(ttfts, 50),
        ttft_p95=percentile(ttfts, 95),
        tpot_mean=statistics.fmean(tpots) if tpots else 0.0,
        tpot_p95=percentile(tpots, 95),
        hit_share=sum(sample.cached_tokens for sample in answered)
        / max(1, sum(sample.prompt_tokens for sample in answered)),
        num_refused=len(samples) - len(answered),
    )


class Asked(NamedTuple):
    """The requests of a measured run, for the simulator. `reuse` is the share of answers with which the next turn's
    prompt begins, token by token; 1 if no turn follows another."""

    jobs: Sequence[Job]
    starts_s: Sequence[float]
    reuse: float


def asked(result: Result, conversations: Sequence[Conversation], tokens: Callable[[Record], Tokens]) -> Asked:
    """The requests of a run that were answered. A prompt has the tokens that it had, except where it repeats an earlier
    answer: the simulator's answers have tokens of their own. So the simulator finds in its cache what the server
    could find."""
    places = {
        hash(turn.parts): (number, place)
        for number, conversation in enumerate(conversations)
        for place, turn in enumerate(conversation.turns)
    }
    by_place = {places[record.prompt_id]: record for record in result.run.records}
    jobs: list[Job] = []
    starts_s: list[float] = []
    found: list[tuple[int, int]] = []
    for number, conversation in enumerate(conversations):
        said: list[int] = []
        simulated_said: list[int] = []
        previous: Job | None = None
        for place, turn in enumerate(conversation.turns):
            record = by_place.get((number, place))
            if place == 0 and record is not None:
                starts_s.append(record.planned_s - result.run.began_s)
            if record is None or not record.succeeded:
                break
            prompt, answer = tokens(record)
            shared = _num_equal(said, prompt)
            if previous is not None:
                found.append((max(0, shared - (len(said) - previous.num_output_tokens)), previous.num_output_tokens))
            simulated_prompt = [*simulated_said[:shared], *prompt[shared:]]
            segments = tuple((token, sum(1 for _ in run)) for token, run in itertools.groupby(simulated_prompt))
            previous = Job(
                len(jobs),
                starts_s[-1] if place == 0 else 0.0,
                segments,
                max(1, len(answer)),
                (),
                None if previous is None else previous.number,
                turn.think_s if place else 0.0,
            )
            jobs.append(previous)
            said = [*prompt, *answer]
            simulated_said = [*simulated_prompt, *([previous.answer_token_id] * len(answer))]
    repeated = sum(length for _, length in found)
    return Asked(jobs, starts_s, sum(count for count, _ in found) / repeated if repeated else 1.0)


def _num_equal(left: Sequence[int], right: Sequence[int]) -> int:
    """The number of equal tokens at the beginning of both."""
    return next(
        (place for place, (ours, theirs) in enumerate(zip(left, right, strict=False)) if ours != theirs),
        min(len(left), len(right)),
    )
