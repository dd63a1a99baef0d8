"""Blocks that a draining worker hands over to this one. No request waits for them.

The router names the blocks, each after its predecessor. They replace blocks that no running request can need. Their
tokens are not known before they arrive: a block's hash follows from the hash before it and its tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace.worker.kv.cache import KVCache
from headrace.worker.kv.fetch import ChainedBlock, Fetch, Held, Tier, nobody


class Taken(NamedTuple):
    """The result of an offer: the number of blocks that arrived, and the number of offered blocks that are in the cache
    now."""

    num_blocks: int
    num_present: int


@dataclass(slots=True, eq=False)
class Offer:
    """Blocks that the worker at address `source` has."""

    source: str
    blocks: Sequence[ChainedBlock]
    timeout_s: float
    ended: Future[Taken] = field(default_factory=Future)


class _Running(NamedTuple):
    """An offer whose blocks are being fetched, and the blocks before them, which are held until the fetch ends."""

    offer: Offer
    held: Held


class Takeover:
    """Fetches offered blocks through `tier`. Only `offer` and `refresh` may be called outside of the engine thread."""

    def __init__(self, kv_cache: KVCache, tier: Tier, wake: Callable[[], None] = nobody) -> None:
        """`wake` makes the engine's thread call `advance`."""
        self._wake = wake
        self.num_taken = 0
        self.has_news = False
        """Whether there is something to report. The reader resets it."""
        self._kv_cache = kv_cache
        self._tier = tier
        self._offers: deque[Offer] = deque()
        self._running: dict[Fetch, _Running] = {}

    @property
    def num_running(self) -> int:
        """Offers whose blocks are fetched now."""
        return len(self._running)

    def offer(self, offer: Offer) -> None:
        """Queue an offer. Any thread may call it."""
        self._offers.append(offer)
        self._wake()

    def refresh(self) -> None:
        """Make the engine's thread send a load report, because a handover has changed the counters. Any thread may call
        it."""
        self.has_news = True
        self._wake()

    def advance(self, count_spare: Callable[[], int]) -> None:
        """Begin to fetch the offered blocks. `count_spare` counts the blocks that no running request needs."""
        while self._offers:
            self._begin(self._offers.popleft(), count_spare)

    def end(self, fetch: Fetch) -> bool:
        """Make the blocks of an ended fetch findable. Returns False if this object did not begin the fetch."""
        running = self._running.pop(fetch, None)
        if running is None:
            return False
        came = self._kv_cache.bring(fetch, running.held)
        self.num_taken += len(came)
        self.has_news = True
        self._end_offer(running.offer, len(came))
        return True

    def _begin(self, offer: Offer, count_spare: Callable[[], int]) -> None:
        held, wanted = self._kv_cache.take_offered(offer.blocks, count_spare)
        if not wanted:
            self._end_offer(offer, 0)
            return
        fetch = Fetch(wanted, offer.source, offer.timeout_s)
        self._running[fetch] = _Running(offer, held)
        self._tier.fetch(fetch)

    def _end_offer(self, offer: Offer, num_blocks: int) -> None:
        num_present = sum(self._kv_cache.is_findable(block.block_hash) for block in offer.blocks)
        offer.ended.set_result(Taken(num_blocks, num_present))
