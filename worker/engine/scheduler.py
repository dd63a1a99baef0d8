"""Decides what the next step computes, and accounts for it afterwards.

Requests are in two lists, `waiting` and `running`, in order of rank: higher priority first, then resumed requests,
whose clients already read the answer, then earlier arrival. A step

1. admits waiting requests while the batch and the KV cache have room; if the first one lacks blocks, others may
   overtake it, 2. shares the time of the step: one token for each request in decode. An eighth of the rest
   (`step_budget`) goes to the prompt that is first in rank, so that even the longest prompt makes progress. The
   remainder goes to resumed requests, then to the prompts with the least left to compute, 3. reserves blocks in order
   of rank. If blocks are short, the requests that are last in rank are preempted.

Requests in the background (`BACKGROUND_PRIORITY`) take what others leave. While another request runs, no background
request is admitted and none of their prompts is computed; their streams get a token only in steps that this lengthens
by at most `BACKGROUND_SHARE`. They give their places and blocks to any other request that waits for them.
"""

from __future__ import annotations

import bisect
import itertools
import sys
import time
from array import array
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from headrace.protos.status import StatusError
from headrace.worker.engine.step_budget import (
    MIN_CHUNK_ROOM,
    LogitsRows,
    Prompt,
    Room,
    StepBudget,
    with_whole_images,
)
from headrace.worker.engine.step_cost import StepCosts, StepShape
from headrace.worker.kv.cache import KVCache
from headrace.worker.request.request import FinishReason, Request, RequestState
from headrace.worker.request.step import (
    NOT_A_NUMBER,
    NOTHING_SEARCHED,
    RequestOutput,
    Sampled,
    Scheduled,
    Searched,
    StepPlan,
)
from headrace.worker.speculation.speculation import Speculation

# By this share, streams in the background may lengthen a decode step of others (docs/decisions/scheduling.md#batches).
BACKGROUND_SHARE = 0.05

FetchFirst: TypeAlias = Callable[[Request, int], bool]
"""Takes a waiting request whose cached blocks are elsewhere, and fetches them into up to this many free blocks. Returns
whether it did."""


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """A decided step, in the order of the batch. Requests whose last token is computed are sampled. `plan` is what it
    does to the KV cache. `num_beam_tokens` are those of all beams of a search but the first."""

    scheduled: Sequence[Scheduled]
    num_tokens: int
    plan: StepPlan
    num_draft_tokens: int = 0
    num_beam_tokens: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether every sequence computes one token. The tokens of a draft, and beams, are sequences of their own."""
        return self.num_tokens - self.num_draft_tokens - self.num_beam_tokens == len(self.scheduled)

    @property
    def sequences(self) -> Iterator[tuple[int, int]]:
        """For each sequence, the tokens computed before and the tokens computed now."""
        for request, num_tokens in self.scheduled:
            past = request.num_kv_tokens
            if request.is_searching:
                yield from [(past, 1)] * num_tokens
            elif request.draft or request.is_replaying:
                for number in range(num_tokens):
                    yield past + number, 1
            else:
                yield past, num_tokens


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start: requests by how they ended, tokens of prompts by where their keys and values came from,
    generated tokens, and preemptions."""

    requests_admitted: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    tokens_generated: int = 0
    preemptions: int = 0


def _streams(requests: Iterable[Request]) -> Iterator[tuple[int, int]]:
    """The sequences of a step of these streams, without drafts; see `SchedulerOutput.sequences`."""
    for request in requests:
        for _ in range(request.num_step_tokens):
            yield request.num_kv_tokens, 1


def _own_tokens(request: Request, num_tokens: int) -> int:
    """Of the request's tokens in a step, those in blocks of its own table; branches of its draft have other blocks."""
    return 1 + len(request.draft) if request.draft else num_tokens


def rank(request: Request) -> tuple[int, bool, float]:
    """Sort key: higher priority first, then resumed requests, then earlier arrival."""
    return (-request.priority, not request.is_resumed, request.arrival_s)


def is_urgent(request: Request, first: Request) -> bool:
    """Whether the request goes before all others: it is resumed, and no request of higher priority waits."""
    return request.is_resumed and request.priority >= first.priority


