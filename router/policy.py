"""Which worker gets a request: the one with the least expected milliseconds.

Everything is counted in milliseconds of expected time, the one unit in which a cached prefix, a queue and a slow host
can be weighed against each other:

    cost_ms = queue_ms      waiting for a place in the batch
            + backlog_ms    prompts ahead of this one that are still to be computed there
            + prefill_ms    the part of this prompt that is not cached there
            + decode_ms     generating the answer, in a batch that this request makes larger by one, beside what is left
                            of the prompts there
            + eviction_ms   cached blocks that must give way, times the chance that somebody wanted them
            + pressure_ms   blocks that are missing altogether: somebody is preempted and computed again

Decided per request: there is no global switch between affinity and balance. A worker whose rates are not known yet is
taken to be as fast as the best of the others (it has to be tried to be learned); when nobody's are known, the stated
priors hold. Costs that differ by less than the noise are a tie, broken at random, so that several routers with the same
picture do not run in step.

Pure: the same request, candidates, time and random numbers give the same Placement.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

import msgspec


class Priors(msgspec.Struct, frozen=True, gc=False):
    """What is assumed where nothing is known yet. Each is stated with its unit."""

    prefill_tokens_per_s: float = 1000.0
    decode_step_ms: float = 30.0
    # Tokens of an answer, by which waiting for others to end is counted.
    answer_tokens: int = 128
    # Tokens of an answer whose slowing down is weighed against the time to its first one, unless max_tokens is lower.
    weighed_tokens: int = 128
    # Tokens of prompts that a worker computes for each token of a stream, as long as it has any.
    prompt_tokens_per_step: int = 128
    # A decode step takes twice the time of an idle one at this many sequences.
    batch_for_double_step: float = 32.0
    # Chance that a cached block that gives way would have been used again.
    reuse_chance: float = 0.1
    # A request goes to its session's worker if that costs at most this much more than the best.
    session_slack_ms: float = 250.0
    # Costs that differ by less are equal.
    noise_ms: float = 1.0


class LoadReport(msgspec.Struct, frozen=True, gc=False):
    """A worker's latest report; units as in worker.proto. All zero before the first one."""

    num_running: int = 0
    num_waiting: int = 0
    num_uncached_tokens: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_cached_blocks: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_step_ms: float = 0.0
    max_num_seqs: int = 0
    received_at_s: float = 0.0


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A worker that serves the request's model, as this router sees it.

    `num_booked_requests`, `num_booked_tokens` (uncached) and `num_booked_blocks` are of requests that this router
    placed there and that the latest report does not show yet.
    """

    worker_id: str
    load: LoadReport
    block_size: int
    takes_requests: bool = True
    num_booked_requests: int = 0
    num_booked_tokens: int = 0
    num_booked_blocks: int = 0


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    """What placement needs to know of a request. `num_prompt_tokens` counts resumed tokens too.

    Workers whose first token is expected within `max_ttft_ms` come before all others.
    """

    num_prompt_tokens: int
    max_new_tokens: int | None = None
    session_worker_id: str | None = None
    max_ttft_ms: float = math.inf


class CostTerms(msgspec.Struct, frozen=True, gc=False):
    """The terms of a worker's cost for one request, each in milliseconds."""

    queue_ms: float
    backlog_ms: float
    prefill_ms: float
    decode_ms: float
    eviction_ms: float
    pressure_ms: float
    total_ms: float

    @property
    def ttft_ms(self) -> float:
        """Expected time to the first token."""
        return self.queue_ms + self.backlog_ms + self.prefill_ms


class PlacementReason(enum.Enum):
    """What decided. The value is the label in metrics."""

    ONLY = "only"  # there was no other worker to choose
    PREFIX = "prefix"  # the cheapest, and none has more of the prompt cached
    LOAD = "load"  # the cheapest although another one has more cached, or nobody has anything
    SESSION = "session"  # the worker of the session, near enough to the cheapest


