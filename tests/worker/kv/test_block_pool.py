"""The block pool: nothing lost, nothing twice, the least valuable first."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.worker.kv.block_pool import BlockPool


def pool_with_cached(count: int, num_blocks: int = 8) -> BlockPool:
    pool = BlockPool(num_blocks, 4)
    blocks = pool.take(count)
    for i, block in enumerate(blocks):
        assert pool.make_findable(block, 100 + i, 0, bytes([i]), is_first=True) == block
    pool.release(blocks)
    return pool


def test_free_blocks_are_taken_before_cached_ones() -> None:
    pool = pool_with_cached(3)
    pool.take(5)
    assert pool.num_cached_blocks == 3
    pool.check()


def test_cached_blocks_are_given_up_in_the_order_of_their_release() -> None:
    pool = pool_with_cached(3, num_blocks=3)
    held = pool.find(100, 0, b"\0")
    assert held is not None
    pool.hold([held])
    pool.release([held])
    pool.take(2)
    assert pool.find(100, 0, b"\0") == held
    assert pool.find(101, 0, b"\1") is pool.find(102, 0, b"\2") is None
    assert pool.num_evictions == 2


def test_a_hash_whose_content_differs_is_no_hit() -> None:
    pool = pool_with_cached(1)
    assert pool.find(100, 0, b"\0") is not None
    assert pool.find(100, 0, b"other tokens") is None
    assert pool.find(100, 7, b"\0") is None


def test_the_first_block_with_a_hash_stands_for_it() -> None:
    pool = BlockPool(4, 4)
    first, second = pool.take(2)
    assert pool.make_findable(first, 1, 0, b"x", is_first=True) == first
    assert pool.make_findable(second, 1, 0, b"x", is_first=True) == first
    assert pool.make_findable(second, 1, 0, b"y", is_first=True) is None
    pool.release([second, first])
    pool.check()
    assert pool.find(1, 0, b"x") == first


def test_a_shared_block_stays_until_its_last_holder_has_gone() -> None:
    pool = pool_with_cached(1)
    block = pool.find(100, 0, b"\0")
    assert block is not None
    pool.hold([block])
    pool.hold([block])
    pool.release([block])
    assert pool.num_free_blocks == 7
    pool.release([block])
    assert pool.num_free_blocks == 8


def test_events_tell_the_difference_since_the_last_time() -> None:
    pool = pool_with_cached(2, num_blocks=2)
    assert pool.take_events() == ([100, 101], [])
    blocks = pool.take(2)
    pool.make_findable(blocks[0], 100, 0, b"\0", is_first=True)
    assert pool.take_events() == ([], [101])
    pool.forget_all()
    assert pool.take_events() == ([], [100])
    pool.make_findable(blocks[1], 5, 0, b"y", is_first=True)
    pool.forget_all()
    assert pool.take_events() == ([], [])


def tokens(*values: int) -> bytes:
    return b"".join(value.to_bytes(4, "little") for value in values)


def test_the_longest_beginning_behind_a_block_is_found() -> None:
    pool = BlockPool(8, 4)
    full, begun, other = pool.take(3)
    pool.make_findable(full, 100, 9, tokens(1, 2, 3, 4), is_first=True)
    pool.make_beginning_findable(begun, 9, tokens(1, 2, 7), is_first=True)
    pool.make_beginning_findable(other, 8, tokens(1, 2, 7), is_first=True)
    assert pool.find_beginning(9, tokens(1, 2, 3)) == (full, 3)
    assert pool.find_beginning(9, tokens(1, 2, 7, 7)) == (begun, 3)
    assert pool.find_beginning(9, tokens(5)) == (-1, 0)
    assert pool.find_beginning(7, tokens(1)) == (-1, 0)
    pool.check()


def test_a_block_that_fills_up_is_found_by_its_hash_and_its_old_beginning_is_forgotten() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.take(1)
    pool.make_beginning_findable(block, 9, tokens(1, 2), is_first=True)
    assert (pool.num_cached_blocks, pool.num_partial_blocks) == (0, 1)
    pool.make_findable(block, 100, 9, tokens(1, 2, 3, 4), is_first=True)
    assert pool.find_beginning(9, tokens(1, 2, 3, 4)) == (block, 4)
    assert (pool.num_cached_blocks, pool.num_partial_blocks) == (1, 0)
    assert pool.take_events() == ([100], [])
    pool.check()


def test_a_beginning_that_is_given_up_is_no_event() -> None:
    pool = BlockPool(1, 4)
    blocks = pool.take(1)
    pool.make_beginning_findable(blocks[0], 9, tokens(1, 2), is_first=True)
    pool.release(blocks)
    assert pool.num_cached_blocks == 0
    pool.take(1)
    assert pool.find_beginning(9, tokens(1, 2)) == (-1, 0)
    assert pool.take_events() == ([], [])
    assert pool.num_evictions == 1


def test_a_chain_is_given_up_from_its_end() -> None:
    pool = BlockPool(3, 4)
    chain = pool.take(3)
    for depth, block in enumerate(chain):
        pool.make_findable(block, 100 + depth, 99 + depth, b"", is_first=depth == 0)
    pool.check()
    assert pool.take_events() == ([100, 101, 102], [])
    pool.release(reversed(chain))
    pool.take(2)
    pool.check()
    assert pool.take_events() == ([], [102, 101])


def test_a_block_whose_parent_cannot_be_found_becomes_findable_for_nobody() -> None:
    pool = BlockPool(2, 4)
    (block,) = pool.take(1)
    with pytest.raises(AssertionError, match="without its predecessor"):
        pool.make_findable(block, 101, 100, b"", is_first=False)


def test_giving_back_a_beginning_before_its_end_is_noticed() -> None:
    pool = BlockPool(2, 4)
    chain = pool.take(2)
    pool.make_findable(chain[0], 100, 99, b"", is_first=True)
    pool.make_findable(chain[1], 101, 100, b"", is_first=False)
    pool.release(chain)
    with pytest.raises(AssertionError, match="before its successor"):
        pool.check()


def test_misuse_is_loud() -> None:
    pool = BlockPool(2, 4)
    with pytest.raises(AssertionError):
        pool.take(3)
    with pytest.raises(AssertionError):
        pool.release([0])
    with pytest.raises(AssertionError):
        pool.hold([0])
    with pytest.raises(ValueError, match="a pool needs at least one block"):
        BlockPool(0, 4)


class PoolMachine(RuleBasedStateMachine):
    """Random holders of random blocks; a mirror of the events must equal what can be found."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(6, 4)
        self.held: list[int] = []
        self.mirror: set[int] = set()

    @rule(count=st.integers(0, 6))
    def take(self, count: int) -> None:
        if count <= self.pool.num_free_blocks:
            self.held += self.pool.take(count)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100))
    def release(self, index: int) -> None:
        self.pool.release([self.held.pop(index % len(self.held))])

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100), block_hash=st.integers(0, 8))
    def publish(self, index: int, block_hash: int) -> None:
        self.pool.make_findable(self.held[index % len(self.held)], block_hash, 0, b"", is_first=True)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 100), parent=st.integers(0, 3), length=st.integers(1, 3))
    def begin(self, index: int, parent: int, length: int) -> None:
        block = self.held[index % len(self.held)]
        self.pool.make_beginning_findable(block, parent, tokens(*range(length)), is_first=True)

    @rule(block_hash=st.integers(0, 8))
    def hit(self, block_hash: int) -> None:
        block = self.pool.find(block_hash, 0, b"")
        if block is not None:
            self.pool.hold([block])
            self.held.append(block)

    @rule()
    def forget(self) -> None:
        self.pool.forget_all()

    @rule()
    def mirror_events(self) -> None:
        stored, evicted = self.pool.take_events()
        assert self.mirror.issuperset(evicted)
        assert self.mirror.isdisjoint(stored)
        self.mirror = (self.mirror - set(evicted)) | set(stored)
        assert self.mirror == frozenset(self.pool._block_of_hash)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        self.pool.check()
        assert self.pool.num_free_blocks == 6 - len(set(self.held))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
