"""A fake runner with layers whose queries see a window: the oracle of tests with parts of blocks.

It keeps the tokens of a block's part in the part's slot, and asserts that each query finds the tokens of its window
there."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.worker.model.batch import Batch
from tests.worker.fake_runner import EMPTY, FakeRunner


class WindowedRunner(FakeRunner):
    """`num_slots` slots, and one that blocks without a part have."""

    def __init__(self, num_blocks: int, block_size: int, vocab_size: int, num_slots: int, window: int) -> None:
        super().__init__(num_blocks, block_size, vocab_size)
        self.parts = np.full((num_slots + 1, block_size), EMPTY, np.int64)
        self.window = window
        self.part_slots: npt.NDArray[np.int32] = np.zeros(0, np.int32)

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Copy and store parts as whole blocks are, then compare them with what queries see of these."""
        assert batch.part_slots is not None
        assert len(batch.part_copies) == len(batch.copies)
        self.part_slots = batch.part_slots
        for source, destination in batch.part_copies:
            self.parts[destination] = self.parts[source]
        super().bind(batch, keeps_logits=keeps_logits)
        for sequence in range(len(batch.past_lens)):
            self._store_parts(batch, sequence)
        for sequence in range(len(batch.past_lens)):
            self._compare(batch, sequence)

    def _store_parts(self, batch: Batch, sequence: int) -> None:
        begin, end = batch.subsequence_begins[sequence : sequence + 2].tolist()
        slots, is_padding = self._slots(batch, sequence)
        for offset, token_id in enumerate(batch.input_ids[begin:end].tolist()):
            index, place = divmod(int(batch.past_lens[sequence]) + offset, self.block_size)
            assert is_padding or slots[index] < len(self.parts) - 1, "a token is computed without a part"
            self.parts[slots[index], place] = token_id

    def _compare(self, batch: Batch, sequence: int) -> None:
        slots, is_padding = self._slots(batch, sequence)
        if is_padding:
            return
        right = self._read(batch, sequence)
        first = max(0, int(batch.past_lens[sequence]) + 1 - self.window)
        begin = first // self.block_size
        assert slots[begin:].max() < len(self.parts) - 1, "a part is missing that a query sees"
        found = self.parts[slots[begin:]].reshape(-1)
        assert found[first - begin * self.block_size :][: len(right) - first].tolist() == right[first:]

    def _slots(self, batch: Batch, sequence: int) -> tuple[npt.NDArray[np.int32], bool]:
        blocks = batch.block_indices[slice(*batch.block_indices_begins[sequence : sequence + 2])]
        return self.part_slots[blocks], bool((blocks == self.padding_block).any())
