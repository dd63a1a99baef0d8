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

from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.fetch import Fetch, Tier, Wanted, import_blocks


class ChainedBlock(NamedTuple):
    """A block of another worker, and the one before it."""

    block_hash: int
    parent_hash: int
    is_first: bool


@dataclass(slots=True, eq=False)
class Offer:
    """Blocks that the worker at address `source` has. `ended` gets the number of blocks that arrived."""

    source: str
    blocks: Sequence[ChainedBlock]
    timeout_s: float
    ended: Future[int] = field(default_factory=Future)


class _Running(NamedTuple):
    """An offer whose blocks are being fetched, and the blocks before them, which are held until the fetch ends."""

    offer: Offer
    held: list[int]


class Takeover:
    """Fetches offered blocks through `tier`. Only `offer` and `refresh` may be called outside of the engine thread."""

    def __init__(self, pool: BlockPool, tier: Tier) -> None:
        self.wake: Callable[[], None] = lambda: None
        """Makes the engine thread call `advance`."""
        self.num_spare: Callable[[], int] = lambda: 0
        """Number of blocks that no running request needs."""
        self.num_taken = 0
        self.has_news = False
        """Whether there is something to report. The reader resets it."""
        self._pool = pool
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
        self.wake()

    def refresh(self) -> None:
        """Make the engine send a report. Any thread may call it."""
        self.has_news = True
        self.wake()

    def advance(self) -> None:
        """Begin to fetch the offered blocks."""
        while self._offers:
            self._begin(self._offers.popleft())

    def end(self, fetch: Fetch) -> bool:
        """Make the blocks of an ended fetch findable. Returns False if this object did not begin the fetch."""
        running = self._running.pop(fetch, None)
        if running is None:
            return False
        came = import_blocks(self._pool, fetch, running.held)
        self.num_taken += len(came)
        self.has_news = True
        running.offer.ended.set_result(len(came))
        return True

    def _begin(self, offer: Offer) -> None:
        pool = self._pool
        missing: dict[int, ChainedBlock] = {}
        held: dict[int, None] = {}
        for block in offer.blocks:
            if pool.is_findable(block.block_hash) or block.block_hash in missing:
                continue
            if not block.is_first and block.parent_hash not in missing:
                chain = pool.chain_to(block.parent_hash)
                if not chain:
                    continue
                # Otherwise these might be evicted to make room for the others.
                held.update(dict.fromkeys(chain))
            missing[block.block_hash] = block
        pool.hold(held)
        wanted = list(missing.values())[: self.num_spare()]
        if not wanted:
            pool.release(reversed(held))
            offer.ended.set_result(0)
            return
        blocks = pool.take(len(wanted))
        fetch = Fetch(
            [Wanted(block, *chained[:2], b"", chained.is_first) for block, chained in zip(blocks, wanted, strict=True)],
            offer.source,
            offer.timeout_s,
        )
        self._running[fetch] = _Running(offer, list(held))
        self._tier.fetch(fetch)
