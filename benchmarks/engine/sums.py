"""Sums over two ranks, whose parts are float32 in the shared memory or narrower there.

    python -m benchmarks.engine.sums [--rounds 15] [--shape 512x4096]

Each rank is a process on a CPU of its own. The forms take turns. For each shape it prints the microseconds of CPU time
of a sum in each form, without waits for the other rank, and the median and quartiles of their ratios to float32.

The parts are numbers of bfloat16 in float32, as ranks in performance mode have them: OpenVINO's products give bfloat16,
which it converts to float32 for the sum. So bfloat16 in the memory would lose nothing.
"""

from __future__ import annotations

import argparse
import mmap
import multiprocessing
import os
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.machine import describe
from headrace.worker.ranks import counters
from headrace.worker.ranks.counters import Counters
from headrace.worker.ranks.memory import SUM_CAPACITY
from headrace.worker.ranks.shared_sums import bytes_for

NUM_RANKS = 2
SHAPES = ("1x2048", "32x2048", "512x4096")
# Sums of a form in one go: of at least so many numbers in all, but no more sums than that.
_NUMBERS, _MOST_SUMS = 1 << 23, 64
Array = npt.NDArray[np.float32]
Bits = npt.NDArray[np.uint16]


class Sums:
    """Sums of two ranks as `SharedSums` makes them: float32 in the memory."""

    dtype: type[Any] = np.float32

    def __init__(self, memory: memoryview, rank: int) -> None:
        end = counters.bytes_for(NUM_RANKS)
        self._counters = Counters(memory[:end], rank)
        numbers = np.frombuffer(memory, self.dtype, 2 * NUM_RANKS * SUM_CAPACITY, end)
        self._parts: npt.NDArray[Any] = numbers.reshape(2, NUM_RANKS, SUM_CAPACITY)
        self._rank, self._count = rank, 0
        self._scratch = np.zeros(SUM_CAPACITY, np.uint32)
        self.cpu_s = 0.0
        """The CPU time of all sums, without waits."""

    def add(self, part: Array, total: Array) -> None:
        """Write the sum of both parts to `total`."""
        flat, totals = part.reshape(-1), total.reshape(-1)
        for start in range(0, flat.size, SUM_CAPACITY):
            piece = flat[start : start + SUM_CAPACITY]
            parts = self._parts[self._count & 1, :, : piece.size]
            before_s = time.thread_time()
            self.write(piece, parts[self._rank])
            self._count += 1
            self._counters.set(self._count)
            self.cpu_s += time.thread_time() - before_s
            self._counters.wait([1 - self._rank], self._count)
            before_s = time.thread_time()
            self.add_up(parts, totals[start : start + SUM_CAPACITY])
            self.cpu_s += time.thread_time() - before_s

    def write(self, part: Array, written: npt.NDArray[Any]) -> None:
        """Write a part to the memory."""
        written[:] = part

    def add_up(self, parts: npt.NDArray[Any], total: Array) -> None:
        """Add up both parts."""
        np.add(parts[0], parts[1], out=total)


class NarrowSums(Sums):
    """The same with bfloat16 in the memory."""

    dtype = np.uint16

    def add_up(self, parts: npt.NDArray[Any], total: Array) -> None:
        """Add up both parts, which become float32 without a copy in between."""
        first, second = total.view(np.uint32), self._scratch[: total.size]
        np.left_shift(parts[0], 16, out=first, dtype=np.uint32)
        np.left_shift(parts[1], 16, out=second, dtype=np.uint32)
        np.add(total, second.view(np.float32), out=total)


class Rounded(NarrowSums):
    """bfloat16, rounded to even, as any float32 would have to be."""

    def write(self, part: Array, written: Bits) -> None:
        """See `Sums`."""
        bits, rounded = part.view(np.uint32), self._scratch[: part.size]
        np.right_shift(bits, 16, out=rounded)
        rounded &= 1
        rounded += 0x7FFF
        rounded += bits
        written[:] = rounded.view(np.uint16)[1::2]


