"""Maps block hashes to the workers that hold the blocks, as one int of bits per hash.

Each worker has a slot, and a hash maps to an int with the bits of the workers at which it can be found. The blocks of a
worker are closed under prefixes: it holds a block only together with all earlier blocks of the chain (see KvEvents). So
the set of workers only shrinks along a chain, and if two blocks have the same set, so have all blocks between them. One
binary search therefore finds the depth at which each worker drops out:

                    block 0   block 1   block 2   block 3
    worker 0 (001)     x         x         x         .        matched 3
    worker 1 (010)     x         .         .         .        matched 1
    worker 2 (100)     .         .         .         .        matched 0
    mask              011       001       001       000

An entry is a pair of hash and worker that the worker has confirmed. In addition there are predictions: the blocks of a
prompt count as present at its worker as soon as it is placed there, so that similar prompts follow before the first
event arrives. Predictions continue where a worker's entries end.

The number of entries is bounded. If the index is full, a worker that holds at least its fair share (the bound divided
by the number of workers) loses its new hashes. A worker that holds less takes room from the newest entries of the
largest worker. The newest entries go because chains are stored from the root: the remaining ones still match, whereas a
chain without its root matches nothing. After a drop, later blocks of that worker may lack predecessors. Until it is
reset, the worker counts as having gaps, and its matches are also searched block by block. Predictions have a separate
bound; beyond it, nothing is predicted.

Pure: no I/O and no clock. Not thread-safe.
"""

from __future__ import annotations

import functools
import operator
from array import array
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.router.placement.block_index import BlockIndex, note
from headrace.router.placement.predictions import Predictions, Run

Depths: TypeAlias = npt.NDArray[np.intp]

# Maximum number of masks that are kept for sharing.
_MAX_SHARED_MASKS = 4096
# Maximum number of removed hashes in a log, beyond the held ones.
_LOG_SLACK = 64
_NO_PREDICTIONS = Predictions(0, 0.0)


class _Holding:
    """The hashes of one worker. The masks decide which hashes it holds; `log` lists them in order of arrival. The log
    may also contain hashes that left, and hashes that left and came again may occur twice."""

    __slots__ = ("bit", "count", "digest", "log", "slot", "worker_id")

    def __init__(self, worker_id: str, slot: int) -> None:
        self.worker_id = worker_id
        self.slot = slot
        self.bit = 1 << slot
        self.count = 0
        self.log = array("Q")
        self.digest = 0  # exclusive or of the hashes

    def __len__(self) -> int:
        return self.count


