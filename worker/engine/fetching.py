"""Requests that wait for blocks from the disk or from another worker before they are scheduled.

A request waits if fetching the rest of its cached prefix is expected to take less time than computing it, its images
included, which need not be encoded then. It takes
blocks from the pool, and a tier's thread fills them. They then are cached blocks like others, which the request finds
when it is scheduled. If fetching takes much longer than expected, the request is scheduled without them, and the blocks
go back to the pool.

Blocks are not fetched twice at the same time. A request whose next block is being fetched for another one waits for
that fetch, and then looks for its blocks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import msgspec

from headrace.worker.engine.mailbox import EngineReport
from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.kv.fetch import DiskOfBlocks, Fetch, Held, OtherWorkers, Tier
from headrace.worker.kv.takeover import Takeover
from headrace.worker.peers.source import BlockSource
from headrace.worker.request.request import Request, RequestState
from headrace.worker.request.step import RequestOutput

# Fetching has to be cheaper than computing by this factor.
_WORTH = 0.8
# A request waits at most this many times as long as computing would take, or this many seconds if that is longer.
_PATIENCE = 2.0
_LEAST_PATIENCE_S = 0.25
# It also waits at most this many times as long as the blocks are expected to take, plus this many seconds.
_LATENESS = 10.0
_DELAY_S = 5.0
# While a fetch holds blocks, an answer becomes longer by about this many tokens.
_TOKENS_MEANWHILE = 512


@dataclass(slots=True)
class _Held:
    """A request for which `tier` fetches blocks, and the part of the cache that is `held` for it. It has waited since
    `since_s`, is expected to wait for `expected_s` in all, and stops waiting at `deadline_s`."""

    request: Request
    held: Held
    tier: Tier
    since_s: float
    expected_s: float
    deadline_s: float

    def remaining_s(self, now_s: float) -> float:
        """Expected seconds until the blocks have arrived. A late fetch is expected to take as long again as it has
        taken so far."""
        taken_s = now_s - self.since_s
        return self.expected_s - taken_s if taken_s < self.expected_s else taken_s


class _Joined(NamedTuple):
    """A request waits for this fetch, which another request began. It holds no blocks."""

    fetch: Fetch
    since_s: float
    deadline_s: float


def without_images(request: Request, begin: int, end: int) -> float:
    """The encoding time that requests without images save: none."""
    del request, begin, end
    return 0.0


class Fetching:
    """The waiting requests of one scheduler. Used by the engine thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        disk: DiskOfBlocks | None,
        peers: OtherWorkers | None = None,
        clock: Callable[[], float] = time.monotonic,
        *,
        takeover: Takeover | None = None,
        source: BlockSource | None = None,
        encode_s: Callable[[Request, int, int], float] = without_images,
    ) -> None:
        """`encode_s` tells how many seconds it takes to encode those images of a request that it does not need if it
        continues at one token in place of an earlier one; see `Encoding.spared_s`."""
        self.disk = disk
        self.peers = peers
        self.num_disk_tokens = 0
        self.num_peer_tokens = 0
        self._scheduler = scheduler
        self._clock = clock
        self._takeover = takeover
        self._source = source
        self._encode_s = encode_s
        self._held: dict[Fetch, _Held] = {}
        self._joined: dict[Request, _Joined] = {}
        self._uncounted: list[Request] = []
        """Requests that were fetched for, and were not scheduled yet."""
        self._fetch_of: dict[int, Fetch] = {}
        """The fetch that brings the block with this hash."""

    @property
    def num_held(self) -> int:
        """Requests that wait for blocks."""
        return len(self._held) + len(self._joined)

    def num_sharing(self, priority: int) -> int:
        """See `Stage`: none, because fetching needs hardly any of the cores that compute steps."""
        del priority
        return 0

    def pause(self) -> None:
        """See `Stage`: fetching goes on beside steps."""

    def resume(self) -> None:
        """See `Stage`."""

    def begin(self, request: Request) -> bool:
        """Hold a request that is not scheduled if it should wait. Otherwise schedule it at once."""
        first = self._scheduler.kv_cache.num_computed_by_now(request) // self._scheduler.kv_cache.block_size
        if self._join(request, first):
            return True
        return self._begin(request, first, *self._best(request, first), self._num_spare)

    def begin_late(self, request: Request, num_free: int) -> bool:
        """Hold a request that is about to be computed, if it should wait for blocks: when it arrived there was no room
        for them, or they have been evicted since. It gets up to `num_free` free blocks, which it would need for its
        computation anyway."""
        if request.was_fetched_for or request.num_preemptions:
            return False
        cache = self._scheduler.kv_cache
        first = request.num_computed_tokens // cache.block_size
        if self._join(request, first):
            cache.free(request)
            self._scheduler.waiting.remove(request)
            return True
        tier, end = self._best(request, first)
        if tier is None:
            return False
        cache.free(request)
        if self._begin(request, first, tier, end, lambda: min(num_free, cache.num_free_blocks)):
            self._scheduler.waiting.remove(request)
            return True
        cache.reuse(request)
        return False

    def _begin(self, request: Request, first: int, tier: Tier | None, end: int, count_room: Callable[[], int]) -> bool:
        """Hold a request for its blocks from `first` to `end`, as far as there is room, if that saves time."""
        if tier is None:
            return False
        cache = self._scheduler.kv_cache
        prefix = cache.hold_prefix(request, end)
        # The held blocks are not spare any more.
        end = cache.num_fetchable(request, min(end, len(prefix) + count_room()), self._parts_of(tier))
        patience_s = self._patience_s(request, tier, first, end)
        is_worth = cache.num_usable(request, prefix) == first and self._saved_s(request, tier, first, end) > 0.0
        taken = cache.take_wanted(request, prefix, end) if is_worth and patience_s >= 0.0 else None
        if taken is None:
            cache.release_prefix(prefix)
            return False
        in_cache, wanted = taken
        request.was_fetched_for = True
        fetch = Fetch(wanted, request.kv_source if tier is self.peers else "", patience_s)
        now_s, expected_s = self._clock(), tier.expected_s(end - first)
        self._held[fetch] = _Held(request, in_cache, tier, now_s, expected_s, now_s + patience_s)
        for block in wanted:
            self._fetch_of.setdefault(block.block_hash, fetch)
        self._count_running()
        tier.fetch(fetch)
        return True

    def _join(self, request: Request, first: int) -> bool:
        """Hold a request while its blocks from `first` on are fetched for another one, if that saves time."""
        cache = self._scheduler.kv_cache
        last = 0 if request.wants_prompt_logprobs else cache.num_reusable(request) // cache.block_size
        end, fetch = first + 1, self._fetch_of.get(cache.hash_of(request, first)) if first < last else None
        if fetch is None:
            return False
        while end < last and self._fetch_of.get(cache.hash_of(request, end)) is fetch:
            end += 1
        held, now_s = self._held[fetch], self._clock()
        patience_s = self._patience_s(request, held.tier, first, end)
        if patience_s < 0.0 or held.remaining_s(now_s) >= _WORTH * self._compute_s(request, first, end):
            return False
        request.fetch_from = min(request.fetch_from, first)
        self._joined[request] = _Joined(fetch, now_s, now_s + patience_s)
        return True

    def cancel(self, request: Request) -> bool:
        """Drop a request. Returns whether it was held here; if so, the scheduler delivers its last output."""
        if self._joined.pop(request, None) is None:
            fetch = next((fetch for fetch, held in self._held.items() if held.request is request), None)
            if fetch is None:
                return False
            self._give_up(fetch)
        self._scheduler.add(request)
        self._scheduler.cancel(request)
        return True

    def take_ready(self) -> list[Request]:
        """Make the fetched blocks findable. Returns the requests that need not wait any more."""
        self._count()
        ready = []
        if self._takeover is not None:
            self._takeover.advance(self._num_spare)
        for fetch in self._take_ended():
            if self._takeover is not None and self._takeover.end(fetch):
                continue
            if fetch in self._held:  # otherwise it was given up
                ready.append(self._end(fetch))
        now_s = self._clock()
        late = [fetch for fetch, held in self._held.items() if now_s > held.deadline_s]
        ready += [self._give_up(fetch) for fetch in late]
        ready += self._take_joined(now_s)
        self._count_running()
        return ready

    def _take_joined(self, now_s: float) -> Iterable[Request]:
        """The requests that stop waiting for another request's fetch, because nothing more will be fetched for them, or
        because the fetch takes too long."""
        for request, joined in list(self._joined.items()):
            is_late = now_s > joined.deadline_s
            if joined.fetch in self._held and not is_late:
                continue
            del self._joined[request]
            request.fetch_wait_s += now_s - joined.since_s
            request.was_fetched_for = request.was_fetched_for or is_late
            if is_late or not self.begin(request):
                yield request

    def _give_up(self, fetch: Fetch) -> Request:
        """End a fetch that the tier has not ended. The tier may hang, so its blocks are released at once."""
        fetch.give_up()
        return self._end(fetch)

    def _end(self, fetch: Fetch) -> Request:
        """Make the filled blocks findable, and release all. Returns the request that waited for them."""
        held = self._held.pop(fetch)
        for wanted in fetch.wanted:
            if self._fetch_of.get(wanted.block_hash) is fetch:
                del self._fetch_of[wanted.block_hash]
        self._scheduler.kv_cache.bring(fetch, held.held)
        self._count_running()
        held.request.fetch_wait_s += self._clock() - held.since_s
        num_blocks = sum(not wanted.part_only for wanted in fetch.wanted[: fetch.num_read])
        num_tokens = num_blocks * self._scheduler.kv_cache.block_size
        if fetch.source:
            held.request.num_peer_tokens = num_tokens
        else:
            held.request.num_disk_tokens = num_tokens
        self._uncounted.append(held.request)
        return held.request

    def _count(self) -> None:
        """Count the fetched tokens of prompts that their requests have found in the cache."""
        for request in self._uncounted:
            if request.state is not RequestState.WAITING:
                self.num_disk_tokens += min(request.num_disk_tokens, request.num_cached_tokens)
                self.num_peer_tokens += min(request.num_peer_tokens, request.num_cached_tokens)
        self._uncounted = [request for request in self._uncounted if request.state is RequestState.WAITING]

    def report(self, report: EngineReport) -> EngineReport:
        """See `Stage`: the requests that wait for blocks, the state of disk and peers, and what has changed on the
        disk."""
        disk, peers = self.disk, self.peers
        load = replace(
            report.load,
            num_waiting=report.load.num_waiting + self.num_held,
            num_fetching=self.num_held,
            num_disk_slots=0 if disk is None else disk.num_slots,
            num_disk_blocks=0 if disk is None else disk.num_blocks,
            transfer_bytes_per_s=0.0 if peers is None else peers.bytes_per_s,
            disk_bytes_per_s=0.0 if disk is None else disk.bytes_per_s,
        )
        return msgspec.structs.replace(
            report,
            load=load,
            counters={**report.counters, **self.counters()},
            disk_changes={} if disk is None else disk.take_changes(),
        )

    def counters(self) -> dict[str, int]:
        """The totals since the start."""
        self._count()
        found = {"prompt_tokens_from_disk": self.num_disk_tokens, "prompt_tokens_from_peers": self.num_peer_tokens}
        if self.disk is not None:
            found |= {"blocks_written": self.disk.num_written, "blocks_read": self.disk.num_read}
            found["blocks_not_written"] = self.disk.num_not_written
        if self.peers is not None:
            found |= {"blocks_received": self.peers.num_received}
        if self._source is not None:
            found |= {"blocks_sent": self._source.num_sent}
        if self._takeover is not None:
            found |= {"blocks_taken_over": self._takeover.num_taken}
        return found

    def take_outputs(self) -> list[RequestOutput]:
        """See `Stage`: no request ends here."""
        return []

    def wait_s(self, request: Request) -> tuple[float, float]:
        """See `Stage`: no time, because no request waits here for longer than it would take to compute the blocks."""
        del request
        return 0.0, 0.0

    def take_news(self) -> bool:
        """Whether blocks for which no request waits have arrived since the last call."""
        has_news = False
        for tier in (self._takeover, self.disk):
            if tier is not None and tier.has_news:
                tier.has_news, has_news = False, True
        return has_news

    def _count_running(self) -> None:
        """Tell the scheduler how many fetches hold blocks."""
        others = 0 if self._takeover is None else self._takeover.num_running
        self._scheduler.num_fetching = len(self._held) + others

    def _take_ended(self) -> Iterable[Fetch]:
        if self.disk is not None:
            yield from self.disk.take_ended()
        if self.peers is not None:
            yield from self.peers.take_ended()

    def _best(self, request: Request, first: int) -> tuple[Tier | None, int]:
        """The tier that saves most time for the blocks from `first` on, and the index after its last block. None if
        computing is faster."""
        best: tuple[Tier | None, int] = None, first
        if request.wants_prompt_logprobs:
            return best
        most_s = 0.0
        for tier, end in self._offers(request, first):
            saved_s = self._saved_s(request, tier, first, end)
            if saved_s > most_s:
                best, most_s = (tier, end), saved_s
        return best

    def _offers(self, request: Request, first: int) -> Iterable[tuple[Tier, int]]:
        """The tiers that may have consecutive blocks of the request from `first` on, each with the index after its last
        block."""
        cache = self._scheduler.kv_cache
        last = cache.num_reusable(request) // cache.block_size
        if self.disk is not None:
            end = first
            while end < last and self._is_near(cache.hash_of(request, end)):
                end += 1
            yield self.disk, cache.num_fetchable(request, end, self.disk.has_part)
        if self.peers is not None and request.kv_source and not self.peers.is_resting(request.kv_source):
            end = min(request.num_source_tokens // cache.block_size, last)
            yield self.peers, cache.num_fetchable(request, end, self._parts_of(self.peers))

    def _is_near(self, block_hash: int) -> bool:
        """Whether a block is on the disk or in the cache, possibly without its part for layers with a window."""
        assert self.disk is not None
        return self.disk.has(block_hash) or self._scheduler.kv_cache.is_findable(block_hash)

    def _parts_of(self, tier: Tier) -> Callable[[int], bool]:
        """A function that returns whether a tier has the part of a block for layers with a window. It returns True for
        all blocks of other workers, whose parts are known only when they send them."""
        return self.disk.has_part if self.disk is not None and tier is self.disk else lambda _: True

    def _num_spare(self) -> int:
        """Blocks that no running request needs while a fetch holds them."""
        num_needed = sum(map(self._num_needed, self._scheduler.running))
        return max(0, self._scheduler.kv_cache.num_free_blocks - num_needed)

    def _num_needed(self, request: Request) -> int:
        """Blocks that running requests may need while a fetch runs."""
        longest = request.num_prompt_tokens + request.sampling.max_tokens
        num_tokens = min(longest, request.num_tokens + _TOKENS_MEANWHILE)
        return max(0, self._scheduler.kv_cache.num_blocks_of(request, num_tokens) - len(request.block_table))

    def _patience_s(self, request: Request, tier: Tier, first: int, end: int) -> float:
        """How long the request waits for these blocks, in seconds. It must still be able to compute them before its
        deadline. A request that has waited for the fetches of others waits no longer in total than it would for all of
        its blocks."""
        begin = min(first, request.fetch_from)
        late_s = _LATENESS * tier.expected_s(end - begin) + _DELAY_S
        most_s = min(_PATIENCE * self._compute_s(request, begin, end), late_s)
        left_s = request.deadline_s - self._clock() - self._compute_s(request, first, end)
        return max(_LEAST_PATIENCE_S - request.fetch_wait_s, min(most_s - request.fetch_wait_s, left_s))

    def _saved_s(self, request: Request, tier: Tier, first: int, end: int) -> float:
        """The time that fetching these blocks is expected to save."""
        return _WORTH * self._compute_s(request, first, end) - tier.expected_s(end - first) if end > first else 0.0

    def _compute_s(self, request: Request, first: int, end: int) -> float:
        """The expected time to compute these blocks, and to encode their images."""
        size = self._scheduler.kv_cache.block_size
        chunk_ms = self._scheduler.step_costs.prompts.chunk_ms(first * size, (end - first) * size)
        return chunk_ms / 1000 + self._encode_s(request, first * size, end * size)
