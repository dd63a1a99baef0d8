"""Which blocks hold the keys and values of which request: prefix matching, growing, sharing, copying, freeing."""

from __future__ import annotations

from typing import NamedTuple

from headrace.protos.block_hash import next_hash, token_bytes_of
from headrace.worker.kv.block_pool import BlockPool
from headrace.worker.request.request import Request

# Tokens that a hit leaves to be computed. One would do for the logits of the last, but a token that is computed alone
# goes through other kernels than one of several, with other bits (docs/decisions/0006).
MIN_TOKENS_LEFT = 2
# Copying a block costs about 0.1 ms over all layers, computing a token of a small model about 0.4 ms.
MIN_COPIED_TOKENS = 2


class BlockCopy(NamedTuple):
    """A block whose content the runner copies before it computes the step."""

    source: int
    destination: int


class KVCacheManager:
    """Gives requests their blocks. Owns the pool; the engine thread owns both.

    A request's `block_table` has one holder's share of each of its blocks, from `reuse` or `reserve` until `free`. The
    first `num_findable_blocks` of them are those that are found by their hashes.
    """

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self._copies: list[BlockCopy] = []

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that this many tokens fill or begin."""
        return -(-num_tokens // self.block_size)

    def reuse(self, request: Request) -> int:
        """Put findable blocks behind the request's computed tokens, as far as they match; give the tokens gained.

        Called each time the request is about to compute, so that what others have computed meanwhile is used too.
        """
        size = self.block_size
        if request.num_computed_tokens != len(request.block_table) * size or request.wants_prompt_logprobs:
            return 0
        if request.num_findable_blocks < len(request.block_table):
            return 0  # what is found behind a hash that stands for other content has that content before it
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
        """Computed tokens of the request, those included that `reuse` would add: as far as hashes tell, which is all
        that an estimate needs. A bisection, for what can be found is closed under prefixes."""
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
        """Put a copy of the block that begins like the request's next one behind its computed tokens; give the tokens
        gained. What the copy has beyond them is overwritten as the request goes on."""
        source, gained = self._find_beginning(request)
        if gained < MIN_COPIED_TOKENS:
            return 0
        # Held, so that the block taken for the copy is not the one to be copied.
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
        """Whether a copy of the request's next block, once another has computed it, would spare tokens that a copy
        made now does not."""
        gained = self._find_beginning(request)[1]
        computed_now = request.num_uncomputed_tokens - (gained if gained >= MIN_COPIED_TOKENS else 0)
        return computed_now - MIN_TOKENS_LEFT >= MIN_COPIED_TOKENS

    def _find_beginning(self, request: Request) -> tuple[int, int]:
        """The block that begins most like the request's next one, and by how many tokens; (-1, 0) if none."""
        index = len(request.block_table)
        start = index * self.block_size
        end = min(start + self.block_size, request.num_tokens - MIN_TOKENS_LEFT)
        if request.num_computed_tokens != start or end - start < MIN_COPIED_TOKENS or request.wants_prompt_logprobs:
            return -1, 0
        if request.num_findable_blocks < index:
            return -1, 0
        return self.pool.find_beginning(self._parent_of(request, index), token_bytes_of(request.token_ids[start:end]))

    def take_copies(self) -> list[BlockCopy]:
        """The copies to be made before the next step computes, in this order."""
        copies, self._copies = self._copies, []
        return copies

    def reserve(self, request: Request, num_tokens: int) -> bool:
        """Make the block table long enough for `num_tokens` tokens. False, and nothing done, if blocks are short."""
        missing = self.num_blocks_for(num_tokens) - len(request.block_table)
        if missing <= 0:
            return True
        if missing > self.pool.num_free_blocks:
            return False
        request.block_table.extend(self.pool.take(missing))
        return True

    def publish(self, request: Request) -> None:
        """Let the blocks that the request's computed tokens have filled be found by others.

        Where a block with the same content is found already, the request takes that one and gives its own back: so it
        holds what stands before the blocks that it makes findable (see BlockPool). Where a hash stands for other
        content, neither this block nor those behind it become findable. Not while a step is computed.
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
        """Let the computed part of the request's last block, if it is not full, and all blocks before it be found."""
        self.publish(request)
        index, begun = divmod(request.num_computed_tokens, self.block_size)
        if begun >= MIN_COPIED_TOKENS and request.num_findable_blocks == index:
            start = index * self.block_size
            content = token_bytes_of(request.token_ids[start : request.num_computed_tokens])
            self.pool.make_beginning_findable(
                request.block_table[index], self._parent_of(request, index), content, is_first=index == 0
            )

    def work_on(self, request: Request, index: int) -> tuple[int, bytes]:
        """What computing the request's block `index` makes: equal for requests that would make the same block."""
        return self._parent_of(request, index), self._content_of(request, index)

    def num_common_tokens(self, left: Request, right: Request) -> int:
        """Tokens in the full blocks with which both begin."""
        low, high = 0, min(left.num_tokens, right.num_tokens) // self.block_size
        while low < high:
            middle = (low + high + 1) // 2
            if self.hash_of(left, middle - 1) == self.hash_of(right, middle - 1):
                low = middle
            else:
                high = middle - 1
        return low * self.block_size

    def free(self, request: Request) -> None:
        """Give all blocks of the request back and set it to nothing computed."""
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
