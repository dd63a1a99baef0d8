"""Which worker holds which blocks of which prompts: block hash -> set of workers, as one int of bits.

Each worker has a slot, and a hash maps to an int with the bits of the workers at which it can be found. One walk
along the chain of a prompt's hashes therefore answers for all workers at once: keep the bits that survived so far, drop
those that a block lacks, stop when none is left.

                    block 0   block 1   block 2   block 3
    worker 0 (001)     x         x         x         .        matched 3
    worker 1 (010)     x         .         x         .        matched 1 (block 2 is of no use without block 1)
    worker 2 (100)     .         .         .         .        matched 0
    mask              011       001       001       000  -> stop

An entry is a pair of hash and worker. Entries are confirmed (the worker said so) or predicted (a prompt was placed
there a moment ago, so that its siblings follow it before the first event arrives). Predictions end when events confirm
or refute them, or with their time to live.

The number of entries is bounded. In a full index a worker that holds its fair share (the bound divided by the number
of workers) has its further hashes dropped; one that holds less takes room from the newest entries of the worker that
holds most. Newest gives way rather than oldest because chains are stored from the root on: what remains can still be
walked, whereas a chain without its root matches nothing. Predictions never take room from others.

Pure: no I/O, no clock of its own. Not safe for threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence


class _Holding:
    """What one worker holds. Dictionaries keep the order of arrival, so the newest entry is the last."""

    __slots__ = ("bit", "confirmed", "predicted", "worker_id")

    def __init__(self, worker_id: str, bit: int) -> None:
        self.worker_id = worker_id
        self.bit = bit
        self.confirmed: dict[int, None] = {}
        self.predicted: dict[int, float] = {}  # hash -> time at which the prediction ends, in seconds

    def __len__(self) -> int:
        return len(self.confirmed) + len(self.predicted)


class PrefixIndex:
    """Block hash -> workers, fed by the events of the workers.

    `max_entries` bounds the pairs of hash and worker (about 200 bytes each). `prediction_ttl_s` is how long a
    prediction counts without an event. Times are seconds of any one monotonic clock.
    """

    def __init__(self, max_entries: int, prediction_ttl_s: float) -> None:
        assert max_entries > 0, "the index needs room"
        self.max_entries = max_entries
        self._prediction_ttl_s = prediction_ttl_s
        self._num_entries = 0
        self._num_dropped = 0
        self._mask: dict[int, int] = {}
        self._holdings: dict[str, _Holding] = {}
        self._holding_of_slot: list[_Holding | None] = []
        # Every prediction is made for the same time, so the queue is in the order of expiry.
        self._expiries: deque[tuple[float, _Holding, tuple[int, ...]]] = deque()
        self._num_queued = 0  # hashes in that queue, those that were confirmed or refuted meanwhile included

    def __len__(self) -> int:
        """Number of entries."""
        return self._num_entries

    @property
    def num_dropped(self) -> int:
        """Confirmed entries that were given up for lack of room, since the start."""
        return self._num_dropped

    def num_entries_of(self, worker_id: str) -> int:
        """Number of entries of a worker; 0 if it is unknown."""
        holding = self._holdings.get(worker_id)
        return 0 if holding is None else len(holding)

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
        holding = self._holdings.pop(worker_id, None)
        if holding is not None:
            self._clear(holding)
            self._holding_of_slot[holding.bit.bit_length() - 1] = None

    def reset(self, worker_id: str) -> None:
        """Forget all blocks of a known worker, predicted ones included."""
        self._clear(self._holdings[worker_id])

    def evict(self, worker_id: str, hashes: Iterable[int]) -> None:
        """A known worker no longer holds these blocks. Hashes that it does not have here are skipped."""
        holding = self._holdings[worker_id]
        for block_hash in hashes:
            if block_hash in holding.confirmed:
                del holding.confirmed[block_hash]
            elif block_hash in holding.predicted:
                del holding.predicted[block_hash]
            else:
                continue
            self._drop_bit(block_hash, holding.bit)

    def store(self, worker_id: str, hashes: Iterable[int]) -> None:
        """A known worker now holds these blocks, parents before children. Predictions among them are confirmed."""
        holding = self._holdings[worker_id]
        confirmed, predicted, mask = holding.confirmed, holding.predicted, self._mask
        for block_hash in hashes:
            if block_hash in confirmed:
                continue
            if block_hash in predicted:
                del predicted[block_hash]
                confirmed[block_hash] = None
            elif self._num_entries < self.max_entries or self._make_room(holding):
                confirmed[block_hash] = None
                mask[block_hash] = mask.get(block_hash, 0) | holding.bit
                self._num_entries += 1

    def predict(self, worker_id: str, hashes: Sequence[int], now_s: float) -> None:
        """Count these blocks as present at a known worker until `prediction_ttl_s` from now, or an event says more.

        A prediction that stands already keeps its end. What finds no room is left out.
        """
        holding = self._holdings[worker_id]
        confirmed, predicted, mask, bit = holding.confirmed, holding.predicted, self._mask, holding.bit
        expires_at = now_s + self._prediction_ttl_s
        room = self.max_entries - max(self._num_entries, self._num_queued)
        made: list[int] = []
        for block_hash in hashes:
            if len(made) >= room:
                break
            if block_hash not in confirmed and block_hash not in predicted:
                mask[block_hash] = mask.get(block_hash, 0) | bit
                predicted[block_hash] = expires_at
                made.append(block_hash)
        if made:
            self._num_entries += len(made)
            self._num_queued += len(made)
            self._expiries.append((expires_at, holding, tuple(made)))

    def expire(self, now_s: float) -> None:
        """End the predictions whose time is over."""
        while self._expiries and self._expiries[0][0] <= now_s:
            _, holding, hashes = self._expiries.popleft()
            self._num_queued -= len(hashes)
            for block_hash in hashes:
                ends_at = holding.predicted.get(block_hash)
                if ends_at is not None and ends_at <= now_s:  # else confirmed, refuted or made anew
                    del holding.predicted[block_hash]
                    self._drop_bit(block_hash, holding.bit)

    def match(self, hashes: Iterable[int], worker_ids: Sequence[str]) -> dict[str, int]:
        """For each of these known workers: how many blocks from the start of the chain can be found there."""
        matched = dict.fromkeys(worker_ids, 0)
        alive = 0
        for worker_id in worker_ids:
            alive |= self._holdings[worker_id].bit
        if not alive:
            return matched
        mask_of = self._mask.get
        depth = 0
        for block_hash in hashes:
            still = mask_of(block_hash, 0) & alive
            if still != alive:
                if depth:
                    self._record(matched, alive ^ still, depth)
                if not still:
                    return matched
                alive = still
            depth += 1
        self._record(matched, alive, depth)
        return matched

    def check(self) -> None:
        """Assert that masks, holdings and counts tell one story. For tests: it looks at every entry."""
        expected: dict[int, int] = {}
        for slot, holding in enumerate(self._holding_of_slot):
            if holding is None:
                continue
            assert holding.bit == 1 << slot, "a worker has the bit of its slot"
            assert self._holdings[holding.worker_id] is holding, "slot and name lead to the same holding"
            assert holding.confirmed.keys().isdisjoint(holding.predicted), "confirmed or predicted, not both"
            for block_hash in (*holding.confirmed, *holding.predicted):
                expected[block_hash] = expected.get(block_hash, 0) | holding.bit
        assert self._mask == expected, "masks follow from the holdings"
        assert self._num_entries == sum(mask.bit_count() for mask in expected.values()), "the count is exact"
        assert self._num_entries <= self.max_entries, "the bound holds"
        assert self._num_queued == sum(len(hashes) for _, _, hashes in self._expiries) <= self.max_entries
        assert len(self._holdings) == sum(holding is not None for holding in self._holding_of_slot)

    def _record(self, matched: dict[str, int], bits: int, depth: int) -> None:
        while bits:
            low = bits & -bits
            holding = self._holding_of_slot[low.bit_length() - 1]
            assert holding is not None, "a bit without a worker"
            matched[holding.worker_id] = depth
            bits ^= low

    def _drop_bit(self, block_hash: int, bit: int) -> None:
        rest = self._mask[block_hash] ^ bit
        if rest:
            self._mask[block_hash] = rest
        else:
            del self._mask[block_hash]
        self._num_entries -= 1

    def _clear(self, holding: _Holding) -> None:
        for block_hash in (*holding.confirmed, *holding.predicted):
            self._drop_bit(block_hash, holding.bit)
        # New dictionaries: a large one that was emptied keeps its memory.
        holding.confirmed, holding.predicted = {}, {}

    def _make_room(self, holding: _Holding) -> bool:
        """Free one entry for a confirmed one of this worker; False if it has to go without."""
        if len(holding) * len(self._holdings) >= self.max_entries:
            self._num_dropped += 1
            return False
        largest = max(self._holdings.values(), key=len)
        if largest.predicted:
            block_hash, _ = largest.predicted.popitem()
        else:
            block_hash, _ = largest.confirmed.popitem()
            self._num_dropped += 1
        self._drop_bit(block_hash, largest.bit)
        return True