@dataclass(slots=True)
class Scheduler:
    """Owns the requests of a worker from `add` until their last output. Used by the engine thread only. Steps have at
    most `max_num_batched_tokens` tokens, at most `max_num_mixed_tokens` with running streams, and `max_prompt_rows`
    rows of logits for log-probabilities of prompts."""

    kv_cache: KVCache
    max_num_seqs: int
    max_num_batched_tokens: int
    max_num_mixed_tokens: int
    max_prompt_rows: int = sys.maxsize
    step_costs: StepCosts = field(default_factory=StepCosts)
    target_step_ms: float | None = None
    step_share: float = 1.0
    """Share of the longest time between two tokens that steps with prompts may take; see `Pacing`."""
    speculation: Speculation | None = None
    stats: SchedulerStats = field(default_factory=SchedulerStats)
    waiting: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic
    num_traced: int = 0
    num_fetching: int = 0
    """Prompts for which a tier fills blocks that no request here holds."""
    steps_at_once: int = 1
    """How many steps may be on their way; each has other requests."""
    _num_tokens: int = 0
    _on_way: set[Request] = field(default_factory=set)
    """The requests of steps on their way; none where there is one step at a time."""

    def __post_init__(self) -> None:
        least, mixed = self.max_num_seqs + MIN_CHUNK_ROOM - 1, self.max_num_mixed_tokens
        if not least <= mixed <= self.max_num_batched_tokens:
            raise ValueError(
                f"max_num_mixed_tokens ({mixed}) must exceed max_num_seqs ({self.max_num_seqs}) by at "
                f"least {MIN_CHUNK_ROOM - 1}, because every running request computes a token in each step and prompts "
                f"need room too, and must be at most max_num_batched_tokens ({self.max_num_batched_tokens})"
            )

    @property
    def has_requests(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self.running or self.waiting)

    @property
    def num_sequences(self) -> int:
        """Places in the batch that running requests have: a beam search has one for each of its beams."""
        return sum(request.num_sequences for request in self.running)

    @property
    def is_decoding(self) -> bool:
        """Whether the next step is one of decode alone, and no request waits for a place in it."""
        return bool(self.running) and not self.waiting and all(one.num_uncomputed_tokens == 1 for one in self.running)

    @property
    def computes_images(self) -> bool:
        """Whether the next step may compute tokens of images."""
        return any(request.computes_images for request in itertools.chain(self.running, self.waiting))

    def add(self, request: Request) -> None:
        """Accept a request. The service has checked that it fits the pool when it is alone."""
        assert self.kv_cache.num_blocks_of(request, request.num_tokens) <= self.kv_cache.num_blocks
        if not request.is_accepted:
            request.is_accepted = True
            self.stats.requests_admitted += 1
            self.num_traced += request.steps is not None
        bisect.insort(self.waiting, request, key=rank)

    def cancel(self, request: Request) -> None:
        """Drop a request whose caller has disconnected. Does nothing if it has already ended."""
        if request.state is not RequestState.FINISHED:
            self.stats.requests_cancelled += 1
            self._end(request)

    def refuse(self, request: Request, error: StatusError) -> RequestOutput:
        """The only output of a request that is not accepted."""
        assert request.state is RequestState.WAITING, "it was accepted"
        request.state = RequestState.FINISHED
        return RequestOutput(request, request.num_generated_tokens, (), error=error)

    def give_back(self, request: Request, error: StatusError) -> RequestOutput:
        """The last output of a request that has waited too long for its first step."""
        assert request.state is RequestState.WAITING, "it was computed"
        assert not request.scheduled_s, "it was computed"
        self.stats.requests_cancelled += 1
        self._end(request)
        return RequestOutput(request, request.num_generated_tokens, (), error=error)

    def fail(self, requests: Iterable[Request], error: StatusError) -> list[RequestOutput]:
        """End these requests with `error`, except those that have ended. Returns their last outputs."""
        outputs = []
        for request in requests:
            if request.state is not RequestState.FINISHED:
                self.stats.requests_failed += 1
                outputs.append(RequestOutput(request, request.num_output_tokens, (), error=error))
                self._end(request)
        return outputs

    def schedule(self, fetch_first: FetchFirst | None = None) -> SchedulerOutput:
        """Decide the next step. It is empty if nothing can be computed. `fetch_first` is asked before a waiting request
        is admitted."""
        self._admit(fetch_first)
        scheduled = self._reserve(self._share_budget())
        self._num_tokens = sum(num_tokens for _, num_tokens in scheduled)
        num_draft_tokens = sum(num_tokens - 1 for request, num_tokens in scheduled if request.draft)
        num_beam_tokens = sum(num_tokens - 1 for request, num_tokens in scheduled if request.is_searching)
        plan = self.kv_cache.plan(scheduled)
        if self.steps_at_once > 1:
            self._on_way.update(request for request, _ in scheduled)
        return SchedulerOutput(scheduled, self._num_tokens, plan, num_draft_tokens, num_beam_tokens)

    def update(
        self,
        output: SchedulerOutput,
        sampled: Sequence[Sampled],
        searched: Mapping[Request, Searched] = NOTHING_SEARCHED,
    ) -> list[RequestOutput]:
        """Account for a computed step. `sampled` has an entry for each sampled request, in batch order, and `searched`
        one for each beam search among them."""
        outputs = []
        self._on_way.difference_update(request for request, _ in output.scheduled)
        next_sampled = iter(sampled)
        for request, num_tokens in output.scheduled:
            left = request.num_prompt_tokens - request.num_computed_tokens
            self.stats.prompt_tokens_computed += max(0, min(left, num_tokens))
            known = min(num_tokens, request.num_uncomputed_tokens)
            request.num_computed_tokens += known
            if request.num_computed_tokens < request.num_tokens:
                self.kv_cache.publish(request)
                continue
            if known > 1:
                self.kv_cache.publish_beginning(request)
                request.first_token_s = request.first_token_s or self.clock()
            if request.beams is not None:
                outputs += self._advance(request, searched[request])
            else:
                outputs.append(self._append(request, next(next_sampled)))
        return outputs

    def repeat(self, token_ids: Sequence[int], num_steps: int) -> None:
        """Account for `num_steps` decode steps, in each of which every running request gets its one of `token_ids`.
        None may wait, end, or begin or fill a block: nothing but the answers becomes longer. For simulations."""
        assert not self.waiting, "a request waits"
        for request, token_id in zip(self.running, token_ids, strict=True):
            assert request.num_uncomputed_tokens == 1, "a request does not decode"
            request.token_ids.extend(array("I", (token_id,)) * num_steps)
            request.num_computed_tokens += num_steps
        self.stats.tokens_generated += num_steps * len(self.running)
        self._num_tokens = len(self.running)

    def check(self) -> None:
        """Assert that requests and blocks agree. For tests."""
        self.kv_cache.check()
        size = self.kv_cache.block_size
        assert self.num_sequences <= self.max_num_seqs
        held: dict[int, int] = {}
        for request in self.running:
            assert request.state is RequestState.RUNNING
            assert request.num_kv_tokens <= len(request.block_table) * size
            assert request.num_computed_tokens <= request.num_tokens
            for block in (*request.block_table, *itertools.chain(*request.beam_tails)):
                held[block] = held.get(block, 0) + 1
        for request in self.waiting:
            assert request.state is RequestState.WAITING
            assert not request.block_table, "a waiting request holds blocks"
            assert not request.beam_tails, "a waiting request holds blocks"
        num_others = self.kv_cache.num_blocks - self.kv_cache.num_free_blocks - len(held)
        assert num_others == 0 or (num_others > 0 and self.num_fetching), "a block without an owner"
        for requests in (self.running, self.waiting):
            assert requests == sorted(requests, key=rank)

    def _admit(self, fetch_first: FetchFirst | None) -> None:
        """Admit waiting requests in order of rank. If the first lacks blocks, others may overtake it. Any request but
        those in the background may take the places and the blocks of these."""
        if not self.waiting:
            return
        self._give_places()
        num_places = self.max_num_seqs - self.num_sequences
        kv_cache, overtaken = self.kv_cache, None
        promised = sum(self.num_missing_blocks(request) for request in self.running)
        for request in self.waiting[: self.max_num_seqs]:
            if request.num_sequences > num_places:
                return
            if request.is_background and self._has_foreground():
                return
            if overtaken is not None and not self.may_overtake(request, overtaken, promised):
                continue
            gained = kv_cache.reuse(request)
            missing = self.num_missing_blocks(request)
            has_room = kv_cache.has_room(request, promised + missing)
            while not has_room and not request.is_background and self._may_give_way():
                promised -= self.num_missing_blocks(self.running[-1])
                num_places += self.running[-1].num_sequences
                self._preempt(self.running[-1])
                has_room = kv_cache.has_room(request, promised + missing)
            if not has_room and self.running:
                kv_cache.free(request)
                overtaken = overtaken or request
                if not self.may_be_overtaken(overtaken):
                    return
                continue
            if fetch_first is not None and fetch_first(request, missing):
                continue
            promised += missing
            num_places -= request.num_sequences
            self.waiting.remove(request)
            self._count_cached_tokens(request, gained)
            request.state = RequestState.RUNNING
            request.scheduled_s = request.scheduled_s or self.clock()
            bisect.insort(self.running, request, key=rank)

    def _give_places(self) -> None:
        """Preempt requests in the background for those that wait for a place."""
        waiting = self.waiting[: self.max_num_seqs]
        wanted = sum(request.num_sequences for request in waiting if not request.is_background)
        taken = self.num_sequences
        while wanted > self.max_num_seqs - taken and self._may_give_way():
            taken -= self.running[-1].num_sequences
            self._preempt(self.running[-1])

    def _may_give_way(self) -> bool:
        """Whether the request that is last in rank may be preempted: it is in the background, and in no step that is
        under way."""
        return bool(self.running) and self.running[-1].is_background and self.running[-1] not in self._on_way

    def _ready(self) -> Sequence[Request]:
        """The running requests that may be in the next step. If several steps are under way at a time, each gets an
        equal share of all running requests."""
        if self.steps_at_once == 1:
            return self.running
        most = -(-len(self.running) // self.steps_at_once)
        return [request for request in self.running if request not in self._on_way][:most]

    def _has_foreground(self) -> bool:
        """Whether a request runs that is not in the background. These are last in rank."""
        return bool(self.running) and not self.running[0].is_background

    def may_be_overtaken(self, first: Request) -> bool:
        """Whether others may go before the first waiting request, which lacks blocks. They may for as long as its own
        prompt takes to compute, and never once its answer has begun (docs/decisions/scheduling.md#overtaking)."""
        first.lacks_blocks_since_s = first.lacks_blocks_since_s or self.clock()
        waited_ms = 1000 * (self.clock() - first.lacks_blocks_since_s)
        return not first.num_generated_tokens and waited_ms < self.step_costs.prompts.chunk_ms(0, first.num_tokens)

    def may_overtake(self, request: Request, first: Request, promised: int) -> bool:
        """Whether most of a request of the same priority is cached, and the rest fits now."""
        num_cached = self.kv_cache.num_computed_by_now(request)
        if request.priority != first.priority or 2 * num_cached < request.num_tokens:
            return False
        num_blocks = self.kv_cache.num_blocks_of(request, request.num_tokens + 1)
        missing = num_blocks - num_cached // self.kv_cache.block_size
        return promised + missing <= self.kv_cache.num_free_blocks

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that the request lacks for all of its tokens and one more, in each beam if it has several. After a
        draft it may have one too many."""
        missing = self.kv_cache.num_blocks_of(request, request.num_tokens + 1) - len(request.block_table)
        return max(0, missing) + request.num_sequences - 1

    def _count_cached_tokens(self, request: Request, gained: int) -> None:
        """Count the cached prompt tokens that were just found. A resumed request may find tokens of its answer too."""
        if request.num_preemptions == 0 and gained:
            before = request.num_computed_tokens - gained
            of_prompt = max(0, min(gained, request.num_prompt_tokens - before))
            request.num_cached_tokens += of_prompt
            self.stats.prompt_tokens_cached += of_prompt

    def _share_budget(self) -> dict[Request, int]:
        """How many tokens each running request should compute. It may wait for a block that another computes."""
        ready = self._ready()
        shared: Sequence[Request] = ready
        others: Sequence[Request] = ()
        if self._has_foreground() and self.running[-1].is_background:
            shared = [request for request in ready if not request.is_background]
            others = ready[len(shared) :]
        wanted = {request: request.num_step_tokens for request in shared if request.num_uncomputed_tokens == 1}
        behind = [request for request in shared if request not in wanted]
        if behind:
            self._share_with(behind, wanted)
            return wanted
        guests = self._guests(wanted, others) if others else ()
        if self.speculation is not None:
            self.speculation.propose(wanted, self.kv_cache)
        return wanted | {request: request.num_step_tokens for request in guests}

    def _guests(self, streams: Iterable[Request], background: Iterable[Request]) -> Sequence[Request]:
        """The streams in the background that get a token in a decode step of others: as many as lengthen it by at most
        `BACKGROUND_SHARE`, including the change of its size, which occurs when one joins or leaves."""
        costs = self.step_costs.decode
        if not costs.is_learned or self.speculation is not None:
            return ()
        step = list(_streams(streams))
        limit_ms = (1 + BACKGROUND_SHARE) * costs.predict_ms(StepShape.of(step))
        guests = []
        for request in background:
            if request.num_uncomputed_tokens == 1:
                step += _streams([request])
                if costs.predict_ms(StepShape.of(step, changed=True)) > limit_ms:
                    break
                guests.append(request)
        return guests

    def _share_with(self, behind: list[Request], wanted: dict[Request, int]) -> None:
        """Add to `wanted` the number of tokens that prompts, at least one, should compute."""
        for request in behind:
            self._count_cached_tokens(request, self.kv_cache.reuse(request))
        first = behind[0]
        served = sorted(behind, key=lambda request: (not is_urgent(request, first), request.num_uncomputed_tokens))
        prompts = [Prompt(request.num_kv_tokens, request.num_uncomputed_tokens) for request in served]
        place = served.index(first)
        budget = self._budget()
        beside = self._beside(wanted)
        streams = StepShape.of(_streams(beside))
        if beside:
            num_images = len(behind) if all(request.computes_images for request in behind) else 0
            room = budget.with_streams(streams, prompts, place, num_images=num_images)
        else:
            room = budget.alone(prompts, place)
        self._share_among(served, first, room, wanted)

    def _beside(self, streams: Collection[Request]) -> Collection[Request]:
        """The running streams that wait while a step with prompts is computed. If several steps are under way at a
        time, these are all streams; otherwise they are those in the step."""
        if self.steps_at_once == 1:
            return streams
        return [request for request in self.running if request.num_uncomputed_tokens == 1]

    def _budget(self) -> StepBudget:
        return StepBudget(
            self.step_costs,
            self.max_num_batched_tokens,
            self.max_num_mixed_tokens,
            self.target_step_ms,
            self._num_tokens,
            self.step_share,
        )

    def prompt_tokens_per_s(self, past: int) -> float:
        """How many tokens per second a prompt gets after its first `past` tokens, in steps beside the streams that run
        now."""
        streams = StepShape.of(_streams(other for other in self.running if other.num_uncomputed_tokens == 1))
        return 1000 * self._budget().tokens_per_ms(streams, past)

    def _share_among(self, served: list[Request], first: Request, room: Room, wanted: dict[Request, int]) -> None:
        left, rows = room.tokens - room.for_first, LogitsRows(self.max_prompt_rows, first)
        begun: set[tuple[int, bytes]] = set()
        for request in served:
            floor = room.for_first if request is first else 0
            # With less room the request might make a copy and compute nothing. If the step then failed, it would
            # continue without its copy.
            if floor + left < min(request.num_uncomputed_tokens, MIN_CHUNK_ROOM) or self._is_begun(request, begun):
                continue
            self._count_cached_tokens(request, self.kv_cache.copy_beginning(request))
            num_tokens = rows.chunk_of(request, floor + left)
            num_tokens = self.kv_cache.chunk_of(request, num_tokens)
            if request.images and num_tokens:
                num_tokens = with_whole_images(request, num_tokens, may_exceed=request is first)
            if num_tokens:
                wanted[request] = num_tokens
                left = max(0, left - (num_tokens - floor))
                self._begin(request, num_tokens, begun)

    def _is_begun(self, request: Request, begun: set[tuple[int, bytes]]) -> bool:
        """Whether another request computes the same next block in this step. If so, this request can find the block in
        the cache after the step."""
        index, offset = divmod(request.num_computed_tokens, self.kv_cache.block_size)
        if offset != 0 or self.kv_cache.work_on(request, index) not in begun:
            return False
        return self.kv_cache.is_worth_waiting(request)

    def _begin(self, request: Request, num_tokens: int, begun: set[tuple[int, bytes]]) -> None:
        """Note the blocks that the request computes."""
        size = self.kv_cache.block_size
        start = request.num_computed_tokens
        for index in range(start // size, -(-(start + num_tokens) // size)):
            begun.add(self.kv_cache.work_on(request, index))

    def _reserve(self, wanted: dict[Request, int]) -> list[Scheduled]:
        scheduled: list[Scheduled] = []
        for request in self.running.copy():
            num_tokens = wanted.get(request, 0)
            if num_tokens == 0 or request.state is not RequestState.RUNNING:
                continue
            while not self.kv_cache.reserve(request, request.num_computed_tokens + _own_tokens(request, num_tokens)):
                if request.draft:
                    self.kv_cache.end_branches(request)
                    request.draft, num_tokens = (), 1
                    continue
                if len(self.running) == 1 and self.num_fetching:
                    break  # their blocks are free soon
                victim = next(other for other in reversed(self.running) if other not in self._on_way)
                assert len(self.running) > 1, "a request that is alone does not fit the pool"
                self._preempt(victim)
                if victim is request:
                    break
            else:
                scheduled.append(Scheduled(request, num_tokens))
        return scheduled

    def _preempt(self, request: Request) -> None:
        """Take the blocks of a request. It keeps its tokens, and is computed again when there is room. A beam search
        begins again at its prompt."""
        self.running.remove(request)
        self.kv_cache.free(request)
        request.begin_beams()
        request.draft = ()
        request.state = RequestState.WAITING
        request.num_preemptions += 1
        self.stats.preemptions += 1
        bisect.insort(self.waiting, request, key=rank)

    def _append(self, request: Request, sampled: Sampled) -> RequestOutput:
        """Append the sampled tokens, and end the request if one of them is the last."""
        if sampled.token_id < 0:
            return self.fail([request], sampled.error)[0]
        start_pos = request.num_generated_tokens
        sampling = request.sampling
        finish, stop_token_id = None, None
        for token_id in (sampled.token_id, *sampled.more):
            request.token_ids.append(token_id)
            if token_id in sampling.stop_token_ids:
                finish, stop_token_id = FinishReason.STOP, token_id
            elif request.num_generated_tokens >= sampling.max_tokens:
                finish = FinishReason.LENGTH
            if finish is not None:
                break
        token_ids = tuple(request.token_ids[request.num_prompt_tokens + start_pos :])
        drafted = self.speculation.observe(request, token_ids) if self.speculation and request.draft else (0, 0)
        self.kv_cache.end_branches(request, token_ids)
        request.draft = ()
        request.num_computed_tokens = request.num_tokens - 1
        self.kv_cache.publish(request)
        self.stats.tokens_generated += len(token_ids)
        if finish is not None:
            self.stats.requests_finished += 1
            self.kv_cache.publish_beginning(request)
            self._end(request)
        return RequestOutput(request, start_pos, token_ids, (), finish, stop_token_id, None, *drafted)

    def _advance(self, request: Request, searched: Searched) -> list[RequestOutput]:
        """Take a step of a beam search. Its answers are the output of its last step."""
        if isinstance(searched, StatusError):
            return self.fail([request], searched)
        search = request.beams
        assert search is not None, "it is no beam search"
        request.advance_beams(searched)
        if not search.has_ended:
            return []
        if not search.hypotheses:
            return self.fail([request], NOT_A_NUMBER)
        best = search.hypotheses[0]
        self.stats.tokens_generated += sum(len(hypothesis.token_ids) for hypothesis in search.hypotheses)
        self.stats.requests_finished += 1
        self._end(request)
        finish = FinishReason.LENGTH if best.stop_token_id is None else FinishReason.STOP
        return [RequestOutput(request, 0, (), (), finish, best.stop_token_id, hypotheses=search.hypotheses)]

    def _end(self, request: Request) -> None:
        (self.running if request.state is RequestState.RUNNING else self.waiting).remove(request)
        self.kv_cache.free(request)
        self._on_way.discard(request)
        request.state = RequestState.FINISHED
        request.ended_s = self.clock()
        self.num_traced -= request.steps is not None
