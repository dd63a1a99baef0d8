"""The KV blocks of a worker: who holds them, what they contain, which to give up first.

A block is in exactly one of three conditions:

    referenced   ref_count > 0: in the block table of one or more requests
    cached       ref_count = 0 and findable: reusable, given up only when needed
    free         ref_count = 0 and nothing of value in it

A full block is findable by its hash and can be shared. Any block whose beginning is known, full or not, is findable by
the hash of the block before it: its beginning can be copied by a sequence that goes on differently.

What is findable by its hash is closed under prefixes: with a block, so is each block before it in its chain. Routers
rely on that (docs/decisions/0023). It holds because a block becomes findable behind a findable one only, because who
holds a findable block holds those before it as well, and because a sequence gives its blocks back from its end, so that
of two blocks of a chain that nobody holds the later one is given up first.

Cached and free blocks stand in one queue, the least valuable at the front: free ones first, then cached ones in the
order in which they were last released. It is a doubly linked list in two arrays, so taking the front, and taking a
cached block out of the middle on a hit, are both O(1) whatever the size of the pool. Slot `num_blocks` is the sentinel:

    sentinel <-> 7 <-> 3 <-> 12 <-> sentinel       next(sentinel) is taken first
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

TOKEN_BYTES = 4
# Blocks with the same block before them that are looked at for the longest common beginning, the latest first.
MAX_SIBLINGS = 16


class _Content(NamedTuple):
    """What is known of a findable block; `block_hash` is None while it is not full. The first of a chain has no block
    before it: its `parent_hash` is the chain's root."""

    block_hash: int | None
    parent_hash: int
    token_bytes: bytes
    is_first: bool


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each. Not thread-safe: the engine thread owns it.

    What became findable and what was lost is collected for `take_events`: a hash that was both since has no event.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs a block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self._num_unreferenced = num_blocks
        self._ref_count = array("i", bytes(4 * num_blocks))
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._previous = array("i", [num_blocks, *range(num_blocks)])
        self._block_of_hash: dict[int, int] = {}
        self._content: dict[int, _Content] = {}
        self._blocks_behind: dict[int, dict[int, None]] = {}
        self._stored: dict[int, None] = {}
        self._evicted: dict[int, None] = {}

    @property
    def num_free_blocks(self) -> int:
        """Blocks that can be taken: free and cached ones."""
        return self._num_unreferenced

    @property
    def num_cached_blocks(self) -> int:
        """Blocks that can be found by their hash, referenced or not."""
        return len(self._block_of_hash)

    def is_findable(self, block_hash: int) -> bool:
        """Whether some block has this hash."""
        return block_hash in self._block_of_hash

    def find(self, block_hash: int, parent_hash: int, token_bytes: bytes) -> int | None:
        """The block with this hash, parent and content, or None. Content decides: a hash alone proves nothing."""
        block = self._block_of_hash.get(block_hash)
        if block is None or self._content[block][:3] != (block_hash, parent_hash, token_bytes):
            return None
        return block

    def find_beginning(self, parent_hash: int, token_bytes: bytes) -> tuple[int, int]:
        """The block behind `parent_hash` that shares the longest beginning with these tokens, and how many tokens that
        is. (-1, 0) if there is none."""
        best, longest = -1, 0
        for block in islice(reversed(self._blocks_behind.get(parent_hash, {})), MAX_SIBLINGS):
            shared = _num_shared_tokens(self._content[block].token_bytes, token_bytes)
            if shared > longest:
                best, longest = block, shared
        return best, longest

    def take(self, count: int) -> list[int]:
        """Take `count` blocks for one holder, the least valuable first; what was cached in them is forgotten.

        The caller has seen that `num_free_blocks` is enough.
        """
        assert 0 <= count <= self._num_unreferenced, "taking more blocks than there are"
        taken = []
        sentinel = self.num_blocks
        for _ in range(count):
            block = self._next[sentinel]
            self._unlink(block)
            if block in self._content:
                self._forget(block)
                self.num_evictions += 1
            self._ref_count[block] = 1
            taken.append(block)
        self._num_unreferenced -= count
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these blocks, cached or referenced."""
        for block in blocks:
            if self._ref_count[block] == 0:
                assert block in self._content, "holding a block that nobody has and nobody can find"
                self._unlink(block)
                self._num_unreferenced -= 1
            self._ref_count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Take one holder off each block. Give the last block of a sequence first: it is then given up first."""
        for block in blocks:
            assert self._ref_count[block] > 0, "releasing a block that nobody holds"
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                self._num_unreferenced += 1
                self._link(block, at_front=block not in self._content)

    def make_findable(
        self, block: int, block_hash: int, parent_hash: int, token_bytes: bytes, *, is_first: bool
    ) -> int | None:
        """Let a full, computed, referenced block be found. The block before it can be found, unless it `is_first`.

        Gives the block that stands for the hash: this one, or another one with the same content that did before. None
        if one with other content does: then no block behind this one may become findable.
        """
        assert self._ref_count[block] > 0, "only a held block can become findable"
        assert is_first or parent_hash in self._block_of_hash, "a block would be findable without the one before it"
        if block in self._content:
            self._forget(block)
        if block_hash in self._block_of_hash:
            return self.find(block_hash, parent_hash, token_bytes)
        self._block_of_hash[block_hash] = block
        self._note(block, _Content(block_hash, parent_hash, token_bytes, is_first))
        if block_hash in self._evicted:
            del self._evicted[block_hash]
        else:
            self._stored[block_hash] = None
        return block

    def make_beginning_findable(self, block: int, parent_hash: int, token_bytes: bytes, *, is_first: bool) -> None:
        """Let the computed beginning of a referenced block that is not full be found and copied."""
        assert self._ref_count[block] > 0, "only a held block can become findable"
        if block in self._content:
            self._forget(block)
        self._note(block, _Content(None, parent_hash, token_bytes, is_first))

    def forget_all(self) -> None:
        """Make no block findable: their content is no longer to be trusted. Nobody holds a block."""
        for block in reversed(list(self._content)):  # the end of each chain first
            self._forget(block)

    def take_events(self) -> tuple[list[int], list[int]]:
        """Hashes that became findable and that were lost since the last call, each in one list at most.

        Of each chain the beginning comes first among the stored and last among the evicted.
        """
        stored, evicted = list(self._stored), list(self._evicted)
        self._stored.clear()
        self._evicted.clear()
        return stored, evicted

    def findable_hashes(self) -> frozenset[int]:
        """All hashes that can be found now."""
        return frozenset(self._block_of_hash)

    def check(self) -> None:
        """Assert that every block is accounted for exactly once. O(num_blocks): for tests."""
        queue = []
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            queue.append(block)
            assert self._previous[self._next[block]] == block, "the queue is broken"
            block = self._next[block]
        assert len(queue) == len(set(queue)) == self._num_unreferenced, "a block is queued twice or lost"
        assert all(self._ref_count[block] == 0 for block in queue), "a held block is queued"
        held = sum(1 for count in self._ref_count if count > 0)
        assert held + len(queue) == self.num_blocks, "free + referenced != total"
        assert all(count >= 0 for count in self._ref_count), "a negative reference count"
        full = {content.block_hash: block for block, content in self._content.items() if content.block_hash is not None}
        assert full == self._block_of_hash, "a hash leads to the wrong block"
        behind = {(parent, block) for parent, blocks in self._blocks_behind.items() for block in blocks}
        assert behind == {(content.parent_hash, block) for block, content in self._content.items()}
        assert all(self._blocks_behind.values()), "an empty list of siblings is kept"
        self._check_chains(queue)

    def _check_chains(self, queue: list[int]) -> None:
        """Assert that what is findable is closed under prefixes, and stays so whatever is given up next."""
        place_of = {block: place for place, block in enumerate(queue)}
        for block, content in self._content.items():
            if content.is_first:
                continue
            before = self._block_of_hash.get(content.parent_hash)
            assert before is not None, "a block can be found and the one before it cannot"
            if before in place_of:
                assert block in place_of, "a block is held and the one before it is not"
                assert place_of[block] < place_of[before], "a block would be given up before the one behind it"

    def _note(self, block: int, content: _Content) -> None:
        self._content[block] = content
        self._blocks_behind.setdefault(content.parent_hash, {})[block] = None

    def _forget(self, block: int) -> None:
        block_hash, parent_hash, _, _ = self._content.pop(block)
        siblings = self._blocks_behind[parent_hash]
        del siblings[block]
        if not siblings:
            del self._blocks_behind[parent_hash]
        if block_hash is None:
            return
        del self._block_of_hash[block_hash]
        if block_hash in self._stored:
            del self._stored[block_hash]
        else:
            self._evicted[block_hash] = None

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before] = after
        self._previous[after] = before

    def _link(self, block: int, *, at_front: bool) -> None:
        sentinel = self.num_blocks
        before = sentinel if at_front else self._previous[sentinel]
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block] = before
        self._next[block] = after


def _num_shared_tokens(left: bytes, right: bytes) -> int:
    """Tokens that two runs of little-endian u32 have in common at their beginning."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if left[: middle * TOKEN_BYTES] == right[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
