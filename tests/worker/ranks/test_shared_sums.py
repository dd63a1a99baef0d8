"""Sums of processes that share memory."""

from __future__ import annotations

import mmap
import multiprocessing
from multiprocessing.connection import Connection

import numpy as np
import pytest

from headrace.worker.ranks.counters import RankLostError
from headrace.worker.ranks.shared_sums import SharedSums, bytes_for
from tests.patience import patience

ROUNDS = 300


def parts_of(number: int, num_ranks: int) -> list[np.ndarray]:
    """What each rank brings to a sum: other shapes each time, and numbers whose order of addition shows."""
    rng = np.random.default_rng(number)
    shape = (1 + number % 3, 1, 200)
    return [
        (rng.standard_normal(shape) * 10.0 ** rng.integers(-6, 6, shape)).astype(np.float32) for _ in range(num_ranks)
    ]


def expected_sum(parts: list[np.ndarray]) -> np.ndarray:
    total = parts[0] + parts[1]
    for other in parts[2:]:
        total = total + other
    return total


def add_all(memory: mmap.mmap, rank: int, num_ranks: int, capacity: int, answers: Connection) -> None:
    """A rank: every sum, and how many had other bits than expected."""
    sums = SharedSums(memoryview(memory), rank, num_ranks, capacity)
    num_wrong = 0
    for number in range(ROUNDS):
        parts = parts_of(number, num_ranks)
        total = np.empty_like(parts[rank])
        sums.add(number, parts[rank], total)
        num_wrong += total.tobytes() != expected_sum(parts).tobytes()
    answers.send(num_wrong)


# Parts have up to 600 numbers.
@pytest.mark.parametrize(("num_ranks", "capacity"), [(2, 600), (3, 600), (2, 150)])
def test_all_ranks_have_the_bits_of_the_sum_in_their_order(num_ranks: int, capacity: int) -> None:
    context = multiprocessing.get_context("fork")
    memory = mmap.mmap(-1, bytes_for(num_ranks, capacity))
    receiver, sender = context.Pipe(duplex=False)
    processes = [
        context.Process(target=add_all, args=(memory, rank, num_ranks, capacity, sender), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        for _ in processes:
            assert receiver.poll(patience(30))
            assert receiver.recv() == 0
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_rank_that_waits_for_a_dead_one_says_so() -> None:
    memory = mmap.mmap(-1, bytes_for(2, 8))
    asked = []

    def is_alive() -> bool:
        asked.append(True)
        return len(asked) < 3

    sums = SharedSums(memoryview(memory), 0, 2, 8, is_alive)
    ones = np.ones(4, np.float32)
    with pytest.raises(RankLostError):
        sums.add(0, ones, np.empty_like(ones))
    assert len(asked) == 3
