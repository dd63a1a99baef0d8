"""Chooses the worker with the lowest expected cost for a request.

All costs are in milliseconds of expected time, so that a cached prefix, a queue and a slow host are comparable:

    cost_ms = queue_ms      wait for a place in the batch
            + backlog_ms    computation of earlier prompts at the worker
            + prefill_ms    computation of the uncached part of this prompt
            + decode_ms     generation of the answer, in a batch that is larger by this request, together with the
                            remaining prompts
            + eviction_ms   cached blocks that must be evicted, times the probability that they are needed again, which
                            is higher for those that give way to copies of another worker's blocks
            + pressure_ms   missing blocks: another request is preempted and computed again
            + adapter_ms    time to read the request's LoRA adapter into memory
            + transfer_ms   time to fetch cached blocks from the disk or another worker, where that saves computation
            + image_ms      time to encode the images of the uncached part of this prompt, after those that wait there

The trade-off between cache affinity and balance is made for each request; there is no global switch. A worker with
unknown rates is assumed to be as fast as the best of the others, because it must get requests before its rates can be
learned. If no rates are known, the priors apply. Costs that differ by less than the noise are a tie, which is broken at
random, so that several routers with the same view do not all choose the same worker.

If several routers place requests on the same workers, none of them knows the others' latest placements. So a placement
has a belief about its worker's load, and how wrong the belief may be before another worker would be better. A worker
with more work than that returns the request (docs/decisions/placement.md#several-routers).

Pure: the same request, candidates, time and random numbers give the same Placement.
"""

from __future__ import annotations

import enum
import math
import random
from collections.abc import Sequence
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from headrace.protos.inference_pb2 import Belief as BeliefMessage
from headrace.router.placement.bookings import Booking
from headrace.router.placement.candidates import Candidates, Columns, Places, Values
from headrace.router.placement.rates import Priors, believed_rates
from headrace.router.placement.transfers import Moved, Transfers, worth_moving

# How many times workers may return one request; after that it stays where it is placed. In simulated bursts of ten
# requests at eight routers, four times were not enough (docs/decisions/placement.md#several-routers).
MAX_GIVEN_BACK = 8
# If workers are reserved for long prompts (docs/decisions/placement.md), a prompt is long if computing its uncached
# part is expected to take more milliseconds than this.
LONG_PROMPT_MS = 1000.0
_TYPICAL_TOKENS = 1000


class Belief(msgspec.Struct, frozen=True, gc=False):
    """The load that a placement assumed at its worker: `num_requests` and `num_uncached_tokens`, and the cost of each
    additional one for the request. The belief holds unless the additional work costs more than `slack_ms`, which is
    infinite if there is no other worker."""

    num_requests: int
    num_uncached_tokens: int
    ms_per_request: float
    ms_per_token: float
    slack_ms: float


class RequestFacts(msgspec.Struct, frozen=True, gc=False):
    """The properties of a request that placement needs. `num_prompt_tokens` includes resumed tokens.

    Workers with an expected first token within `max_ttft_ms` are preferred to all others.
    """

    num_prompt_tokens: int
    max_new_tokens: int | None = None
    session_worker_id: str | None = None
    max_ttft_ms: float = math.inf
    image_places: Places | None = None
    """The places of image tokens in the prompt, rising; None if there are none."""


_Ms = TypeVar("_Ms", float, Values)


class CostTerms(NamedTuple, Generic[_Ms]):
    """The terms of the cost of one request, each in milliseconds: at one worker (numbers), or at all candidates (an
    array for each term)."""

    queue_ms: _Ms
    backlog_ms: _Ms
    prefill_ms: _Ms
    decode_ms: _Ms
    eviction_ms: _Ms
    pressure_ms: _Ms
    adapter_ms: _Ms
    transfer_ms: _Ms
    image_ms: _Ms

    @property
    def total_ms(self) -> _Ms:
        """The cost by which workers are compared: the sum of all terms, in milliseconds."""
        return (
            self.queue_ms
            + self.backlog_ms
            + self.prefill_ms
            + self.decode_ms
            + self.eviction_ms
            + self.pressure_ms
            + self.adapter_ms
            + self.transfer_ms
            + self.image_ms
        )

    @property
    def ttft_ms(self) -> _Ms:
        """The expected milliseconds until the first token: the terms that the request itself waits for."""
        prompt_ms = self.queue_ms + self.backlog_ms + self.prefill_ms
        return prompt_ms + self.adapter_ms + self.transfer_ms + self.image_ms


