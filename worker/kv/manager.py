"""Assigns KV blocks to requests: prefix matching, allocation, sharing, copying, freeing."""

from __future__ import annotations

from typing import NamedTuple

from headrace.protos.block_hash import next_hash, token_bytes_of
from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.request.request import Request

# The fewest tokens that are computed after a hit. One would be enough for the logits, but other kernels compute a
# single token and give other bits (docs/decisions/0006).
MIN_TOKENS_LEFT = 2
# Copying a block costs about 0.1 ms over all layers, computing a token of a small model about 0.4 ms.
MIN_COPIED_TOKENS = 2


class BlockCopy(NamedTuple):
    """A copy of a block, made by the runner before it computes the step."""

    source: int
    destination: int


class KVCacheManager:
    """Assigns blocks to requests. Owns the pool. Used by the engine thread only.

    A request holds a reference to each block in its `block_table`, from `reuse` or `reserve` until `free`. The first
    `num_findable_blocks` of them can be found by their hashes.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self._copies: list[BlockCopy] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        """Number of blocks for this many tokens."""
        return -(-num_tokens // self.block_size)

    def reuse(self, request: Request) -> int:
        """Append cached blocks to the request's computed tokens, as far as they match. Returns the tokens gained.

        Called each time before the request computes, so that it also uses what others have computed meanwhile.
        """
        size = self.block_size
        if request.num_computed_tokens != len(request.block_table) * size or request.wants_prompt_logprobs:
            return 0
        if request.num_findable_blocks < len(request.block_table):
            return 0  # its last hash finds a block with other content, and so would all later ones
        last_reusable = (request.num_tokens - MIN_TOKENS_LEFT) // size
        found: list[int] = []
        for index in range(len(request.block_table), last_reusable):
            block_hash = self.hash_of(request, index)
            block = self.pool.find(block_hash, self._parent_of(request, index), self._content_of(request, index))
            if block is None:
                break
            found.append(block)
        if found:
            self.pool.hold(found)
            request.block_table.extend(found)
            request.num_computed_tokens += len(found) * size
            request.num_findable_blocks = len(request.block_table)
        return len(found) * size

    def num_computed_by_now(self, request: Request) -> int:
        """An estimate of the request's computed tokens after `reuse`. Compares hashes only. A bisection, because
        findable blocks are closed under prefixes."""
        size = self.block_size
        held = len(request.block_table)
        if request.num_computed_tokens != held * size or request.wants_prompt_logprobs:
            return request.num_computed_tokens
        low, high = held, max(held, (request.num_tokens - MIN_TOKENS_LEFT) // size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.pool.is_findable(self.hash_of(request, middle - 1)):
                low = middle
            else:
                high = middle - 1
        return low * size

    def copy_beginning(self, request: Request) -> int:
        """Append a copy of the block that begins like the request's next one. Returns the tokens gained. The rest of
        the copy is overwritten as the request continues."""
        source, gained = self._find_beginning(request)
        if gained < MIN_COPIED_TOKENS:
            return 0
        # Hold it, so that `take` does not return the block to be copied.
        self.pool.hold([source])
        if self.pool.num_free_blocks:
            request.block_table.extend(self.pool.take(1))
            request.num_computed_tokens += gained
            self._copies.append(BlockCopy(source, request.block_table[-1]))
        else:
            gained = 0
        self.pool.release([source])
        return gained

    def is_worth_waiting(self, request: Request) -> bool:
        """Whether the request should wait until another has computed its next block, because a copy made then saves
        tokens that a copy made now does not."""
        gained = self._find_beginning(request)[1]
        computed_now = request.num_uncomputed_tokens - (gained if gained >= MIN_COPIED_TOKENS else 0)
        return computed_now - MIN_TOKENS_LEFT >= MIN_COPIED_TOKENS

    def _find_beginning(self, request: Request) -> tuple[int, int]:
        """The block with the longest common beginning with the request's next one, and its tokens; (-1, 0) if none."""
        index = len(request.block_table)
        start = index * self.block_size
        end = min(start + self.block_size, request.num_tokens - MIN_TOKENS_LEFT)
        if request.num_computed_tokens != start or end - start < MIN_COPIED_TOKENS or request.wants_prompt_logprobs:
            return -1, 0
        if request.num_findable_blocks < index:
            return -1, 0
        return self.pool.find_beginning(self._parent_of(request, index), token_bytes_of(request.token_ids[start:end]))

    def take_copies(self) -> list[BlockCopy]:
        """The copies to be made before the next step, in this order."""
        copies, self._copies = self._copies, []
        return copies

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Extend the block table for `num_tokens` tokens. Returns False, without any change, if there are too few
        blocks."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_table)
        if missing <= 0:
            return True
        if missing > self.pool.num_free_blocks:
            return False
        request.block_table.extend(self.pool.take(missing))
        return True

    def publish(self, request: Request) -> None:
        """Make the request's full blocks findable.

        If an older block has the same content, the request uses that one and releases its own. So it holds all blocks
        before those that it makes findable (see BlockPool). If a hash finds other content, neither this block nor any
        later one becomes findable. Must not be called while a step is computed.
        """
        full = request.num_computed_tokens // self.block_size
        for index in range(request.num_findable_blocks, full):
            own = request.block_table[index]
            standing = self.pool.make_findable(
                own,
                self.hash_of(request, index),
                self._parent_of(request, index),
                self._content_of(request, index),
                is_first=index == 0,
            )
            if standing is None:
                return
            if standing != own:
                self.pool.hold([standing])
                request.block_table[index] = standing
                self.pool.release([own])
            request.num_findable_blocks = index + 1

    def publish_beginning(self, request: Request) -> None:
        """Make the request's full blocks, and the computed beginning of its last block, findable."""
        self.publish(request)
        index, begun = divmod(request.num_computed_tokens, self.block_size)
        if begun >= MIN_COPIED_TOKENS and request.num_findable_blocks == index:
            start = index * self.block_size
            content = token_bytes_of(request.token_ids[start : request.num_computed_tokens])
            self.pool.make_beginning_findable(
                request.block_table[index], self._parent_of(request, index), content, is_first=index == 0
            )

    def work_on(self, request: Request, index: int) -> tuple[int, bytes]:
        """A key for the request's block `index`, equal for requests that would compute the same block."""
        return self._parent_of(request, index), self._content_of(request, index)

    def num_common_tokens(self, left: Request, right: Request) -> int:
        """Tokens in the full blocks of the common prefix."""
        low, high = 0, min(left.num_tokens, right.num_tokens) // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.hash_of(left, middle - 1) == self.hash_of(right, middle - 1):
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    def free(self, request: Request) -> None:
        """Release all blocks of the request. It has no computed tokens then."""
        self.pool.release(reversed(request.block_table))
        del request.block_table[:]
        request.num_computed_tokens = 0
        request.num_findable_blocks = 0

    def hash_of(self, request: Request, index: int) -> int:
        """Chained hash of the request's block `index`, all of whose tokens are known."""
        hashes, of_prompt = request.block_hashes, request.prompt_hashes
        if len(hashes) <= index:
            hashes.extend(of_prompt[len(hashes) :])
        while len(hashes) <= index:
            parent = hashes[-1] if hashes else request.root_hash
            hashes.append(next_hash(parent, self._content_of(request, len(hashes))))
            if len(hashes) * self.block_size <= request.num_prompt_tokens:
                of_prompt.append(hashes[-1])
        return hashes[index]

    def _parent_of(self, request: Request, index: int) -> int:
        return self.hash_of(request, index - 1) if index else request.root_hash

    def _content_of(self, request: Request, index: int) -> bytes:
        return token_bytes_of(request.token_ids[index * self.block_size : (index + 1) * self.block_size])