# The fields of CostTerms, in their order: what is computed for every candidate of every request.
_Terms: TypeAlias = tuple[float, float, float, float, float, float, float]
_TOTAL = 6
# Of what a worker has learned of its rates, how much counts beside the median of all.
_OWN_SHARE = 0.1


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A decision with its grounds: `cost` is that of the chosen one; of all that were weighed, in one order,
    `worker_ids`, `terms` of the cost and `num_cached_tokens`."""

    worker_id: str
    reason: PlacementReason
    predicted_cached_tokens: int
    cost: CostTerms
    worker_ids: Sequence[str]
    terms: Sequence[_Terms]
    num_cached_tokens: Sequence[int]

    @property
    def costs(self) -> dict[str, CostTerms]:
        """The cost at each that was weighed. Made when asked for."""
        return {worker_id: CostTerms(*terms) for worker_id, terms in zip(self.worker_ids, self.terms, strict=True)}

    @property
    def cached_tokens(self) -> dict[str, int]:
        """How many tokens of the prompt are cached at each that was weighed. Made when asked for."""
        return dict(zip(self.worker_ids, self.num_cached_tokens, strict=True))


def place(
    request: RequestFacts,
    candidates: Sequence[Candidate],
    cached_blocks: Mapping[str, int],
    now_s: float,
    rng: random.Random,
    *,
    excluded: Collection[str] = (),
    priors: Priors = Priors(),  # noqa: B008  frozen
) -> Placement | None:
    """Choose a worker, or None if no candidate takes requests and is not excluded.

    `cached_blocks` holds, for each candidate, the number of blocks from the start of the prompt that are found there.
    `excluded` names the workers that failed for this request. Times are on the clock of `LoadReport.received_at_s`.
    """
    open_to = [c for c in candidates if c.takes_requests and c.worker_id not in excluded]
    if not open_to:
        return None
    worker_ids = [candidate.worker_id for candidate in open_to]
    most_tokens = max(request.num_prompt_tokens - 1, 0)  # the last one is always computed, for its logits
    cached_tokens = [cached_blocks[c.worker_id] * c.block_size for c in open_to]
    if max(cached_tokens) > most_tokens:
        cached_tokens = [min(cached, most_tokens) for cached in cached_tokens]
    terms = _weighed(request, open_to, cached_tokens, now_s, priors)
    chosen, reason = _choose(request, worker_ids, terms, cached_tokens, rng, priors)
    cost = CostTerms(*terms[chosen])
    return Placement(worker_ids[chosen], reason, cached_tokens[chosen], cost, worker_ids, terms, cached_tokens)


def _weighed(
    request: RequestFacts, candidates: Sequence[Candidate], cached_tokens: Sequence[int], now_s: float, priors: Priors
) -> list[_Terms]:
    """What the request is expected to cost at each candidate, term by term.

    One loop over all, with what they have in common outside of it: a request pays for each line once for each worker.
    """
    answer = priors.weighed_tokens
    if request.max_new_tokens is not None and request.max_new_tokens < answer:
        answer = request.max_new_tokens
    num_prompt_tokens, double = request.num_prompt_tokens, priors.batch_for_double_step
    half_answer = priors.answer_tokens * 0.5
    weighed: list[_Terms] = []
    for candidate, cached, tokens_per_s, decode_step_ms in zip(
        candidates, cached_tokens, *believed_rates(candidates, priors), strict=True
    ):
        load = candidate.load
        max_num_seqs = load.max_num_seqs
        ms_per_token = 1000.0 / tokens_per_s
        miss = num_prompt_tokens - cached

        # The reported step is that of the reported batch; ours comes on top of it and of what is booked.
        batch = load.num_running + candidate.num_booked_requests
        step_ms = decode_step_ms * (double + batch + 1) / (double + (load.num_running or 1))
        decode_ms = answer * step_ms

        # Places come free as answers end; those in the batch are half through on average.
        requests = batch + load.num_waiting
        queue_ms = 0.0
        if max_num_seqs and requests >= max_num_seqs:
            queue_ms = (requests + 1 - max_num_seqs) / max_num_seqs * (half_answer * step_ms)

        # What was reported has been worked on since.
        backlog_ms = load.num_uncached_tokens * ms_per_token - (now_s - load.received_at_s) * 1000.0
        if backlog_ms < 0.0:
            backlog_ms = 0.0
        backlog_ms += candidate.num_booked_tokens * ms_per_token

        # Workers compute the shortest rest first: each request there delays this one by at most what it takes itself.
        prefill_ms = miss * ms_per_token
        ahead_ms = (requests or 1) * prefill_ms
        if backlog_ms > ahead_ms:
            # What is behind it slows its answer down. By half, for it may be shorter than is supposed here, and what it
            # waits for may be a prefix that it shares.
            behind_ms = 0.5 * (backlog_ms - ahead_ms)
            decode_ms += min(behind_ms, answer * priors.prompt_tokens_per_step * ms_per_token)
            backlog_ms = ahead_ms

        eviction_ms = pressure_ms = 0.0
        if load.num_blocks:
            size = candidate.block_size
            needed = (miss + answer + size - 1) // size
            free = load.num_free_blocks - candidate.num_booked_blocks
            empty = free - load.num_cached_blocks  # at least: cached blocks that are in use are not among the free
            displaced = needed - empty if empty > 0 else needed
            if displaced > 0:
                eviction_ms = displaced * size * ms_per_token * priors.reuse_chance
            short = needed - free if free > 0 else needed
            if short > 0:
                pressure_ms = short * size * ms_per_token + short / needed * priors.weighed_tokens * step_ms
            # It is not begun before its prompt fits, and prompts that are there have their blocks still to come.
            missing = short + load.num_uncached_tokens // size
            if missing > 0:
                queue_ms = max(queue_ms, _wait_for_blocks_ms(missing - answer // size, load, half_answer * step_ms))
        total_ms = queue_ms + backlog_ms + prefill_ms + decode_ms + eviction_ms + pressure_ms
        weighed.append((queue_ms, backlog_ms, prefill_ms, decode_ms, eviction_ms, pressure_ms, total_ms))
    return weighed


def _wait_for_blocks_ms(num_missing: int, load: LoadReport, half_answer_ms: float) -> float:
    """How long until so many blocks come free, as the requests that hold the others end."""
    held = load.num_blocks - load.num_free_blocks
    return min(num_missing / held, 1.0) * half_answer_ms if num_missing > 0 and held > 0 else 0.0


def has_room(candidate: Candidate) -> bool:
    """Whether a worker takes a request into its batch, or into the short queue that keeps the batch full."""
    load = candidate.load
    if not load.max_num_seqs:
        return True  # nothing is known of it yet
    short_queue = 1 + load.max_num_seqs // 16
    # What waits there although the batch has seats waits for KV blocks.
    if load.num_waiting >= short_queue:
        return False
    return load.num_running + load.num_waiting + candidate.num_booked_requests < load.max_num_seqs + short_queue


def predicted_wait_ms(num_ahead: int, candidates: Sequence[Candidate], priors: Priors) -> float:
    """How long a request waits behind `num_ahead` others until one of these workers, all of them full, has room.

    Each ends max_num_seqs answers in the time of one; 0 when none of them says how many it takes.
    """
    ended_per_ms = 0.0
    for candidate, step_ms in zip(candidates, believed_rates(candidates, priors)[1], strict=True):
        ended_per_ms += candidate.load.max_num_seqs / (priors.answer_tokens * step_ms)
    return (num_ahead + 1) / ended_per_ms if ended_per_ms else 0.0


def believed_rates(candidates: Sequence[Candidate], priors: Priors) -> tuple[list[float], list[float]]:
    """The rates to count with: of each candidate its prefill tokens a second, and its milliseconds of a decode step.

    What a worker has learned says more about the prompts that it happened to have than about its host: among equal
    hosts it differs fourfold. So on a scale of ratios a tenth of it counts, and nine tenths the median of all; who has
    learned nothing is taken for the best. (Compared in docs/simulation.md.)
    """
    prefill = _drawn_to_median([c.load.prefill_tokens_per_s for c in candidates])
    step_ms = _drawn_to_median([c.load.decode_step_ms for c in candidates])
    if not all(prefill):
        best = max(prefill) or priors.prefill_tokens_per_s
        prefill = [rate or best for rate in prefill]
    if not all(step_ms):
        best = min(filter(None, step_ms), default=priors.decode_step_ms)
        step_ms = [rate or best for rate in step_ms]
    return prefill, step_ms


def _drawn_to_median(rates: Sequence[float]) -> list[float]:
    """Each rate drawn to the median of those that are known; 0 stays 0."""
    known = sorted(rates)
    num_unknown = known.count(0.0)
    if num_unknown == len(known):
        return known
    part_of_median = known[(num_unknown + len(known)) // 2] ** (1.0 - _OWN_SHARE)
    return [rate**_OWN_SHARE * part_of_median for rate in rates]


def _choose(
    request: RequestFacts,
    worker_ids: Sequence[str],
    terms: Sequence[_Terms],
    cached_tokens: Sequence[int],
    rng: random.Random,
    priors: Priors,
) -> tuple[int, PlacementReason]:
    """The number of the chosen one. Who keeps to the request's bound comes before all others."""
    eligible: Sequence[int] = range(len(terms))
    if request.max_ttft_ms != math.inf:
        in_time = [number for number in eligible if CostTerms(*terms[number]).ttft_ms <= request.max_ttft_ms]
        eligible = in_time or eligible
    if len(eligible) == 1:
        return eligible[0], PlacementReason.ONLY
    totals = [terms[number][_TOTAL] for number in eligible]
    best_ms = min(totals)
    if request.session_worker_id in worker_ids:
        session = worker_ids.index(request.session_worker_id)
        if session in eligible and terms[session][_TOTAL] <= best_ms + priors.session_slack_ms:
            return session, PlacementReason.SESSION
    most_ms = best_ms + priors.noise_ms
    ties = [number for number, total_ms in zip(eligible, totals, strict=True) if total_ms <= most_ms]
    chosen = ties[0] if len(ties) == 1 else rng.choice(ties)
    is_longest = cached_tokens[chosen] == max(cached_tokens) > 0
    return chosen, PlacementReason.PREFIX if is_longest else PlacementReason.LOAD
