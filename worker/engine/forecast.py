"""Predicts how long a new request would wait for other requests, and refuses it if that is too long.

The engine's thread decides this when the request arrives. It knows the running and waiting requests and their order,
the remaining tokens of each prompt, and how much of the new prompt is cached. Two things count:

    places   if the batch or the KV cache is full: waiting requests of higher rank, at the recent rate at which
             requests end; not for a request that overtakes them, because most of it is cached
    prompts  tokens that are computed before the request's own: those of prompts with less left to compute, in steps
             as the scheduler would make them now, at their predicted cost
    stages   what is done for others first where requests wait before they are scheduled, such as encoding of images

The time for the request's own prompt does not count as waiting, nor does a prefix that it shares with a prompt ahead.
A prefix that several requests share is computed once and takes its blocks once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Self

from headrace.protos.status import Reason, StatusError
from headrace.worker.engine.scheduler import Scheduler, rank
from headrace.worker.engine.stages import Stages
from headrace.worker.engine.step_budget import FIRST_IN_RANK_SHARE
from headrace.worker.request.request import Request

# Half-life of the observed rate at which requests end.
_HALF_LIFE_S = 10.0
_MIN_RETRY_S = 0.1
# How often waiting requests are checked for those that have waited too long.
_LOOK_S = 0.25
_OVERDUE_RETRY_S = 2.0
# At most this many prompts are looked up in the prefix cache; others count as not cached. Longer queues are rare,
# because routers hold requests back until there is room.
_MAX_LOOKED_UP = 256


def too_long_a_wait(wait_s: float, missed_s: float) -> StatusError:
    """The error for a new request that would wait `wait_s` seconds, `missed_s` longer than it may."""
    return StatusError(
        Reason.QUEUE_FULL,
        f"the request would wait about {wait_s:.1f} s for others, {missed_s:.1f} s longer than it may; try again later",
        retry_after_s=max(_MIN_RETRY_S, math.ceil(10 * missed_s) / 10),
    )


def has_waited_too_long(waited_s: float) -> StatusError:
    """The error for a request that has waited longer than it may, for this many seconds."""
    problem = f"the service is busy: the request has waited {waited_s:.1f} s for others; try again later"
    return StatusError(Reason.QUEUE_FULL, problem, retry_after_s=_OVERDUE_RETRY_S)


class _Work(NamedTuple):
    """Prompt tokens to be computed, and the sum of their positions."""

    tokens: float = 0.0
    positions: float = 0.0

    @classmethod
    def behind(cls, past: int, tokens: int) -> Self:
        """`tokens` of one prompt, after `past` computed ones."""
        return cls(tokens, tokens * (past + tokens / 2))

    def plus(self, other: _Work) -> _Work:
        """The sum."""
        return _Work(self.tokens + other.tokens, self.positions + other.positions)


class Forecast:
    """Predicts for one scheduler and the `stages` in front of it, in their thread. No request waits longer than
    `max_wait_s` for others."""

    def __init__(
        self,
        scheduler: Scheduler,
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
        stages: Stages = Stages(),  # noqa: B008  without stages it has no state
    ) -> None:
        self._scheduler = scheduler
        self._stages = stages
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._ended_per_s = 0.0
        self._num_ended = 0
        self._observed_s = clock()
        self._next_look_s = 0.0

    def observe(self) -> None:
        """Learn how fast requests end. Call it after each step, and when the engine becomes idle."""
        stats = self._scheduler.stats
        num_ended = stats.requests_finished + stats.requests_cancelled + stats.requests_failed
        now_s = self._clock()
        passed_s = now_s - self._observed_s
        if passed_s > 0:
            weight = 1 - 0.5 ** (passed_s / _HALF_LIFE_S)
            self._ended_per_s += weight * ((num_ended - self._num_ended) / passed_s - self._ended_per_s)
            self._num_ended = num_ended
            self._observed_s = now_s

    def begin(self) -> None:
        """Start measuring again, because a request has come to an idle engine. Idle time would make requests seem to
        end slowly."""
        self._observed_s = self._clock()

    def refusal(self, request: Request) -> StatusError | None:
        """The error for a request that would wait too long, with the time after which to retry; None if it is accepted.
        All requests are accepted until the cost of steps is learned."""
        if request.is_resumed or not self._scheduler.step_costs.prompts.is_learned:
            return None
        left_s = request.deadline_s - self._clock()
        bound_s = min(self._max_wait_s, request.max_wait_s)
        waiting = self._waiting_ahead_of(request)
        of_stages_s, own_of_stages_s = self._stages.wait_s(request)
        most_s = self._place_s(request, waiting, {}) + self._seconds(self._most_work(request, waiting))
        most_s += of_stages_s + own_of_stages_s
        if most_s <= min(bound_s, left_s):
            return None  # in time even if everything here goes first
        wait_s, own_s = self.wait_s(request)
        # The engine works on prompts while the stages work.
        wait_s, own_s = max(wait_s, of_stages_s), own_s + own_of_stages_s
        missed_s = wait_s - bound_s
        if wait_s and own_s <= left_s:  # else an idle worker would miss the deadline too
            missed_s = max(missed_s, wait_s + own_s - left_s)
        if missed_s <= 0:
            return None
        return too_long_a_wait(wait_s, missed_s)

    def overdue(self) -> list[tuple[Request, StatusError]]:
        """Requests that have waited too long for their first step, because their prediction was wrong; with the error
        for each. Call it after a step has been scheduled, so that requests that need not wait are not among them.
        Checks at most a few times a second."""
        now_s = self._clock()
        if now_s < self._next_look_s or not self._scheduler.waiting:
            return []
        self._next_look_s = now_s + _LOOK_S
        found = []
        for request in self._scheduler.waiting:
            # It waited for itself, not for others.
            own_s = request.preparing_s + request.fetch_wait_s + request.image_wait_s
            waited_s = now_s - request.arrival_s - own_s
            bound_s = min(self._max_wait_s, request.max_wait_s)
            if waited_s >= bound_s and not request.scheduled_s and not request.is_resumed:
                found.append((request, has_waited_too_long(waited_s)))
        return found

    def wait_s(self, request: Request) -> tuple[float, float]:
        """How long the request would wait for others, and how long its own prompt would take, in seconds. If the wait
        for a place is too long already, the first is only that."""
        waiting = self._waiting_ahead_of(request)
        others = [*self._running_beside(request), *waiting]
        computed = self._computed(request, others)
        wait_s = self._place_s(request, waiting, computed)
        if wait_s <= min(self._max_wait_s, request.max_wait_s):
            wait_s += self._seconds(self._work_ahead(request, others, computed))
        num_found = computed[request]
        return wait_s, self._seconds(_Work.behind(num_found, request.num_tokens - num_found))

    def _seconds(self, work: _Work) -> float:
        """How long the work takes. The cost of a token is nearly linear in its position, so the mean position stands
        for all."""
        if not work.tokens:
            return 0.0
        return work.tokens / self._scheduler.prompt_tokens_per_s(int(work.positions / work.tokens))

    def _waiting_ahead_of(self, request: Request) -> list[Request]:
        """The waiting requests that go before it; none if it overtakes all of them, because most of it is cached."""
        if self._overtakes(request):
            return []
        place = rank(request)
        return [other for other in self._scheduler.waiting if rank(other) <= place]

    def _running_beside(self, request: Request) -> Sequence[Request]:
        """The running requests with which it shares the worker. Those in the background make room for others."""
        running = self._scheduler.running
        if request.is_background or not running or not running[-1].is_background:
            return running
        return [other for other in running if not other.is_background]

    def _overtakes(self, request: Request) -> bool:
        """Whether the first waiting request lacks blocks, and this one would be admitted now."""
        scheduler = self._scheduler
        first = scheduler.waiting[0] if scheduler.waiting else None
        if first is None or not first.lacks_blocks_since_s or scheduler.num_sequences >= scheduler.max_num_seqs:
            return False
        promised = sum(scheduler.num_missing_blocks(other) for other in scheduler.running)
        return scheduler.may_be_overtaken(first) and scheduler.may_overtake(request, first, promised)

    def _place_s(self, request: Request, waiting: Sequence[Request], computed: Mapping[Request, int]) -> float:
        num_ends = self._num_ends_needed(request, waiting, computed)
        return num_ends / self._ended_per_s if self._ended_per_s else 0.0

    def _computed(self, request: Request, others: Sequence[Request]) -> dict[Request, int]:
        """For each request, how many of its tokens are computed, or will be computed by a request that goes before it:
        the given request, or one with fewer remaining tokens."""
        kv_cache = self._scheduler.kv_cache
        behind = [other for other in others if other.num_uncomputed_tokens > 1][:_MAX_LOOKED_UP]
        computed = {other: kv_cache.num_computed_by_now(other) for other in (request, *behind)}
        firsts: dict[tuple[int, bytes], Request] = {}
        for other in (request, *sorted(behind, key=lambda other: other.num_tokens - computed[other])):
            first = firsts.setdefault(kv_cache.work_on(other, computed[other] // kv_cache.block_size), other)
            if first is not other:
                computed[other] = max(computed[other], kv_cache.num_common_tokens(first, other))
        return computed

    def _most_work(self, request: Request, waiting: Sequence[Request]) -> _Work:
        """An upper bound of the work until the request's prompt is computed. It assumes that nothing is cached and that
        all other requests go first."""
        work = _Work.behind(0, request.num_tokens)
        for others in (self._running_beside(request), waiting):
            for other in others:
                work = work.plus(_Work.behind(other.num_computed_tokens, other.num_uncomputed_tokens))
        return work

    def _work_ahead(self, request: Request, others: Sequence[Request], computed: Mapping[Request, int]) -> _Work:
        """The work on other prompts that comes before the request's own uncached tokens."""
        own = request.num_tokens - computed[request]
        behind = [other for other in others if other.num_uncomputed_tokens > 1]
        first = min(behind, key=rank, default=None)
        ahead = _Work()
        has_longer_first = False
        for other in behind:
            past = computed.get(other, other.num_computed_tokens)
            remaining = other.num_tokens - past
            if remaining > own and not other.is_resumed:
                has_longer_first |= other is first
            else:
                ahead = ahead.plus(_Work.behind(past, remaining))
        # The first in rank has its share of each step.
        slower = FIRST_IN_RANK_SHARE / (FIRST_IN_RANK_SHARE - 1) if has_longer_first else 1.0
        return _Work(slower * ahead.tokens, slower * ahead.positions)

    def _num_ends_needed(self, request: Request, waiting: Sequence[Request], computed: Mapping[Request, int]) -> int:
        """How many requests must end before this one gets a place in the batch and blocks for its prompt."""
        scheduler = self._scheduler
        running = self._running_beside(request)
        num_places = sum(other.num_sequences for other in (*running, *waiting, request))
        for_a_place = num_places - scheduler.max_num_seqs
        num_free = scheduler.kv_cache.num_free_blocks
        num_free += sum(len(other.block_table) for other in scheduler.running[len(running) :])
        promised = sum(self._num_missing_blocks(other, computed) for other in running)
        num_short = 0
        for other in (*waiting, request):
            promised += self._num_missing_blocks(other, computed)
            if promised > num_free and running:
                num_short += 1
        return max(0, for_a_place, num_short)

    def _num_missing_blocks(self, request: Request, computed: Mapping[Request, int]) -> int:
        """The number of blocks that the request needs and that no other request holds or computes."""
        num_more = computed.get(request, 0) // self._scheduler.kv_cache.block_size - len(request.block_table)
        return max(0, self._scheduler.num_missing_blocks(request) - max(0, num_more))