class PrefixIndex:
    """Block hash -> workers, fed by the events of the workers.

    `max_entries` bounds the pairs of hash and worker (up to 160 bytes each), `max_predicted` the blocks that are
    predicted. `prediction_ttl_s` is how long a prediction counts without an event. Times are seconds of any one
    monotonic clock.
    """

    def __init__(self, max_entries: int, max_predicted: int, prediction_ttl_s: float) -> None:
        assert max_entries > 0, "the index needs room"
        self.max_entries = max_entries
        self.disk = BlockIndex(max_entries)
        self.states = BlockIndex(max_entries)
        self._num_entries = 0
        self._num_dropped = 0
        self._mask: dict[int, int] = {}
        self._gapped = 0  # the bits of the workers that may hold a block without its predecessor
        self._holdings: dict[str, _Holding] = {}
        self._holding_of_slot: list[_Holding | None] = []
        self._shared_masks: dict[int, int] = {}
        self._giver: _Holding | None = None  # in a full index this worker loses entries until it holds `_giver_floor`
        self._giver_floor = 0
        self._predictions = Predictions(max_predicted, prediction_ttl_s)

    def __len__(self) -> int:
        """Number of entries."""
        return self._num_entries

    @property
    def num_predicted(self) -> int:
        """Number of predicted blocks that have not expired, including confirmed ones."""
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
        """The exclusive or of all hashes of a worker, regardless of order; 0 if the worker is unknown. Takes constant
        time."""
        holding = self._holdings.get(worker_id)
        return 0 if holding is None else holding.digest

    @property
    def max_predicted(self) -> int:
        """Bound of `num_predicted`."""
        return self._predictions.max_blocks

    def add_worker(self, worker_id: str) -> int:
        """Add a worker without blocks unless it is known. Returns its slot."""
        if worker_id in self._holdings:
            return self._holdings[worker_id].slot
        if None in self._holding_of_slot:
            slot = self._holding_of_slot.index(None)
        else:
            slot = len(self._holding_of_slot)
            self._holding_of_slot.append(None)
        self._holdings[worker_id] = self._holding_of_slot[slot] = _Holding(worker_id, slot)
        return slot

    def remove_worker(self, worker_id: str) -> None:
        """Forget a worker and all its blocks. No effect if it is unknown."""
        if worker_id in self._holdings:
            self.reset(worker_id)
            holding = self._holdings.pop(worker_id)
            self._holding_of_slot[holding.slot] = None
            self._giver = None

    def reset(self, worker_id: str) -> None:
        """Forget all blocks of a known worker, predicted ones included, and its disk and states."""
        holding = self._holdings[worker_id]
        self._take_out(holding, holding.log)
        assert not holding.count, "the log names all"
        self._gapped &= ~holding.bit
        holding.log = array("Q")
        self._predictions.forget(holding.bit)
        self.disk.reset(holding.slot)
        self.states.reset(holding.slot)

    def evict(self, worker_id: str, hashes: Iterable[int]) -> None:
        """Remove these blocks, and all blocks that follow them, from a known worker. Hashes that it does not have here
        are skipped."""
        holding = self._holdings[worker_id]
        self._take_out(holding, hashes)
        self._compact(holding)

    def store(self, worker_id: str, hashes: Iterable[int]) -> None:
        """A known worker now holds these blocks, parents before children. Predictions among them are confirmed."""
        holding = self._holdings[worker_id]
        bit = holding.bit
        log = holding.log
        masks = self._mask
        noted = self._predictions.noted
        before, after = 0, bit  # usually the same workers hold consecutive blocks
        for block_hash in hashes:
            if block_hash in noted:
                self._predictions.confirm(bit, block_hash)
            mask = masks.get(block_hash, 0)
            if mask & bit:
                continue
            if self._num_entries >= self.max_entries:
                if not self._make_room(holding):
                    continue
                mask = masks.get(block_hash, 0)
            if mask is not before:
                before = mask
                after = self._shared(mask | bit)
            masks[block_hash] = after
            log.append(block_hash)
            holding.count += 1
            holding.digest ^= block_hash
            self._num_entries += 1
        self._compact(holding)

    def hashes_of(self, worker_id: str) -> set[int]:
        """All hashes of a known worker. Takes time proportional to the size of the index."""
        holding = self._holdings[worker_id]
        return {block_hash for block_hash in holding.log if self._mask.get(block_hash, 0) & holding.bit}

    def predict(self, worker_id: str, hashes: Sequence[int], start: int, now_s: float) -> Run | None:
        """Count the blocks of this chain from `start` on, where its match at a known worker ends, as present there.

        Until events confirm them, `prediction_ttl_s` pass or `withdraw` is called with what this returns. Blocks beyond
        the bound are left out; None if all are.
        """
        return self._predictions.add(self._holdings[worker_id].bit, hashes, start, now_s)

    def withdraw(self, prediction: Run) -> None:
        """Withdraw a prediction, because its request does not go to the worker."""
        self._predictions.withdraw(prediction)

    def expire(self, now_s: float) -> None:
        """Remove the predictions that have expired."""
        self._predictions.expire(now_s)

    def match(self, hashes: Sequence[int], worker_ids: Iterable[str]) -> dict[str, int]:
        """For each of these known workers, the number of blocks from the start of the chain that can be found there."""
        depths = self.depths(hashes)
        return {worker_id: int(depths[self._holdings[worker_id].slot]) for worker_id in worker_ids}

    def holders(self, block_hash: int) -> int:
        """The bits of the slots whose workers hold this block."""
        return self._mask.get(block_hash, 0)

    def confirmed_depths(self, hashes: Sequence[int]) -> Depths:
        """As `depths`, without predictions. The blocks of workers with gaps are not counted."""
        depths: Depths = np.zeros(len(self._holding_of_slot), np.intp)
        if hashes:
            self._bisect(depths, hashes, _NO_PREDICTIONS)
        return depths

    def depths(self, hashes: Sequence[int], predictions: Predictions | None = None) -> Depths:
        """For each slot, the number of blocks from the start of the chain that can be found at its worker.
        `predictions` replace those of the index: simulated routers share the entries and predict for themselves."""
        predictions = predictions or self._predictions
        depths: Depths = np.zeros(len(self._holding_of_slot), np.intp)
        if hashes:
            self._bisect(depths, hashes, predictions)
            if self._gapped:
                self._walk(depths, hashes, self._gapped, predictions)
        return depths

    def _bisect(self, depths: Depths, hashes: Sequence[int], predictions: Predictions) -> None:
        """Record the depths of all workers without gaps.

        A segment (start, there, end, beyond) stands for the blocks from `start` to `end`. The workers `there` hold the
        first block; `beyond`, a subset of them, hold the block at `end`, if there is one.
        """
        mask_of = self._mask.get
        closed = ~self._gapped
        there = mask_of(hashes[0], 0) & closed
        _extend(depths, hashes, 0, closed ^ there, predictions)
        segments = [(0, there, len(hashes), 0)]
        while segments:
            start, there, end, beyond = segments.pop()
            while there != beyond:
                if end - start == 1:
                    note(depths, there ^ beyond, end)
                    _extend(depths, hashes, end, there ^ beyond, predictions)
                    break
                middle = (start + end) >> 1
                held = mask_of(hashes[middle], 0) & there
                if held == there:
                    start = middle
                else:
                    if held != beyond:
                        segments.append((middle, held, end, beyond))
                    end = middle
                    beyond = held

    def _walk(self, depths: Depths, hashes: Sequence[int], alive: int, predictions: Predictions) -> None:
        """Record the depths of these workers, which may have gaps, by looking at each block."""
        mask_of = self._mask.get
        resumed: dict[int, int] = {}  # depth at which predictions end -> the workers whose entries continue there
        for depth, block_hash in enumerate(hashes):
            alive |= resumed.pop(depth, 0)
            still = mask_of(block_hash, 0) & alive
            if still != alive:
                note(depths, alive ^ still, depth)
                for bit, end in predictions.reach(hashes, depth, alive ^ still).items():
                    resumed[end] = resumed.get(end, 0) | bit
                alive = still
                if not alive and not resumed:
                    return
        note(depths, alive | resumed.get(len(hashes), 0), len(hashes))

    def check(self) -> None:
        """Assert that masks, holdings and counts agree. For tests: it looks at every entry."""
        expected: dict[int, int] = {}
        slots = 0
        for slot, holding in enumerate(self._holding_of_slot):
            if holding is None:
                continue
            slots |= holding.bit
            assert holding.bit == 1 << slot, "a worker has the bit of its slot"
            assert self._holdings[holding.worker_id] is holding, "slot and name lead to the same holding"
            hashes = self.hashes_of(holding.worker_id)
            assert holding.count == len(hashes), "the count of each is exact"
            assert len(holding.log) <= 2 * holding.count + _LOG_SLACK, "what left goes from the log"
            assert holding.digest == functools.reduce(operator.xor, hashes, 0), "the digest is exact"
            for block_hash in hashes:
                expected[block_hash] = expected.get(block_hash, 0) | holding.bit
        assert self._mask == expected, "masks follow from the holdings"
        assert self._num_entries == sum(mask.bit_count() for mask in expected.values()), "the count is exact"
        assert self._num_entries <= self.max_entries, "the bound of entries holds"
        assert len(self._holdings) == slots.bit_count()
        assert self._gapped & slots == self._gapped, "gaps are of known workers"
        assert self._predictions.bits() & slots == self._predictions.bits(), "predictions are of known workers"
        self._predictions.check()

    def _take_out(self, holding: _Holding, hashes: Iterable[int]) -> None:
        """Take these hashes from a worker, as far as it holds them. A hash without workers is removed."""
        bit = holding.bit
        masks = self._mask
        before = 0
        after = 0
        for block_hash in hashes:
            mask = masks.get(block_hash, 0)
            if not mask & bit:
                continue
            if mask == bit:
                del masks[block_hash]
            else:
                if mask is not before:
                    before = mask
                    after = self._shared(mask ^ bit)
                masks[block_hash] = after
            holding.count -= 1
            holding.digest ^= block_hash
            self._num_entries -= 1

    def _shared(self, mask: int) -> int:
        """The equal mask that other hashes already use, if there is one. A mask has a bit for each worker, and most
        hashes have one of a few masks, so sharing them saves memory."""
        if not mask & (mask - 1):
            holding = self._holding_of_slot[mask.bit_length() - 1]
            assert holding is not None, "a bit without a worker"
            return holding.bit
        if len(self._shared_masks) >= _MAX_SHARED_MASKS:
            self._shared_masks.clear()
        return self._shared_masks.setdefault(mask, mask)

    def _compact(self, holding: _Holding) -> None:
        """Keep the length of the log within a constant factor of the number of entries."""
        if len(holding.log) > 2 * holding.count + _LOG_SLACK:
            masks = self._mask
            bit = holding.bit
            newest_first = dict.fromkeys(reversed(holding.log))
            held = [block_hash for block_hash in newest_first if masks.get(block_hash, 0) & bit]
            holding.log = array("Q", reversed(held))

    def _make_room(self, holding: _Holding) -> bool:
        """Free one entry for this worker. Returns False if there is none to free."""
        self._num_dropped += 1
        if len(holding) * len(self._holdings) >= self.max_entries:
            self._gapped |= holding.bit
            return False
        giver = self._giver
        if giver is None or giver.count <= self._giver_floor:
            # It loses entries for a while, because finding the largest each time would take a look at all workers.
            giver = self._giver = max(self._holdings.values(), key=len)
            self._giver_floor = giver.count - max(giver.count // 64, 1)
        while not self._mask.get(newest := giver.log.pop(), 0) & giver.bit:
            pass
        self._take_out(giver, (newest,))
        self._gapped |= giver.bit
        return True


def _extend(depths: Depths, hashes: Sequence[int], depth: int, workers: int, predictions: Predictions) -> None:
    """Continue with predictions for the workers whose entries end at this depth."""
    for bit, end in predictions.reach(hashes, depth, workers).items():
        note(depths, bit, end)
