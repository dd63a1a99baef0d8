"""The blocks of beam searches.

The full blocks of the prompt are in the request's table, once for all beams. After them, each beam has a tail of
blocks. Beams with a common beginning hold the same blocks, each with its own reference:

    table of the request   [p0 p1 | a  b]        prompt, tail of the first beam
    tails of the others           | a  c         shares a
                                  | d  e

A beam writes only into its last block. When several continue one beam, the first gets its last block, and the others
copies; none if the block is full. That is done when the next step is planned, because only then can other requests give
up blocks for it.
"""

from __future__ import annotations

from array import array
from collections import Counter
from typing import NamedTuple

from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.request.request import Request
from headrace.worker.request.step import BlockCopy

# As many as the choices of one request.
MAX_BEAMS = 128


class BeamLimits(NamedTuple):
    """The bounds of beam searches: the number of beams, and the blocks that a search has when it is alone."""

    max_width: int
    num_blocks: int
    block_size: int

    def most_tokens(self, num_prompt_tokens: int, width: int) -> int:
        """How many tokens the answers may have: all beams may differ from their first token on. At most 0 if the
        prompt is too long."""
        first, others = divmod(num_prompt_tokens, self.block_size)
        return (self.num_blocks - first) // width * self.block_size - others


class BeamBlocks:
    """The tails of beams, of blocks of the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._size = pool.block_size

    def reserve(self, request: Request) -> list[BlockCopy] | None:
        """Give each beam its blocks, with room for one more token. Returns the copies to make before the next step;
        None if too few blocks are free, then it may be called again."""
        search = request.beams
        assert search is not None, "it is no beam search"
        if search.parents is None:
            return []  # done before, and no step since
        tails = self._without_dropped(request)
        parents, num_parents = search.parents, len(tails)
        is_full = request.num_computed_tokens % self._size == 0
        num_missing = len(parents) if is_full else len(parents) - num_parents
        if num_missing > self._pool.num_free_blocks:
            return None
        taken = self._pool.take(num_missing)
        copies, given = [], set[int]()
        found = []
        for parent in parents:
            tail = array("i", tails[parent])
            if is_full:
                if parent in given:
                    self._pool.hold(tail)
                tail.append(taken.pop())
            elif parent in given:
                self._pool.hold(tail[:-1])
                copies.append(BlockCopy(tail[-1], taken.pop()))
                tail[-1] = copies[-1].destination
            given.add(parent)
            found.append(tail)
        self._set(request, found)
        search.parents = None
        return copies

    def free(self, request: Request) -> None:
        """Release the tails of all beams but the first."""
        for tail in request.beam_tails:
            self._pool.release(reversed(tail))
        request.beam_tails = []

    def _without_dropped(self, request: Request) -> list[array[int]]:
        """Release the blocks of beams that nothing continues. Returns the tails of the others."""
        search = request.beams
        assert search is not None
        assert search.parents is not None
        children = Counter(search.parents)
        kept: list[array[int]] = []
        place_of: dict[int, int] = {}
        for place, tail in enumerate([request.block_table[self._first(request) :], *request.beam_tails]):
            if place in children:
                place_of[place] = len(kept)
                kept.append(tail)
            else:
                self._pool.release(reversed(tail))
        search.parents = [place_of[parent] for parent in search.parents]
        self._set(request, kept)
        return kept

    def _set(self, request: Request, tails: list[array[int]]) -> None:
        request.block_table[self._first(request) :] = tails[0]
        request.beam_tails = tails[1:]

    def _first(self, request: Request) -> int:
        """The place of the first block of a tail."""
        return request.num_prompt_tokens // self._size
