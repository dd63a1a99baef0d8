"""A model runner that computes nothing and forgets nothing: the oracle of the engine's tests.

It writes the token ids of a step into fake KV blocks, through the block indices of the batch, and derives each next
token by reading the whole sequence back through them. A wrong block table, a block given to two, a token computed too
late or at the wrong position all give wrong tokens, and `expected_tokens` knows the right ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt

from headrace.worker.model.batch import Batch
from headrace.worker.sampling.logits import Logits
from tests.worker.images import tokens_of_states

EMPTY = -1


def next_token(context: Sequence[int], vocab_size: int) -> int:
    """The token after a context. It depends on all tokens of the context and their order."""
    return crc32(np.asarray(context, np.int64).tobytes()) % vocab_size


def expected_tokens(prompt: Sequence[int], count: int, vocab_size: int) -> list[int]:
    """The tokens that a greedy request for `count` tokens must get."""
    context = list(prompt)
    for _ in range(count):
        context.append(next_token(context, vocab_size))
    return context[len(prompt) :]


def tokens_of(batch: Batch) -> npt.NDArray[np.int64]:
    """The tokens of a step. Those of images are read from their states."""
    if batch.images is None:
        return batch.input_ids
    tokens = batch.input_ids.copy()
    tokens[batch.images.rows] = tokens_of_states(batch.images.states)
    return tokens


class FakeRunner:
    """`num_blocks` blocks of `block_size` token ids, and one for padding. Counts the tokens it was given,
    without padding."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int) -> None:
        self.padding_block = num_blocks
        self.blocks = np.full((num_blocks + 1, block_size), EMPTY, np.int64)
        self.vocab_size, self.block_size = vocab_size, block_size
        self.infer_s = 0.0
        self.small_decode = 0
        self.least_decode = 1
        self._logits: deque[Logits] = deque(maxlen=2)
        self.num_tokens = 0
        self.batch_sizes: list[int] = []
        self.fail_next: Exception | None = None
        self._input_ids = np.zeros(0, np.int64)

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Compute the logits of the next tokens, and spoil those before that are not to be kept."""
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        self._check_shapes(batch)
        self._input_ids = tokens_of(batch)
        for source, destination in batch.copies:
            self.blocks[destination] = self.blocks[source]
        num_padding = int(np.count_nonzero(batch.block_indices == self.padding_block))
        self.num_tokens += len(batch.input_ids) - num_padding
        self.batch_sizes.append(len(batch.past_lens) - num_padding)
        # Stored as a whole before any is read: a draft token sees those before it.
        for sequence in range(len(batch.past_lens)):
            self._store(batch, sequence)
        contexts = [self._read(batch, sequence) for sequence in range(len(batch.past_lens))]
        ends = (batch.subsequence_begins[1:] - 1).tolist()
        logits = np.zeros((len(batch.sampled_tokens_indices), self.vocab_size), np.float32)
        for row, index in enumerate(batch.sampled_tokens_indices.tolist()):
            sequence = int(np.searchsorted(batch.subsequence_begins, index, side="right")) - 1
            context = contexts[sequence][: len(contexts[sequence]) - (ends[sequence] - index)]
            logits[row] = self.logits_after(context)
        for number, old in enumerate(self._logits):
            if number > 0 or not keeps_logits:
                old.values[:] = np.nan
        self._logits.appendleft(Logits(logits))

    def run(self) -> Logits:
        """The logits of the last bound batch."""
        return self._logits[0]

    def logits_after(self, context: Sequence[int]) -> npt.NDArray[np.float32]:
        """The logits `[vocab]` of the token after a context. One-hot here."""
        logits = np.zeros(self.vocab_size, np.float32)
        logits[next_token(context, self.vocab_size)] = 1.0
        return logits

    def _store(self, batch: Batch, sequence: int) -> None:
        """Store a sequence's new tokens."""
        begin, end = batch.subsequence_begins[sequence : sequence + 2].tolist()
        past = int(batch.past_lens[sequence])
        assert batch.position_ids[begin:end].tolist() == list(range(past, past + end - begin))
        blocks = batch.block_indices[slice(*batch.block_indices_begins[sequence : sequence + 2])]
        size = self.blocks.shape[1]
        assert len(blocks) == -(-(past + end - begin) // size)
        for offset, token_id in enumerate(self._input_ids[begin:end].tolist()):
            position = past + offset
            self.blocks[blocks[position // size], position % size] = token_id

    def _read(self, batch: Batch, sequence: int) -> list[int]:
        """All tokens of a sequence."""
        begin, end = batch.subsequence_begins[sequence : sequence + 2].tolist()
        past = int(batch.past_lens[sequence])
        blocks = batch.block_indices[slice(*batch.block_indices_begins[sequence : sequence + 2])]
        context = self.blocks[blocks].reshape(-1)[: past + end - begin]
        assert EMPTY not in context, "a token was never computed"
        return context.tolist()

    def _check_shapes(self, batch: Batch) -> None:
        sequences = len(batch.past_lens)
        assert len(batch.subsequence_begins) == len(batch.block_indices_begins) == sequences + 1
        assert batch.subsequence_begins[-1] == len(batch.input_ids) == len(batch.position_ids)
        assert batch.block_indices_begins[-1] == len(batch.block_indices)
        new = np.diff(batch.subsequence_begins)
        assert int(batch.max_context_len) == int((batch.past_lens + new).max())
        num_rows = len(batch.sampled) + len(batch.later)
        num_rows += sum(part.num_rows for parts in (batch.beams, batch.prompts) for part in parts)
        assert num_rows == len(batch.sampled_tokens_indices)
