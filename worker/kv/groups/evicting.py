"""Requests that evict KV blocks of their own when they become long (docs/decisions/kv-cache.md).

Until its first eviction such a request is like any other: it shares, finds and publishes blocks. Then it moves to
private blocks, which no other request finds. A block has a part for each layer, and layers keep different tokens. So
each layer has its own block table over the same blocks:

    blocks of the request   7 12 31 40        table of layer 0   7 12 31 40
                                              evicts 12          7 31 40 12      12 takes the next tokens
                                              table of layer 1   7 12 31 40
                                              evicts 31          7 12 40 31

All layers evict equally many tokens, so after the first eviction no block is taken or released any more.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.fetch import Persistence
from headrace.worker.request.eviction import Eviction, EvictionRule
from headrace.worker.request.request import Request
from headrace.worker.request.step import LayerMoves

# At most this many tokens of an answer are computed again in one step, each as a separate sequence.
MAX_REPLAYED = 32


class EvictionBudget:
    """Lets requests evict their own blocks. Takes no memory beside the blocks."""

    def make(self, pool: BlockPool, persistence: Persistence) -> EvictingAttention:
        """The group. Nobody else can use its blocks."""
        del persistence
        return EvictingAttention(pool)


class EvictingAttention:
    """The blocks of requests that have begun to evict. Only their own request uses them, with a table for each
    layer."""

    def __init__(self, pool: BlockPool) -> None:
        self.num_given_up = 0
        """Number of blocks that requests have evicted themselves."""
        self._pool = pool
        self._block_size = pool.block_size
        self._moves: list[LayerMoves] = []

    def num_blocks_of(self, request: Request, eviction: Eviction, num_tokens: int) -> int:
        """The maximum number of blocks that the request holds until it has computed `num_tokens` tokens."""
        most = self._num_own_blocks(eviction.rule)
        if eviction.has_begun:
            return most
        # The first eviction comes after the first token of the answer.
        of_prompt = self._num_blocks_for(min(num_tokens, request.num_prompt_tokens + 1))
        return max(of_prompt, min(self._num_blocks_for(num_tokens), most))

    def chunk_of(self, request: Request, eviction: Eviction, num_tokens: int) -> int:
        """How many of the request's next `num_tokens` tokens a step should compute: tokens either of the prompt or of
        the answer. In the answer it stops where the sequence has to evict blocks."""
        left = request.num_prompt_tokens - request.num_computed_tokens
        if left <= 0:
            room = eviction.rule.max_cache_size + self._block_size - request.num_kv_tokens
            return min(num_tokens, max(1, room), MAX_REPLAYED)
        return min(num_tokens, left)

    def evict(self, request: Request, eviction: Eviction) -> None:
        """Let the request evict blocks after a step, if it has too many. The blocks of a first eviction are exchanged
        when the request is scheduled again."""
        if request.num_computed_tokens <= request.num_prompt_tokens:
            return
        before = eviction.num_evicted_tokens
        kept = eviction.choose(request.num_kv_tokens, self._block_size)
        if kept is None:
            return
        self.num_given_up += (eviction.num_evicted_tokens - before) // self._block_size
        if eviction.tables is None:
            eviction.kept = kept
            return
        is_free = np.ones(eviction.tables.shape, np.bool_)
        np.put_along_axis(is_free, kept, values=False, axis=1)
        free = eviction.tables[is_free].reshape(len(kept), -1)
        eviction.tables = np.concatenate([np.take_along_axis(eviction.tables, kept, axis=1), free], axis=1)

    def reserve(self, request: Request, eviction: Eviction) -> bool:
        """Make room for the next tokens of a request that has evicted blocks. Returns False if there are too few free
        blocks for its private blocks."""
        return eviction.kept is None or self._move(request, eviction)

    def take_moves(self) -> Sequence[LayerMoves]:
        """Return and clear the moves of parts of blocks to make before the next step, in order, after its copies."""
        moves, self._moves = self._moves, []
        return moves

    def _num_own_blocks(self, rule: EvictionRule) -> int:
        return rule.max_cache_size // self._block_size + 1

    def _num_blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _move(self, request: Request, eviction: Eviction) -> bool:
        """Replace the request's blocks by private ones, and record the copies to make. The old blocks are released
        first, so that those that others can find stay in the cache as long as there is room."""
        assert eviction.kept is not None
        count, old = self._num_own_blocks(eviction.rule), np.array(request.block_table, np.int32)
        if count > self._pool.num_free_blocks + self._pool.num_held_once(request.block_table):
            return False
        self._pool.release(reversed(request.block_table))
        del request.block_table[:]
        request.block_table.extend(self._pool.take(count))
        request.num_findable_blocks = 0
        own = np.array(request.block_table, np.int32)
        num_layers, num_kept = eviction.kept.shape
        self._moves.append(LayerMoves(old[eviction.kept], own[:num_kept]))
        eviction.tables, eviction.kept = np.tile(own, (num_layers, 1)), None
        return True
