"""Predicts blocks at a worker: a prompt that was just placed there will soon be cached.

A prediction is a run of blocks in a prompt's chain: from the first block that the worker lacked to the end of the
prompt. It expires after its time to live. Before that, the worker's events confirm its blocks in order, as the worker
computes them, and confirmed blocks leave the prediction.

A hash identifies a block together with all its predecessors, so two chains with an equal block are equal up to that
block. Therefore a run is stored only under its first hash and the hashes at every STRIDE-th depth. To find it from any
of its blocks, fewer than STRIDE earlier blocks are checked; a binary search finds how far it matches a prompt. Storing
hundreds of hashes would cost more than the rest of a placement.

    depth     16              32              48
    run               [ x x x x x x x x x x x x x x x x x )
    stored            ^       ^               ^

Pure: no I/O and no clock. Not thread-safe.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

STRIDE = 16


class Run:
    """Blocks of a chain that are predicted for the worker with this bit until `ends_at`, a time in seconds.

    `hashes` are those of the depths from `start` up to `end`. Blocks before `first` are already confirmed.
    """

    __slots__ = ("bit", "end", "ends_at", "first", "hashes", "start")

    def __init__(self, bit: int, hashes: Sequence[int], start: int, ends_at: float) -> None:
        self.bit = bit
        self.hashes = hashes
        self.start = self.first = start
        self.end = start + len(hashes)
        self.ends_at = ends_at

    def end_along(self, chain: Sequence[int], depth: int) -> int:
        """The depth up to which the run equals a chain, given that they are equal at `depth`."""
        hashes = self.hashes
        start = self.start
        equal = depth
        other = min(self.end, len(chain))
        if hashes[other - 1 - start] == chain[other - 1]:
            return other
        while other - equal > 1:
            middle = (equal + other) >> 1
            if hashes[middle - start] == chain[middle]:
                equal = middle
            else:
                other = middle
        return other

    def noted_hashes(self) -> list[int]:
        """The hashes under which the run is stored."""
        if self.first == self.end:
            return []
        after_first = self.first - self.first % STRIDE + STRIDE
        return [self.hashes[self.first - self.start], *self.hashes[after_first - self.start :: STRIDE]]


class Predictions:
    """The live predictions of all workers, `max_blocks` blocks at most. Each counts for `ttl_s`. Workers are bits."""

    def __init__(self, max_blocks: int, ttl_s: float) -> None:
        self.max_blocks = max_blocks
        self.num_blocks = 0
        """Blocks that are predicted and not yet expired, including those confirmed in the meantime."""
        self.noted: dict[int, list[Run]] = {}
        """Only hashes in this map can be confirmed."""
        self._ttl_s = ttl_s
        # All predictions have the same lifetime, so the queue is in the order of expiry.
        self._runs: deque[Run] = deque()

    def add(self, bit: int, chain: Sequence[int], start: int, now_s: float) -> Run | None:
        """Expect the blocks of this chain from depth `start` on at a worker. Blocks beyond the limit are left out.
        Returns None if all are."""
        hashes = chain[start : start + self.max_blocks - self.num_blocks]
        if not hashes:
            return None
        run = Run(bit, hashes, start, now_s + self._ttl_s)
        noted = self.noted
        for block_hash in run.noted_hashes():
            if block_hash in noted:
                noted[block_hash].append(run)
            else:
                noted[block_hash] = [run]
        self.num_blocks += len(hashes)
        self._runs.append(run)
        return run

    def withdraw(self, run: Run) -> None:
        """Withdraw a prediction. It counts towards the limit until it expires."""
        for block_hash in run.noted_hashes():
            if run in self.noted.get(block_hash, ()):  # not if it has ended
                self._unnote(run, block_hash)
        run.first = run.end

    def confirm(self, bit: int, block_hash: int) -> None:
        """Record that a worker holds a block whose hash is stored."""
        for run in self.noted[block_hash].copy():
            if run.bit == bit and run.hashes[run.first - run.start] == block_hash:
                self._unnote(run, block_hash)
                run.first += 1
                if run.first < run.end and run.first % STRIDE:  # hashes at multiples of STRIDE are stored already
                    self.noted.setdefault(run.hashes[run.first - run.start], []).append(run)

    def expire(self, now_s: float) -> None:
        """Remove the predictions that have expired."""
        while self._runs and self._runs[0].ends_at <= now_s:
            self._end(self._runs.popleft())

    def forget(self, bit: int) -> None:
        """End all predictions of a worker."""
        for run in self._runs:
            if run.bit == bit:
                self._end(run)
        self._runs = deque(run for run in self._runs if run.bit != bit)

    def reach(self, chain: Sequence[int], depth: int, workers: int) -> dict[int, int]:
        """For each of the given workers that is predicted to hold the chain's block at this depth: its bit -> the depth
        of the first later block that it is not predicted to hold."""
        reached: dict[int, int] = {}
        if not self.noted:
            return reached
        noted_under = self.noted.get
        to_do = [(depth, workers)]
        while to_do:
            depth, workers = to_do.pop()
            ends: dict[int, int] = {}
            for block_hash in chain[depth - depth % STRIDE : depth + 1] if depth < len(chain) else ():
                for run in noted_under(block_hash, ()):
                    if run.bit & workers and depth < run.end and run.hashes[depth - run.start] == chain[depth]:
                        ends[run.bit] = max(ends.get(run.bit, 0), run.end_along(chain, depth))
            reached |= ends
            to_do.extend((end, bit) for bit, end in ends.items())
        return reached

    def check(self) -> None:
        """Assert that runs, notes and the count agree. For tests."""
        noted: dict[int, list[Run]] = {}
        for run in self._runs:
            assert run.start <= run.first <= run.end == run.start + len(run.hashes)
            for block_hash in run.noted_hashes():
                noted.setdefault(block_hash, []).append(run)
        assert noted.keys() == self.noted.keys()
        for block_hash, runs in noted.items():
            assert len(runs) == len(self.noted[block_hash])
            assert set(runs) == set(self.noted[block_hash])
        assert self.num_blocks == sum(len(run.hashes) for run in self._runs) <= self.max_blocks

    def bits(self) -> int:
        """The bits of the workers that have predictions, as in `PrefixIndex`."""
        bits = 0
        for run in self._runs:
            bits |= run.bit
        return bits

    def _end(self, run: Run) -> None:
        for block_hash in run.noted_hashes():
            self._unnote(run, block_hash)
        self.num_blocks -= len(run.hashes)

    def _unnote(self, run: Run, block_hash: int) -> None:
        runs = self.noted[block_hash]
        runs.remove(run)
        if not runs:
            del self.noted[block_hash]
