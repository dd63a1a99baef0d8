"""Assigns KV blocks to requests: prefix matching, allocation, sharing, copying, freeing."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.protos.block_hash import next_hash, token_bytes_of
from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.request.request import Branch, Request
from headrace.worker.request.step import LayerMoves, Scheduled, StateStep

# At least this many tokens are computed after a cache hit. One would be enough for the logits, but different kernels
# compute a single token, with slightly different results (docs/decisions/0006).
MIN_TOKENS_LEFT = 2
# Copying a block in all layers costs about 0.1 ms; computing a token of a small model costs about 0.4 ms.
MIN_COPIED_TOKENS = 2


class BlockCopy(NamedTuple):
    """A block to be copied by the runner before it computes the next step. `parts` are the slots of the parts that
    belong to layers with a sliding window, if these are in slots."""

    source: int
    destination: int
    parts: tuple[int, int] | None = None


class KVCacheManager:
    """Assigns blocks to requests and owns the pool. Only the engine thread uses it.

    A request holds a reference to each block in its `block_table`, from `reuse` or `reserve` until `free`. The first
    `num_findable_blocks` of them can be found by their hashes.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.num_given_up = 0
        """Number of blocks that requests have evicted themselves."""
        self._copies: list[BlockCopy] = []

    @property
    def num_states(self) -> tuple[int, int]:
        """The number of slots for states of recurrent layers, and of states that can be found."""
        return 0, 0

    def take_state_changes(self) -> dict[int, bool]:
        """The changes of saved states since the last call: hash of the block before a state -> whether the state is
        saved."""
        return {}

    @property
    def num_parts(self) -> tuple[int, int]:
        """The number of slots for parts of blocks that belong to layers with a sliding window, and of those that
        running requests hold."""
        return 0, 0

    @property
    def part_slots(self) -> npt.NDArray[np.int32] | None:
        """The slot of each block's part for layers with a sliding window, and of the block for padding. It changes with
        each step. None if these layers keep all tokens."""
        return None

    def has_room(self, request: Request, num_blocks: int) -> bool:
        """Whether a waiting request may run, so that running requests can take `num_blocks` more blocks."""
        return num_blocks <= self.pool.num_free_blocks

    def num_blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that `num_tokens` tokens occupy."""
        return -(-num_tokens // self.block_size)

    def num_blocks_of(self, request: Request, num_tokens: int) -> int:
        """The maximum number of blocks that the request holds until it has computed `num_tokens` tokens."""
        return self.num_blocks_for(num_tokens)

    def num_reusable(self, request: Request) -> int:
        """How many of the request's tokens may come from the cache."""
        return request.num_tokens - MIN_TOKENS_LEFT

    def reuse(self, request: Request) -> int:
        """Append the cached blocks that match the request's next tokens. Returns the number of tokens gained.

        The scheduler calls it before each step of the request, so that the request also uses blocks that other requests
        have computed meanwhile.
        """
        found = self._find_cached(request)
        if found:
            self.pool.hold(found)
            request.block_table.extend(found)
            request.num_computed_tokens += len(found) * self.block_size
            request.num_findable_blocks = len(request.block_table)
        return len(found) * self.block_size

    def _find_cached(self, request: Request) -> list[int]:
        """The cached blocks that match the request's next tokens."""
        size = self.block_size
        if request.num_computed_tokens != len(request.block_table) * size or request.wants_prompt_logprobs:
            return []
        if request.num_findable_blocks < len(request.block_table):
            return []  # the request's hash collides with another block's, so no later block can match
        last_reusable = self.num_reusable(request) // size
        found: list[int] = []
        for index in range(len(request.block_table), last_reusable):
            block_hash = self.hash_of(request, index)
            block = self.pool.find(block_hash, self._parent_of(request, index), self._content_of(request, index))
            if block is None:
                break
            found.append(block)
        return found

    def num_computed_by_now(self, request: Request) -> int:
        """Estimate how many computed tokens the request would have after `reuse`. Compares only hashes, by binary
        search, because findable blocks are closed under prefixes."""
        size = self.block_size
        held = len(request.block_table)
        if request.num_computed_tokens != held * size or request.wants_prompt_logprobs:
            return request.num_computed_tokens
        low, high = held, max(held, self.num_reusable(request) // size)
        while low < high:
            middle = (low + high + 1) // 2
            if self.pool.is_findable(self.hash_of(request, middle - 1)):
                low = middle
            else:
                high = middle - 1
        return low * size

    def copy_beginning(self, request: Request) -> int:
        """Append a copy of a cached block that begins like the request's next one. Returns the number of tokens gained.
        The request overwrites the rest of the copy as it continues."""
        source, gained = self._find_beginning(request)
        missing = self.num_blocks_of(request, request.num_tokens + 1) - len(request.block_table)
        # A request that lacks blocks may not be part of this step. Then the copy would not be made.
        if gained < MIN_COPIED_TOKENS or self.pool.num_free_blocks < missing:
            return 0
        # While the source is held, `take` cannot evict it.
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
        """Whether the request should wait for another request to compute its next block. True if copying that block
        later saves more tokens than copying a beginning now."""
        gained = self._find_beginning(request)[1]
        left = self.num_reusable(request) - request.num_computed_tokens
        return left - (gained if gained >= MIN_COPIED_TOKENS else 0) >= MIN_COPIED_TOKENS

    def _find_beginning(self, request: Request) -> tuple[int, int]:
        """The cached block that shares the longest beginning with the request's next one, and the number of tokens they
        share; (-1, 0) if there is none."""
        index = len(request.block_table)
        start = index * self.block_size
        end = min(start + self.block_size, self.num_reusable(request))
        if request.num_computed_tokens != start or end - start < MIN_COPIED_TOKENS or request.wants_prompt_logprobs:
            return -1, 0
        if request.num_findable_blocks < index:
            return -1, 0
        return self.pool.find_beginning(self._parent_of(request, index), token_bytes_of(request.token_ids[start:end]))

    def chunk_of(self, request: Request, num_tokens: int) -> int:
        """How many of the request's next `num_tokens` tokens a step should compute."""
        return num_tokens

    def plan_states(self, scheduled: Sequence[Scheduled]) -> Sequence[StateStep] | None:
        """The states of recurrent layers that a step reads and writes. None if the model has no such layers."""
        return None

    def evict(self, request: Request) -> None:
        """Let the request evict blocks of its own after a step, if it has too many."""

    def take_moves(self) -> Sequence[LayerMoves]:
        """Return and clear the moves of parts of blocks to make before the next step, in order, after its copies."""
        return ()

    def take_copies(self) -> list[BlockCopy]:
        """Return and clear the copies to make before the next step, in order."""
        copies, self._copies = self._copies, []
        return copies

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Extend the block table to hold `num_tokens` tokens. Returns False and changes nothing if too few blocks are
        free."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_table)
        if missing <= 0:
            return True
        if missing > self.pool.num_free_blocks:
            return False
        request.block_table.extend(self.pool.take(missing))
        return True

    def num_repeated(self, request: Request) -> int:
        """How many tokens a branch of the request's draft computes again: the latest one, unless a block ends there."""
        return int(request.num_tokens % self.block_size != 0)

    def add_branch(self, request: Request, token_ids: Sequence[int], num_spared: int) -> bool:
        """Take blocks for a branch, and copy the computed part of the first one. Returns False and changes nothing if
        fewer than `num_spared` blocks would stay free."""
        first = request.num_tokens // self.block_size
        count = self.num_blocks_for(request.num_tokens + len(token_ids)) - first
        if self.pool.num_free_blocks < count + num_spared:
            return False
        blocks = self.pool.take(count)
        if request.num_computed_tokens > first * self.block_size:
            self._copies.append(BlockCopy(request.block_table[first], blocks[0]))
        request.branch = Branch(token_ids, first, blocks)
        return True

    def end_branch(self, request: Request, token_ids: Sequence[int] = ()) -> None:
        """Release the blocks of the request's branch, if it has one. `token_ids` follow the request's latest token. If
        the branch begins with them, its blocks replace those of the draft."""
        branch, request.branch = request.branch, None
        if branch is None:
            return
        given_up: Sequence[int] = branch.blocks
        if branch.token_ids[0] in token_ids[:1]:
            given_up = request.block_table[branch.first_block :]
            request.block_table[branch.first_block :] = array("i", branch.blocks)
        self.pool.release(reversed(given_up))

    def publish(self, request: Request) -> None:
        """Make the request's full blocks findable.

        If an older block has the same content, the request switches to that one and releases its own. So a request
        always holds the predecessors of its findable blocks, as BlockPool requires. After a hash collision, neither the
        block nor any later one becomes findable. Must not be called while a step is computed.
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
                self._exchange(request, index, standing)
            request.num_findable_blocks = index + 1

    def _exchange(self, request: Request, index: int, block: int) -> None:
        """Let the request hold another block with the same content as its block `index`."""
        own = request.block_table[index]
        self.pool.hold([block])
        request.block_table[index] = block
        self.pool.release([own])

    def publish_beginning(self, request: Request) -> None:
        """Make the request's full blocks findable, and the computed beginning of its last block."""
        self.publish(request)
        index, begun = divmod(request.num_computed_tokens, self.block_size)
        if begun >= MIN_COPIED_TOKENS and request.num_findable_blocks == index:
            start = index * self.block_size
            content = token_bytes_of(request.token_ids[start : request.num_computed_tokens])
            self.pool.make_beginning_findable(
                request.block_table[index], self._parent_of(request, index), content, is_first=index == 0
            )

    def work_on(self, request: Request, index: int) -> tuple[int, bytes]:
        """A key for the request's block `index`. Requests that would compute the same block have the same key."""
        return self._parent_of(request, index), self._content_of(request, index)

    def num_common_tokens(self, left: Request, right: Request) -> int:
        """Number of tokens in the full blocks of the two requests' common prefix."""
        low, high = 0, min(left.num_tokens, right.num_tokens) // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.hash_of(left, middle - 1) == self.hash_of(right, middle - 1):
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    def free(self, request: Request) -> None:
        """Release all blocks of the request, and reset its number of computed tokens."""
        self.end_branch(request)
        self.pool.release(reversed(request.block_table))
        del request.block_table[:]
        request.num_computed_tokens = 0
        request.num_findable_blocks = 0

    def forget_all(self) -> None:
        """Forget the content of all blocks. None may be in use."""
        self.pool.forget_all()

    def check(self) -> None:
        """Assert that every block is accounted for. For tests."""
        self.pool.check()

    def hash_of(self, request: Request, index: int) -> int:
        """The chained hash of the request's block `index`. All tokens of the block must be known."""
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
