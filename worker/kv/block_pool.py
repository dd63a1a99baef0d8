"""The KV blocks of a worker: reference counts, contents, and eviction order.

A block is in one of three states:

    referenced   ref_count > 0: in the block table of one or more requests
    cached       ref_count = 0 and findable: reusable until it is evicted
    free         ref_count = 0 and without useful content

A full block can be found by its hash and shared. A block can also be found by the hash of its predecessor, even if only
its beginning is computed. A sequence that shares only this beginning copies the block.

The findable blocks are closed under prefixes: if a block can be found by its hash, so can all blocks before it in its
chain. Routers rely on this (docs/decisions/placement.md#closed-prefixes). Three rules ensure it:

- A block becomes findable only after its predecessor.
- A request that holds a findable block also holds its predecessors.
- A sequence releases its blocks from the end, so the later blocks of a chain are evicted first.

Cached and free blocks are in one queue in eviction order: first the free blocks, then the cached ones, least recently
released first. The queue is a doubly linked list in two arrays. Taking its front and removing a block from its middle
are both O(1). Slot `num_blocks` is the sentinel:

    sentinel <-> 7 <-> 3 <-> 12 <-> sentinel       block 7 is taken first
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import islice

from headrace.worker.kv.chain import TOKEN_BYTES, Content
from headrace.worker.kv.journal import BlockJournal

# At most this many blocks with the same parent are compared for the longest common beginning, newest first.
MAX_SIBLINGS = 16


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each. Not thread-safe: the engine thread owns it.

    `take_events` returns the hashes that became findable and those that were evicted. A hash that became findable and
    was evicted since the last call is in neither list.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        journal: BlockJournal | None = None,
        on_eviction: Callable[[int, Content], None] | None = None,
        on_take: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        """`on_eviction` is called before a cached block is reused and loses its content, `on_take` with blocks whose
        content is about to change. ValueError without a block."""
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_evictions = 0
        self.num_restored = 0
        self._journal = journal
        self._on_eviction = on_eviction
        self._on_take = on_take
        self._num_unreferenced = num_blocks
        self._num_shared = 0
        self._ref_count = array("i", bytes(4 * num_blocks))
        self._next = array("i", [*range(1, num_blocks + 1), 0])
        self._previous = array("i", [num_blocks, *range(num_blocks)])
        self._block_of_hash: dict[int, int] = {}
        self._content: dict[int, Content] = {}
        self._blocks_behind: dict[int, dict[int, None]] = {}
        self._stored: dict[int, None] = {}
        self._evicted: dict[int, None] = {}

    @property
    def num_free_blocks(self) -> int:
        """Number of blocks that can be taken: free and cached ones."""
        return self._num_unreferenced

    @property
    def num_cached_blocks(self) -> int:
        """Number of blocks that can be found by their hash, referenced or not."""
        return len(self._block_of_hash)

    @property
    def num_partial_blocks(self) -> int:
        """Number of blocks whose first tokens can be found but which are not full, referenced or not."""
        return len(self._content) - len(self._block_of_hash)

    @property
    def num_shared_holds(self) -> int:
        """Number of holders beyond the first of each block."""
        return self._num_shared

    def num_held_once(self, blocks: Iterable[int]) -> int:
        """How many of these blocks have exactly one holder."""
        return sum(self._ref_count[block] == 1 for block in blocks)

    def is_findable(self, block_hash: int) -> bool:
        """Whether some block has this hash."""
        return block_hash in self._block_of_hash

    def block_of(self, block_hash: int) -> int | None:
        """The block with this hash; None if there is none."""
        return self._block_of_hash.get(block_hash)

    def content_of(self, block: int) -> Content | None:
        """The content of a block that can be found, or whose beginning can; None for others."""
        return self._content.get(block)

    def is_cached(self, block: int) -> bool:
        """Whether this block, or its beginning, can be found."""
        return block in self._content

    def locate(self, block_hash: int) -> tuple[int, Content] | None:
        """The block with this hash and its content, or None. Any thread may call it; the block may be evicted at any
        time unless the caller is the owner."""
        block = self._block_of_hash.get(block_hash)
        content = None if block is None else self._content.get(block)
        return None if block is None or content is None or content.block_hash != block_hash else (block, content)

    def hottest_first(self) -> list[Content]:
        """The full findable blocks, most recently used first, and each after its predecessor. Any thread may call it;
        blocks that change while this runs may be missing."""
        contents = dict(self._content)
        recent = [block for block in contents if self._ref_count[block]]
        block = self.num_blocks
        for _ in range(self.num_blocks):
            block = self._previous[block]
            if block == self.num_blocks:
                break
            recent.append(block)
        by_hash = {content.block_hash: content for content in contents.values() if content.block_hash is not None}
        found: dict[int, Content] = {}
        for block in recent:
            chain, content = [], contents.get(block)
            while content is not None and content.block_hash is not None and content.block_hash not in found:
                chain.append(content)
                content = None if content.is_first else by_hash.get(content.parent_hash)
            if chain and (chain[-1].is_first or chain[-1].parent_hash in found):
                found.update((content.block_hash, content) for content in reversed(chain) if content.block_hash)
        return list(found.values())

    def chain_to(self, block_hash: int) -> list[int]:
        """The blocks up to the one with this hash, the first one first; empty if it cannot be found."""
        chain: list[int] = []
        while (block := self._block_of_hash.get(block_hash)) is not None:
            chain.append(block)
            if self._content[block].is_first:
                break
            block_hash = self._content[block].parent_hash
        return chain[::-1]

    def find(self, block_hash: int, parent_hash: int, token_bytes: bytes) -> int | None:
        """The block with this hash, parent and content, or None. Comparing the content rules out hash collisions."""
        block = self._block_of_hash.get(block_hash)
        if block is None or self._content[block][:3] != (block_hash, parent_hash, token_bytes):
            return None
        return block

    def find_beginning(self, parent_hash: int, token_bytes: bytes) -> tuple[int, int]:
        """The block after `parent_hash` with the longest common beginning, and its number of tokens; (-1, 0) if there
        is none."""
        best, longest = -1, 0
        for block in islice(reversed(self._blocks_behind.get(parent_hash, {})), MAX_SIBLINGS):
            shared = _num_shared_tokens(self._content[block].token_bytes, token_bytes)
            if shared > longest:
                best, longest = block, shared
        return best, longest

    def take(self, count: int) -> list[int]:
        """Take `count` blocks for one holder, in eviction order. Their cached content is lost.

        `count` must be at most `num_free_blocks`.
        """
        assert 0 <= count <= self._num_unreferenced, "more blocks are taken than are free"
        taken = []
        sentinel = self.num_blocks
        for _ in range(count):
            block = self._next[sentinel]
            self._unlink(block)
            if block in self._content:
                if self._on_eviction is not None:
                    self._on_eviction(block, self._content[block])
                self._forget(block)
                self.num_evictions += 1
            elif self._journal is not None:
                self._journal.drop(block)
            self._ref_count[block] = 1
            taken.append(block)
        self._num_unreferenced -= count
        if self._journal is not None and taken:
            self._journal.grow(max(taken))
        if self._on_take is not None:
            self._on_take(taken)
        return taken

    def hold(self, blocks: Iterable[int]) -> None:
        """Add a holder to each of these blocks, cached or referenced."""
        for block in blocks:
            if self._ref_count[block] == 0:
                assert block in self._content, "holding a block that nobody has and nobody can find"
                self._unlink(block)
                self._num_unreferenced -= 1
            else:
                self._num_shared += 1
            self._ref_count[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove one holder from each block. Pass the last block of a sequence first, so that it is evicted first."""
        cached = []
        for block in blocks:
            assert self._ref_count[block] > 0, "releasing a block that nobody holds"
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                self._num_unreferenced += 1
                is_cached = block in self._content
                self._link(block, at_front=not is_cached)
                if is_cached:
                    cached.append(block)
            else:
                self._num_shared -= 1
        if self._journal is not None:
            self._journal.use(cached)

    def make_findable(
        self, block: int, block_hash: int, parent_hash: int, token_bytes: bytes, *, is_first: bool
    ) -> int | None:
        """Make a full, computed, referenced block findable. Its predecessor must be findable, unless it `is_first`.

        Returns the block that its hash leads to: this one, or an older one with the same content. Returns None if the
        hash leads to a block with different content. Then no later block of the chain may become findable.
        """
        assert self._ref_count[block] > 0, "only a held block can become findable"
        assert is_first or parent_hash in self._block_of_hash, "a block would be findable without its predecessor"
        if block in self._content:
            self._forget(block)
        if block_hash in self._block_of_hash:
            return self.find(block_hash, parent_hash, token_bytes)
        self._block_of_hash[block_hash] = block
        self._note(block, Content(block_hash, parent_hash, token_bytes, is_first))
        if block_hash in self._evicted:
            del self._evicted[block_hash]
        else:
            self._stored[block_hash] = None
        return block

    def make_beginning_findable(self, block: int, parent_hash: int, token_bytes: bytes, *, is_first: bool) -> None:
        """Make the computed beginning of a referenced block findable, so that it can be copied."""
        assert self._ref_count[block] > 0, "only a held block can become findable"
        if block in self._content:
            self._forget(block)
        self._note(block, Content(None, parent_hash, token_bytes, is_first))

    def forget_all(self) -> None:
        """Forget the content of all blocks. None may be referenced."""
        for block in reversed(list(self._content)):  # each chain from its end
            self._forget(block)

    def put_last(self, blocks: Iterable[int]) -> None:
        """Move unreferenced blocks to the end of the eviction queue, in this order."""
        for block in blocks:
            assert self._ref_count[block] == 0, "a held block is not in the queue"
            self._unlink(block)
            self._link(block, at_front=False)

    def restore(self, contents: Iterable[tuple[int, Content]]) -> None:
        """Make blocks findable again that the journal already records. They must have no content in the pool, and each
        must follow its predecessor in `contents`. Set their eviction order with `put_last`."""
        for block, content in contents:
            assert self._ref_count[block] == 0, "a held block cannot be restored"
            assert block not in self._content, "a block with content cannot be restored"
            assert content.is_first or content.parent_hash in self._block_of_hash, "the block's predecessor is missing"
            self._insert(block, content)
            if content.block_hash is not None:
                assert content.block_hash not in self._block_of_hash, "two blocks have the same hash"
                self._block_of_hash[content.block_hash] = block
                self._stored[content.block_hash] = None
            self.num_restored += 1

    def take_events(self) -> tuple[list[int], list[int]]:
        """Return the hashes that became findable and the hashes that were evicted since the last call. No hash is in
        both lists. A chain's blocks are in order in the first list and in reverse order in the second.
        """
        stored, evicted = list(self._stored), list(self._evicted)
        self._stored.clear()
        self._evicted.clear()
        return stored, evicted

    def check(self) -> None:
        """Assert that every block is accounted for exactly once. Takes O(num_blocks) time; for tests."""
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
        assert self._num_shared == sum(self._ref_count) - held, "holders are counted wrongly"
        full = {content.block_hash: block for block, content in self._content.items() if content.block_hash is not None}
        assert full == self._block_of_hash, "a hash leads to the wrong block"
        behind = {(parent, block) for parent, blocks in self._blocks_behind.items() for block in blocks}
        assert behind == {(content.parent_hash, block) for block, content in self._content.items()}
        assert all(self._blocks_behind.values()), "an empty list of siblings is kept"
        self._check_chains(queue)

    def _check_chains(self, queue: list[int]) -> None:
        """Assert that findable blocks are closed under prefixes, and remain so after any number of evictions."""
        place_of = {block: place for place, block in enumerate(queue)}
        for block, content in self._content.items():
            if content.is_first:
                continue
            before = self._block_of_hash.get(content.parent_hash)
            assert before is not None, "a block is findable, but its predecessor is not"
            if before in place_of:
                assert block in place_of, "a block is held, but its predecessor is not"
                assert place_of[block] < place_of[before], "a block would be evicted before its successor"

    def _note(self, block: int, content: Content) -> None:
        self._insert(block, content)
        if self._journal is not None:
            self._journal.note(block, content)

    def _insert(self, block: int, content: Content) -> None:
        self._content[block] = content
        self._blocks_behind.setdefault(content.parent_hash, {})[block] = None

    def _forget(self, block: int) -> None:
        if self._journal is not None:
            self._journal.drop(block)
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
    """Length of the common prefix of two arrays of little-endian u32."""
    low, high = 0, min(len(left), len(right)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if left[: middle * TOKEN_BYTES] == right[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