class PlacementReason(enum.Enum):
    """The reason for a placement. The value is the label in metrics."""

    ONLY = "only"  # there was no other worker to choose
    PREFIX = "prefix"  # the cheapest, and none has more of the prompt cached
    LOAD = "load"  # the cheapest, although another one has more cached or none has anything
    SESSION = "session"  # the worker of the session, not much more expensive than the cheapest


class Weighed(msgspec.Struct, frozen=True, gc=False):
    """The cost of a request at a worker, and the number of its prompt tokens that are cached there when it is computed.
    The worker fetches the last `num_moved_tokens` of these from another one, or `num_disk_tokens` from its disk."""

    worker_id: str
    num_cached_tokens: int
    num_moved_tokens: int
    num_disk_tokens: int
    cost: CostTerms[float]


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A decision with its reasons. `cost` and `belief` belong to the chosen worker; `number` is its index among the
    candidates. Both are None if nothing was weighed (`place_at`). The worker fetches `num_moved_tokens` from the one
    at address `source`. `weighed` has the requested number of candidates, cheapest first."""

    worker_id: str
    number: int
    reason: PlacementReason
    predicted_cached_tokens: int
    num_moved_tokens: int
    cost: CostTerms[float] | None
    num_candidates: int
    weighed: Sequence[Weighed]
    belief: Belief | None
    source: str = ""

    @property
    def costs(self) -> dict[str, CostTerms[float]]:
        """The cost at each of `weighed`."""
        return {weighed.worker_id: weighed.cost for weighed in self.weighed}


def place_at(request: RequestFacts, worker_id: str, num_cached_tokens: int) -> Placement:
    """The placement at the only candidate, which has nothing to fetch and is not described. Its cost is not computed:
    this would take a tenth of a millisecond and decide nothing."""
    return Placement(
        worker_id=worker_id,
        number=0,
        reason=PlacementReason.ONLY,
        predicted_cached_tokens=min(num_cached_tokens, max(request.num_prompt_tokens - 1, 0)),
        num_moved_tokens=0,
        cost=None,
        num_candidates=1,
        weighed=(),
        belief=None,
    )


class Policy(Protocol):
    """Chooses workers. A fleet, real or simulated, is given one; `place` is the one that routers use."""

    def __call__(
        self,
        request: RequestFacts,
        candidates: Candidates,
        cached_blocks: npt.ArrayLike,
        now_s: float,
        rng: random.Random,
        *,
        num_described: int = 0,
        priors: Priors = Priors(),  # noqa: B008  frozen
        adapter_ms: Values | None = None,
        transfers: Transfers | None = None,
    ) -> Placement | None:
        """Choose a worker, or None if there is no candidate.

        `cached_blocks` holds, for each candidate, the number of blocks from the start of the prompt that are found
        there. `adapter_ms` is the time to read the request's adapter at each; None without an adapter. `transfers` has
        the tokens that each could fetch; None if no candidate can fetch any. `num_described` is how many candidates the
        placement describes. Times are on the clock of `LoadReport.as_of_s`.
        """
        ...


def place(
    request: RequestFacts,
    candidates: Candidates,
    cached_blocks: npt.ArrayLike,
    now_s: float,
    rng: random.Random,
    *,
    num_described: int = 0,
    priors: Priors = Priors(),  # noqa: B008  frozen
    adapter_ms: Values | None = None,
    transfers: Transfers | None = None,
) -> Placement | None:
    """Choose the worker with the lowest expected cost; see the module, and `Policy` for the arguments."""
    if not len(candidates):
        return None
    most_tokens = max(request.num_prompt_tokens - 1, 0)  # the last one is always computed, for its logits
    columns = candidates.columns
    cached_tokens = np.minimum(np.asarray(cached_blocks) * columns.block_size, most_tokens)
    rates = believed_rates(columns, priors)
    moved = None
    if transfers is not None:
        moved = worth_moving(transfers, columns, cached_tokens, 1000.0 / rates[0], most_tokens)
    rows = np.zeros((len(CostTerms._fields), len(candidates)))
    costs: CostTerms[Values] = CostTerms(*rows)
    _weigh(costs, request, columns, rates, cached_tokens, moved, now_s, priors)
    if moved is not None:
        costs.transfer_ms[:] = moved.ms
    if adapter_ms is not None:
        costs.adapter_ms[:] = adapter_ms
    if request.image_places is not None:
        held_tokens = cached_tokens if moved is None else cached_tokens + moved.tokens
        costs.image_ms[:] = _image_ms(request.image_places, held_tokens, columns, priors)
    total_ms: Values = rows.sum(axis=0)
    totals = _totals(request, costs, total_ms)
    chosen, reason = _choose(request, candidates, totals, cached_tokens, rng, priors)

    described = partial(_described, candidates, cached_tokens, moved, rows)
    own = described(chosen)
    cheapest = total_ms.argsort(kind="stable")[:num_described].tolist() if num_described else ()
    return Placement(
        worker_id=own.worker_id,
        number=chosen,
        reason=reason,
        predicted_cached_tokens=own.num_cached_tokens,
        num_moved_tokens=own.num_moved_tokens,
        cost=own.cost,
        num_candidates=len(candidates),
        weighed=tuple(map(described, cheapest)),
        belief=_belief(request, columns, rates, totals, chosen, reason, priors),
        source=transfers.addresses[transfers.sources[chosen]] if transfers and own.num_moved_tokens else "",
    )


def _described(
    candidates: Candidates, cached_tokens: Values, moved: Moved | None, rows: Values, number: int
) -> Weighed:
    """The description of a candidate. `rows` has a row for each of CostTerms."""
    num_moved = 0 if moved is None else int(moved.tokens[number])
    num_on_disk = num_moved if moved is not None and moved.is_on_disk[number] else 0
    cost: CostTerms[float] = CostTerms(*rows[:, number].tolist())
    names = candidates.worker_ids
    return Weighed(names[number], int(cached_tokens[number]) + num_moved, num_moved - num_on_disk, num_on_disk, cost)


def _belief(
    request: RequestFacts,
    columns: Columns[Values],
    rates: tuple[Values, Values],
    totals: Values,
    chosen: int,
    reason: PlacementReason,
    priors: Priors,
) -> Belief:
    """The belief about the chosen worker, with the slack before another worker would be better."""
    others_ms = min(totals[:chosen].min(initial=math.inf), totals[chosen + 1 :].min(initial=math.inf))
    slack_ms = others_ms - totals[chosen] + (priors.session_slack_ms if reason is PlacementReason.SESSION else 0.0)
    running = columns.running[chosen]
    batch = max(running, 1.0) + priors.batch_for_double_step
    return Belief(
        num_requests=int(running + columns.waiting[chosen] + columns.booked_requests[chosen]),
        num_uncached_tokens=int(columns.uncached_tokens[chosen] + columns.booked_tokens[chosen]),
        ms_per_request=float(rates[1][chosen] * _answer_tokens(request, priors) / batch),
        ms_per_token=float(1000.0 / rates[0][chosen]),
        slack_ms=max(float(slack_ms), 0.0) + priors.give_back_ms,
    )


def _answer_tokens(request: RequestFacts, priors: Priors) -> int:
    """The number of answer tokens that count."""
    most = request.max_new_tokens
    return priors.weighed_tokens if most is None else min(most, priors.weighed_tokens)


def _weigh(
    costs: CostTerms[Values],
    request: RequestFacts,
    columns: Columns[Values],
    rates: tuple[Values, Values],
    cached_tokens: Values,
    moved: Moved | None,
    now_s: float,
    priors: Priors,
) -> None:
    """Compute the terms at each candidate, except those of adapters and transfers. `moved` has the tokens to fetch.
    `costs` is all zero before."""
    held_tokens = cached_tokens if moved is None else cached_tokens + moved.tokens
    answer = _answer_tokens(request, priors)
    double = priors.batch_for_double_step
    running = columns.running
    max_num_seqs = columns.max_num_seqs
    prefill_rate, decode_step_ms = rates
    ms_per_token = 1000.0 / prefill_rate
    backlog_ms = costs.backlog_ms
    prefill_ms = costs.prefill_ms
    decode_ms = costs.decode_ms
    np.multiply(request.num_prompt_tokens - held_tokens, ms_per_token, out=prefill_ms)

    # The reported step time is that of the reported batch. The booked requests and this one come in addition.
    batch = running + columns.booked_requests
    step_ms = decode_step_ms * (batch + (double + 1.0)) / (np.maximum(running, 1.0) + double)
    np.multiply(step_ms, answer, out=decode_ms)

    # Places become free when answers end. The answers in the batch are half finished on average.
    requests = batch + columns.waiting
    half_answer_ms = step_ms * (priors.answer_tokens * 0.5)
    is_full = (requests >= max_num_seqs) & (max_num_seqs > 0.0)
    if is_full.any():
        waiting_ms = (requests + 1.0 - max_num_seqs) * half_answer_ms
        np.divide(waiting_ms, max_num_seqs, out=costs.queue_ms, where=is_full)

    # The worker has continued to work since the report.
    np.multiply(columns.uncached_tokens, ms_per_token, out=backlog_ms)
    backlog_ms -= (now_s - columns.as_of_s) * 1000.0
    np.maximum(backlog_ms, 0.0, out=backlog_ms)
    backlog_ms += columns.booked_tokens * ms_per_token

    # Workers compute the shortest rest first, so each request there delays this one by at most its own time.
    ahead_ms = np.maximum(requests, 1.0) * prefill_ms
    # Later requests slow down its answer. Half of that counts, because they may be shorter than assumed, and may share
    # its prefix.
    behind_ms = np.maximum(backlog_ms - ahead_ms, 0.0) * 0.5
    decode_ms += np.minimum(behind_ms, ms_per_token * (answer * priors.prompt_tokens_per_step))
    np.minimum(backlog_ms, ahead_ms, out=backlog_ms)

    new_tokens = request.num_prompt_tokens - cached_tokens + answer
    _weigh_blocks(costs, new_tokens, moved, answer, columns, ms_per_token, step_ms, priors)


def _image_ms(places: Places, held_tokens: Values, columns: Columns[Values], priors: Priors) -> Values:
    """The time to encode the images after the tokens that each candidate has cached, in addition to images that wait
    there."""
    num_tokens = len(places) - np.searchsorted(places, held_tokens)
    rates = columns.image_tokens_per_s
    rates = np.where(rates > 0.0, rates, rates.max() or priors.image_tokens_per_s)
    return np.where(num_tokens > 0, (columns.encoding_tokens + num_tokens) * 1000.0 / rates, 0.0)


def _weigh_blocks(
    costs: CostTerms[Values],
    new_tokens: Values,
    moved: Moved | None,
    answer: int,
    columns: Columns[Values],
    ms_per_token: Values,
    step_ms: Values,
    priors: Priors,
) -> None:
    """Add the cost of making room in the KV cache for the new tokens; `answer` of them belong to the answer. Tokens
    copied from another worker also stay there."""
    size = columns.block_size
    blocks = columns.blocks
    ms_per_block = size * ms_per_token
    needed = np.ceil(new_tokens / size)
    free = columns.free_blocks - columns.booked_blocks
    # At least this many blocks are empty, because cached blocks in use are not among the free ones.
    displaced = needed - np.maximum(free - columns.cached_blocks, 0.0)
    is_known = blocks > 0.0
    lost = np.maximum(displaced, 0.0) * priors.reuse_chance
    if moved is not None:
        lost += np.clip(displaced, 0.0, moved.copied_tokens / size) * priors.copy_chance
    np.multiply(lost, ms_per_block, out=costs.eviction_ms, where=is_known)
    short = needed - np.maximum(free, 0.0)
    # The worker does not begin it before its prompt fits, and earlier prompts still have to get their blocks.
    missing = short + np.floor(columns.uncached_tokens / size) - np.floor(answer / size)
    is_short = (np.maximum(short, missing) > 0.0) & is_known
    if not is_short.any():
        return
    lacking = np.where(is_short, np.maximum(short, 0.0), 0.0)
    again_ms = lacking / np.maximum(needed, 1.0) * priors.weighed_tokens * step_ms
    costs.pressure_ms[:] = lacking * ms_per_block + again_ms
    # Blocks become free when the requests that hold them end.
    held = blocks - columns.free_blocks
    waits = is_short & (missing > 0.0) & (held > 0.0)
    part = np.minimum(np.divide(missing, held, out=np.zeros_like(held), where=waits), 1.0)
    np.maximum(costs.queue_ms, part * step_ms * (priors.answer_tokens * 0.5), out=costs.queue_ms)


def predicted_wait_ms(num_ahead: int, candidates: Candidates, priors: Priors) -> float:
    """How long a request waits after `num_ahead` others until one of these full workers has room.

    Each worker ends max_num_seqs answers in the time of one answer. 0 if no worker reports its max_num_seqs.
    """
    if not len(candidates):
        return 0.0
    step_ms = believed_rates(candidates.columns, priors)[1]
    ended_per_ms = float((candidates.columns.max_num_seqs / step_ms).sum()) / priors.answer_tokens
    return (num_ahead + 1) / ended_per_ms if ended_per_ms else 0.0


def expected_wait_ms(candidates: Candidates, now_s: float, priors: Priors) -> float:
    """How long a request with a prompt of `_TYPICAL_TOKENS`, none of them cached, waits for others at the worker where
    that is shortest. Infinite without candidates."""
    costs: CostTerms[Values] = CostTerms(*np.zeros((len(CostTerms._fields), len(candidates))))
    columns = candidates.columns
    request = RequestFacts(_TYPICAL_TOKENS)
    _weigh(costs, request, columns, believed_rates(columns, priors), np.zeros(len(candidates)), None, now_s, priors)
    return float((costs.queue_ms + costs.backlog_ms).min(initial=math.inf))


def _totals(request: RequestFacts, costs: CostTerms[Values], total_ms: Values) -> Values:
    """The costs that determine the choice. If some workers meet the request's time limit, the costs of all others are
    infinite."""
    if request.max_ttft_ms != math.inf:
        is_in_time = costs.ttft_ms <= request.max_ttft_ms
        if is_in_time.any():
            return np.where(is_in_time, total_ms, math.inf)
    return total_ms


def _choose(
    request: RequestFacts,
    candidates: Candidates,
    totals: Values,
    cached_tokens: Values,
    rng: random.Random,
    priors: Priors,
) -> tuple[int, PlacementReason]:
    """The number of the chosen candidate."""
    if len(totals) == 1:
        return 0, PlacementReason.ONLY
    best_ms = totals.min()
    session = candidates.numbers.get(request.session_worker_id or "")
    if session is not None and totals[session] <= best_ms + priors.session_slack_ms:
        return session, PlacementReason.SESSION
    ties = (totals <= best_ms + priors.noise_ms).nonzero()[0]
    chosen = int(ties[0] if len(ties) == 1 else ties[rng.randrange(len(ties))])
    is_longest = cached_tokens[chosen] == cached_tokens.max() > 0
    return chosen, PlacementReason.PREFIX if is_longest else PlacementReason.LOAD


def belief_message(watcher_id: int, booking: Booking, num_cached_tokens: int, believed: Belief | None) -> BeliefMessage:
    """The belief of router `watcher_id` about a placement with this many expected cached tokens. With `believed`, the
    worker returns the request if it has more work than believed; without, it never does."""
    message = BeliefMessage(
        watcher_id=watcher_id, placement_id=booking.placement_id, num_cached_tokens=num_cached_tokens
    )
    if believed is not None and believed.slack_ms != math.inf:
        message.slack_ms = believed.slack_ms
        message.num_requests = believed.num_requests
        message.num_uncached_tokens = believed.num_uncached_tokens
        message.ms_per_request = believed.ms_per_request
        message.ms_per_token = believed.ms_per_token
    return message


def is_long(
    num_prompt_tokens: int, cached_blocks: Places, candidates: Candidates, priors: Priors, long_prompt_ms: float
) -> bool:
    """Whether a prompt is long even at the candidate that has most of it cached, or could fetch most of it.
    `cached_blocks` has, for each candidate, the number of blocks from the start of the prompt that are found there."""
    num_cached = (cached_blocks * candidates.columns.block_size).max()
    tokens_per_s = np.median(believed_rates(candidates.columns, priors)[0])
    return bool((num_prompt_tokens - num_cached) * 1000.0 > long_prompt_ms * tokens_per_s)