class Truncated(NarrowSums):
    """bfloat16 by taking the upper halves, which is enough for parts that are such numbers."""

    def write(self, part: Array, written: Bits) -> None:
        """See `Sums`."""
        written[:] = part.view(np.uint16)[1::2]


class Given(NarrowSums):
    """bfloat16 as if the operation got its part so: the bits are only copied. What it saves in OpenVINO's conversion
    to float32 is not counted."""

    def write(self, part: Array, written: Bits) -> None:
        """See `Sums`. The first halves stand for the part, because their number is right."""
        written[:] = part.view(np.uint16)[: part.size]


class Halves(Sums):
    """float16, which numpy has."""

    dtype = np.float16

    def write(self, part: Array, written: npt.NDArray[np.float16]) -> None:
        """See `Sums`."""
        written[:] = part.astype(np.float16)

    def add_up(self, parts: npt.NDArray[np.float16], total: Array) -> None:
        """See `Sums`."""
        total[:] = parts[0]
        np.add(total, parts[1].astype(np.float32), out=total)


FORMS: dict[str, Callable[[memoryview, int], Sums]] = {
    "float32": Sums,
    "bfloat16, rounded": Rounded,
    "bfloat16, truncated": Truncated,
    "bfloat16, given": Given,
    "float16": Halves,
}
# Whose sums are those of float32.
_EXACT = ("float32", "bfloat16, rounded", "bfloat16, truncated")


def part_of(rank: int, shape: tuple[int, ...]) -> Array:
    """The part of a rank: numbers of bfloat16."""
    part = np.random.default_rng(rank).standard_normal(shape).astype(np.float32)
    part.reshape(-1).view(np.uint16)[::2] = 0
    return part


def times_of(rank: int, cpu: int, memories: list[mmap.mmap], shape: tuple[int, ...], rounds: int) -> list[list[float]]:
    """Microseconds of a sum `[rounds, forms]`, on this CPU. Both ranks call it."""
    os.sched_setaffinity(0, {cpu})
    sums = {name: form(memoryview(memory), rank) for (name, form), memory in zip(FORMS.items(), memories, strict=True)}
    part = part_of(rank, shape)
    expected = part_of(0, shape) + part_of(1, shape)
    total = np.empty_like(part)
    for name, each in sums.items():
        total.fill(0)
        each.add(part, total)
        assert name not in _EXACT or total.tobytes() == expected.tobytes(), name
    number = min(_MOST_SUMS, max(4, _NUMBERS // part.size))
    found = []
    for _ in range(rounds):
        row = []
        for each in sums.values():
            before_s = each.cpu_s
            for _ in range(number):
                each.add(part, total)
            row.append(1e6 * (each.cpu_s - before_s) / number)
        found.append(row)
    return found


def main() -> None:
    """Compare the forms."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--shape", action="append", metavar="ROWSxCOLUMNS", help="only this one, or these")
    args = parser.parse_args()
    print(describe())
    first, second = sorted(os.sched_getaffinity(0))[:NUM_RANKS]
    context = multiprocessing.get_context("fork")
    for shape in args.shape or SHAPES:
        lengths = tuple(map(int, shape.split("x")))
        memories = [mmap.mmap(-1, bytes_for(NUM_RANKS, SUM_CAPACITY)) for _ in FORMS]
        other = context.Process(target=times_of, args=(1, second, memories, lengths, args.rounds), daemon=True)
        other.start()
        times = np.array(times_of(0, first, memories, lengths, args.rounds))
        other.join()
        for name, of_form in zip(FORMS, times.T, strict=True):
            ratios = of_form / times[:, 0]
            low, middle, high = np.percentile(ratios, (25, 50, 75))
            print(f"{shape}, {name}: {np.median(of_form):.1f} us; to float32 {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
