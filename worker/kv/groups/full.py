"""Layers whose queries see all tokens: they need every block of a request. These are the blocks of the pool.

A request holds a reference to each block in its `block_table`, from `hold` or `reserve` until `free`. The first
`num_findable_blocks` of them can be found by their hashes.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.protos.block_hash import token_bytes_of
from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.chain import TOKEN_BYTES, content_of, hash_of, key_of, parent_of
from headrace.worker.kv.groups.group import Exchange
from headrace.worker.request.request import Request


class FullAttention:
    """The blocks of requests. Every model has this group; others follow its blocks."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size

    def num_blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def find(self, request: Request, num_reusable: int) -> list[int]:
        """The cached blocks that match the request's next tokens, within its first `num_reusable` tokens."""
        first = len(request.block_table)
        if not self._may_find(request) or request.num_findable_blocks < first:
            return []  # the request's hash collides with another block's, so no later block can match
        found: list[int] = []
        for index in range(first, num_reusable // self.block_size):
            block = self.pool.find(*key_of(request, index, self.block_size))
            if block is None:
                break
            found.append(block)
        return found

    def num_findable(self, request: Request, num_reusable: int) -> int:
        """Estimate how many blocks the request would have after `find`. Compares only hashes, by binary search, because
        findable blocks are closed under prefixes."""
        low = len(request.block_table)
        if not self._may_find(request):
            return low
        high = max(low, num_reusable // self.block_size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.pool.is_findable(hash_of(request, middle - 1, self.block_size)):
                low = middle
            else:
                high = middle - 1
        return low

    def find_beginning(self, request: Request, num_reusable: int, least: int) -> tuple[int, int]:
        """The cached block that shares the longest beginning with the request's next one, and the number of tokens they
        share; (-1, 0) if there is none or fewer than `least` tokens may be shared."""
        index = len(request.block_table)
        start = index * self.block_size
        end = min(start + self.block_size, num_reusable)
        if not self._may_find(request) or end - start < least or request.num_findable_blocks < index:
            return -1, 0
        content = token_bytes_of(request.token_ids[start:end])
        return self.pool.find_beginning(parent_of(request, index, self.block_size), content)

    def _may_find(self, request: Request) -> bool:
        """Whether the request's computed tokens end with a block, and it may skip some of the next ones."""
        is_at_border = request.num_computed_tokens == len(request.block_table) * self.block_size
        return is_at_border and not request.wants_prompt_logprobs

    def hold(self, request: Request, blocks: Sequence[int]) -> None:
        """Append cached blocks that match the request's next tokens."""
        self.pool.hold(blocks)
        request.block_table.extend(blocks)
        request.num_computed_tokens += len(blocks) * self.block_size
        request.num_findable_blocks = len(request.block_table)

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """How many blocks the request has to take, in addition to those in its table, to hold `num_tokens` tokens."""
        return max(0, self.num_blocks_for(num_tokens) - len(request.block_table))

    def reserve(self, request: Request, num_tokens: int) -> list[int]:
        """Extend the block table to hold `num_tokens` tokens. Returns the new blocks; enough blocks must be free."""
        taken = self.pool.take(self.num_missing(request, num_tokens))
        request.block_table.extend(taken)
        return taken

    def publish(self, request: Request) -> list[Exchange]:
        """Make the request's full blocks findable.

        If an older block has the same content, the request switches to that one and releases its own. So a request
        always holds the predecessors of its findable blocks, as BlockPool requires. After a hash collision, neither the
        block nor any later one becomes findable. Must not be called while a step is computed. Returns the blocks that
        the request has switched.
        """
        exchanges = []
        for index in range(request.num_findable_blocks, request.num_computed_tokens // self.block_size):
            own = request.block_table[index]
            key = key_of(request, index, self.block_size)
            standing = self.pool.make_findable(own, *key, is_first=index == 0)
            if standing is None:
                break
            if standing != own:
                self.pool.hold([standing])
                request.block_table[index] = standing
                self.pool.release([own])
                exchanges.append(Exchange(index, own, standing))
            request.num_findable_blocks = index + 1
        return exchanges

    def publish_beginning(self, request: Request, least: int) -> int | None:
        """Make the computed beginning of the request's last block findable, if it has at least `least` tokens. Returns
        the block; None if it has fewer."""
        index, begun = divmod(request.num_computed_tokens, self.block_size)
        if begun < least or request.num_findable_blocks != index:
            return None
        content = content_of(request, index, self.block_size)[: begun * TOKEN_BYTES]
        parent, block = parent_of(request, index, self.block_size), request.block_table[index]
        self.pool.make_beginning_findable(block, parent, content, is_first=index == 0)
        return block

    def free(self, request: Request) -> None:
        """Release all blocks of the request, and reset its number of computed tokens."""
        self.pool.release(reversed(request.block_table))
        del request.block_table[:]
        request.num_computed_tokens = 0
        request.num_findable_blocks = 0
