"""Which worker holds which blocks of which prompts: block hash -> set of workers, as one int of bits.

Each worker has a slot, and a hash maps to an int with the bits of the workers at which it can be found. What a worker
holds is closed under prefixes: it holds a block only with all blocks before it in its chain (see KvEvents). So the
set of workers only shrinks along a chain, and where it is the same at two blocks it is the same between them: one
bisection finds, for all workers at once, where each of them drops out.

                    block 0   block 1   block 2   block 3
    worker 0 (001)     x         x         x         .        matched 3
    worker 1 (010)     x         .         .         .        matched 1
    worker 2 (100)     .         .         .         .        matched 0
    mask              011       001       001       000

An entry is a pair of hash and worker that the worker itself confirmed. Beside the entries stand predictions: the blocks
of a prompt count as present where it was placed a moment ago, so that its siblings follow it before the first event
arrives. They go on where a worker's entries end.

The number of entries is bounded. In a full index a worker that holds its fair share (the bound divided by the number
of workers) has its further hashes dropped; one that holds less takes room from the newest entries of the worker that
holds most. Newest gives way rather than oldest because chains are stored from the root on: what remains can still be
matched, whereas a chain without its root matches nothing. What comes for a worker after something of it was dropped
may lack the block before it: until it is reset the worker counts as having gaps, and is walked block by block too.
Predictions have a bound of their own; what finds no room is not predicted.

Pure: no I/O, no clock of its own. Not safe for threads.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence

from headrace.router.predictions import Predictions


class _Holding:
    """What one worker holds. A dictionary keeps the order of arrival, so the newest entry is the last."""

    __slots__ = ("bit", "digest", "hashes", "worker_id")

    def __init__(self, worker_id: str, bit: int) -> None:
        self.worker_id = worker_id
        self.bit = bit
        self.hashes: dict[int, None] = {}
        self.digest = 0  # exclusive or of the hashes

    def __len__(self) -> int:
        return len(self.hashes)


class PrefixIndex:
    """Block hash -> workers, fed by the events of the workers.

    `max_entries` bounds the pairs of hash and worker (about 200 bytes each), `max_predicted` the blocks that are
    predicted. `prediction_ttl_s` is how long a prediction counts without an event. Times are seconds of any one
    monotonic clock.
    """

    def __init__(self, max_entries: int, max_predicted: int, prediction_ttl_s: float) -> None:
        assert max_entries > 0, "the index needs room"
        self.max_entries = max_entries
        self._num_entries = 0
        self._num_dropped = 0
        self._mask: dict[int, int] = {}
        self._gapped = 0  # the bits of the workers that may hold a block without the one before it
        self._holdings: dict[str, _Holding] = {}
        self._holding_of_slot: list[_Holding | None] = []
        self._predictions = Predictions(max_predicted, prediction_ttl_s)

    def __len__(self) -> int:
        """Number of entries."""
        return self._num_entries

    @property
    def num_predicted(self) -> int:
        """Blocks predicted and not yet expired, those confirmed meanwhile included."""
        return self._predictions.num_blocks

    @property
    def num_dropped(self) -> int:
        """Entries that were given up for lack of room, since the start."""
        return self._num_dropped

    def num_entries_of(self, worker_id: str) -> int:
        """Number of entries of a worker; 0 if it is unknown."""
        holding = self._holdings.get(worker_id)
        return 0 if holding is None else len(holding)

    def digest_of(self, worker_id: str) -> int:
        """Exclusive or of all hashes of a worker, whatever their order; 0 if it is unknown. Costs nothing to ask."""
        holding = self._holdings.get(worker_id)
        return 0 if holding is None else holding.digest

    @property
    def max_predicted(self) -> int:
        """Bound of `num_predicted`."""
        return self._predictions.max_blocks

    def add_worker(self, worker_id: str) -> None:
        """Make a worker known, with no blocks. No effect if it is known."""
        if worker_id in self._holdings:
            return
        if None in self._holding_of_slot:
            slot = self._holding_of_slot.index(None)
        else:
            slot = len(self._holding_of_slot)
            self._holding_of_slot.append(None)
        self._holdings[worker_id] = self._holding_of_slot[slot] = _Holding(worker_id, 1 << slot)

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and all its blocks. No effect if it is unknown."""
        if worker_id in self._holdings:
            self.reset(worker_id)
            holding = self._holdings.pop(worker_id)
            self._holding_of_slot[holding.bit.bit_length() - 1] = None

    def reset(self, worker_id: str) -> None:
        """Forget all blocks of a known worker, predicted ones included."""
        holding = self._holdings[worker_id]
        for block_hash in holding.hashes:
            _clear_bit(self._mask, block_hash, holding.bit)
        self._num_entries -= len(holding)
        self._gapped &= ~holding.bit
        holding.hashes = {}  # a new one: a large dictionary that was emptied keeps its memory
        holding.digest = 0
        self._predictions.forget(holding.bit)

    def evict(self, worker_id: str, hashes: Iterable[int]) -> None:
        """A known worker no longer holds these blocks, nor any behind them. Hashes that it does not have here are
        skipped."""
        holding = self._holdings[worker_id]
        for block_hash in hashes:
            if block_hash in holding.hashes:
                self._drop(holding, block_hash)

    def store(self, worker_id: str, hashes: Iterable[int]) -> None:
        """A known worker now holds these blocks, parents before children. Predictions among them are confirmed."""
        holding = self._holdings[worker_id]
        held, mask, noted = holding.hashes, self._mask, self._predictions.noted
        for block_hash in hashes:
            if block_hash in noted:
                self._predictions.confirm(holding.bit, block_hash)
            if block_hash not in held and (self._num_entries < self.max_entries or self._make_room(holding)):
                held[block_hash] = None
                holding.digest ^= block_hash
                mask[block_hash] = mask.get(block_hash, 0) | holding.bit
                self._num_entries += 1

    def predict(self, worker_id: str, hashes: Sequence[int], start: int, now_s: float) -> None:
        """Count the blocks of this chain from `start` on, where its match at a known worker ends, as present there.

        Until events confirm them or `prediction_ttl_s` pass. What finds no room is left out.
        """
        self._predictions.add(self._holdings[worker_id].bit, hashes, start, now_s)

    def expire(self, now_s: float) -> None:
        """End the predictions whose time is over."""
        self._predictions.expire(now_s)

    def match(self, hashes: Sequence[int], worker_ids: Iterable[str]) -> dict[str, int]:
        """For each of these known workers: how many blocks from the start of the chain can be found there."""
        matched = dict.fromkeys(worker_ids, 0)
        if hashes:
            self._bisect(matched, hashes)
            if self._gapped:
                self._walk(matched, hashes, self._gapped)
        return matched

    def _bisect(self, matched: dict[str, int], hashes: Sequence[int]) -> None:
        """Note the matches of all workers without gaps.

        A segment (start, there, end, beyond) stands for the blocks from `start` to `end`, the first held by the workers
        `there`, the one behind the last, if there is one, by `beyond`, a part of them.
        """
        mask_of, closed = self._mask.get, ~self._gapped
        there = mask_of(hashes[0], 0) & closed
        self._extend(matched, hashes, 0, closed ^ there)
        segments = [(0, there, len(hashes), 0)]
        while segments:
            start, there, end, beyond = segments.pop()
            while there != beyond:
                if end - start == 1:
                    self._record(matched, there ^ beyond, end)
                    self._extend(matched, hashes, end, there ^ beyond)
                    break
                middle = (start + end) >> 1
                held = mask_of(hashes[middle], 0) & there
                if held == there:
                    start = middle
                else:
                    if held != beyond:
                        segments.append((middle, held, end, beyond))
                    end, beyond = middle, held

    def _extend(self, matched: dict[str, int], hashes: Sequence[int], depth: int, workers: int) -> None:
        """Go on with what is predicted, for workers whose entries end at this depth."""
        for bit, end in self._predictions.reach(hashes, depth, workers).items():
            self._record(matched, bit, end)

    def _walk(self, matched: dict[str, int], hashes: Sequence[int], alive: int) -> None:
        """Note the matches of these workers, which may have gaps, by looking at each block."""
        mask_of = self._mask.get
        resumed: dict[int, int] = {}  # depth at which predictions end -> the workers that go on with entries there
        for depth, block_hash in enumerate(hashes):
            alive |= resumed.pop(depth, 0)
            still = mask_of(block_hash, 0) & alive
            if still != alive:
                self._record(matched, alive ^ still, depth)
                for bit, end in self._predictions.reach(hashes, depth, alive ^ still).items():
                    resumed[end] = resumed.get(end, 0) | bit
                alive = still
                if not alive and not resumed:
                    return
        self._record(matched, alive | resumed.get(len(hashes), 0), len(hashes))

    def check(self) -> None:
        """Assert that masks, holdings and counts tell one story. For tests: it looks at every entry."""
        expected: dict[int, int] = {}
        slots = 0
        for slot, holding in enumerate(self._holding_of_slot):
            if holding is None:
                continue
            slots |= holding.bit
            assert holding.bit == 1 << slot, "a worker has the bit of its slot"
            assert self._holdings[holding.worker_id] is holding, "slot and name lead to the same holding"
            assert holding.digest == functools.reduce(operator.xor, holding.hashes, 0), "the digest is exact"
            for block_hash in holding.hashes:
                expected[block_hash] = expected.get(block_hash, 0) | holding.bit
        assert self._mask == expected, "masks follow from the holdings"
        assert self._num_entries == sum(mask.bit_count() for mask in expected.values()), "the count is exact"
        assert self._num_entries <= self.max_entries, "the bound of entries holds"
        assert len(self._holdings) == slots.bit_count()
        assert self._gapped & slots == self._gapped, "gaps are of known workers"
        assert self._predictions.bits() & slots == self._predictions.bits(), "predictions are of known workers"
        self._predictions.check()

    def _record(self, matched: dict[str, int], bits: int, depth: int) -> None:
        """Note this depth for those of these workers that were asked for."""
        while bits:
            low = bits & -bits
            holding = self._holding_of_slot[low.bit_length() - 1]
            assert holding is not None, "a bit without a worker"
            if holding.worker_id in matched:
                matched[holding.worker_id] = depth
            bits ^= low

    def _drop(self, holding: _Holding, block_hash: int) -> None:
        del holding.hashes[block_hash]
        holding.digest ^= block_hash
        _clear_bit(self._mask, block_hash, holding.bit)
        self._num_entries -= 1

    def _make_room(self, holding: _Holding) -> bool:
        """Free one entry for this worker; False if it has to go without."""
        self._num_dropped += 1
        if len(holding) * len(self._holdings) >= self.max_entries:
            self._gapped |= holding.bit
            return False
        largest = max(self._holdings.values(), key=len)
        self._drop(largest, next(reversed(largest.hashes)))
        self._gapped |= largest.bit
        return True


def _clear_bit(masks: dict[int, int], block_hash: int, bit: int) -> None:
    """Take a worker's bit from a hash, if it is set; a hash without bits goes."""
    mask = masks.get(block_hash, 0)
    if mask & bit:
        if mask == bit:
            del masks[block_hash]
        else:
            masks[block_hash] = mask ^ bit
