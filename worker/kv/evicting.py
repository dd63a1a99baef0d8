"""Assigns KV blocks to requests, some of which evict their own blocks when they become long (docs/decisions/0067).

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

import numpy as np

from headrace.worker.eviction.sequence import SCORED_PROMPT_TOKENS, Eviction, EvictionRule
from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.kv.manager import KVCacheManager
from headrace.worker.request.request import Request
from headrace.worker.request.step import LayerMoves

# At most this many tokens of an answer are computed again in one step, each as a separate sequence.
MAX_REPLAYED = 32


class EvictingCacheManager(KVCacheManager):
    """A `KVCacheManager` for requests with and without an `eviction`."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(pool)
        self._moves: list[LayerMoves] = []

    def num_blocks_of(self, request: Request, num_tokens: int) -> int:
        """See `KVCacheManager`."""
        if request.eviction is None:
            return super().num_blocks_of(request, num_tokens)
        most = self._num_own_blocks(request.eviction.rule)
        if request.eviction.has_begun:
            return most
        # The first eviction comes after the first token of the answer.
        of_prompt = self.num_blocks_for(min(num_tokens, request.num_prompt_tokens + 1))
        return max(of_prompt, min(self.num_blocks_for(num_tokens), most))

    def num_reusable(self, request: Request) -> int:
        """See `KVCacheManager`. Tokens whose attention is scored must be computed."""
        if request.eviction is None:
            return super().num_reusable(request)
        if request.eviction.has_begun:
            return 0
        return min(super().num_reusable(request), request.num_prompt_tokens - SCORED_PROMPT_TOKENS)

    def num_computed_by_now(self, request: Request) -> int:
        """See `KVCacheManager`."""
        if request.eviction is not None and request.eviction.has_begun:
            return request.num_computed_tokens
        return super().num_computed_by_now(request)

    def chunk_of(self, request: Request, num_tokens: int) -> int:
        """See `KVCacheManager`. A step computes tokens either of the prompt or of the answer. In the answer it stops
        where the sequence has to evict blocks."""
        eviction = request.eviction
        if eviction is None:
            return num_tokens
        left = request.num_prompt_tokens - request.num_computed_tokens
        if left <= 0:
            room = eviction.rule.max_cache_size + self.block_size - request.num_kv_tokens
            return min(num_tokens, max(1, room), MAX_REPLAYED)
        return min(num_tokens, left)

    def evict(self, request: Request) -> None:
        """See `KVCacheManager`. The blocks of a first eviction are exchanged when the request is scheduled again."""
        eviction = request.eviction
        if eviction is None or request.num_computed_tokens <= request.num_prompt_tokens:
            return
        before = eviction.num_evicted_tokens
        kept = eviction.choose(request.num_kv_tokens, self.block_size)
        if kept is None:
            return
        self.num_given_up += (eviction.num_evicted_tokens - before) // self.block_size
        if eviction.tables is None:
            eviction.kept = kept
            return
        is_free = np.ones(eviction.tables.shape, np.bool_)
        np.put_along_axis(is_free, kept, values=False, axis=1)
        free = eviction.tables[is_free].reshape(len(kept), -1)
        eviction.tables = np.concatenate([np.take_along_axis(eviction.tables, kept, axis=1), free], axis=1)

    def take_moves(self) -> list[LayerMoves]:
        """See `KVCacheManager`."""
        moves, self._moves = self._moves, []
        return moves

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """See `KVCacheManager`."""
        eviction = request.eviction
        if eviction is None or not eviction.has_begun:
            return super().reserve(request, num_tokens)
        return eviction.kept is None or self._move(request, eviction)

    def publish(self, request: Request) -> None:
        """See `KVCacheManager`. After a request has evicted blocks, its blocks are useless to others."""
        if request.eviction is None or not request.eviction.has_begun:
            super().publish(request)

    def publish_beginning(self, request: Request) -> None:
        """See `KVCacheManager`."""
        if request.eviction is None or not request.eviction.has_begun:
            super().publish_beginning(request)

    def free(self, request: Request) -> None:
        """See `KVCacheManager`."""
        super().free(request)
        if request.eviction is not None:
            request.eviction.reset()

    def _num_own_blocks(self, rule: EvictionRule) -> int:
        return rule.max_cache_size // self.block_size + 1

    def _move(self, request: Request, eviction: Eviction) -> bool:
        """Replace the request's blocks by private ones, and record the copies to make. The old blocks are released
        first, so that those that others can find stay in the cache as long as there is room."""
        assert eviction.kept is not None
        count, old = self._num_own_blocks(eviction.rule), np.array(request.block_table, np.int32)
        if count > self.pool.num_free_blocks + self.pool.num_held_once(request.block_table):
            return False
        self.pool.release(reversed(request.block_table))
        del request.block_table[:]
        request.block_table.extend(self.pool.take(count))
        request.num_findable_blocks = 0
        own = np.array(request.block_table, np.int32)
        num_layers, num_kept = eviction.kept.shape
        self._moves.append(LayerMoves(old[eviction.kept], own[:num_kept]))
        eviction.tables, eviction.kept = np.tile(own, (num_layers, 1)), None
        return True
