"""The features of the target's tokens: mixed hidden states of three layers, which EAGLE-3 heads read.

The target's graph computes them for every token of a step. They are kept for each token of each KV block, so the heads
can read them later, and a prefix hit finds them too. Blocks from another process have none.

    block           0               1               2
    target's KV     [t0 t1 t2 t3]   [t4 t5 t6 t7]   [t8 ..      ]
    features        [f0 f1 f2 f3]   [f4 f5 f6 f7]   [f8 ..      ]      num_filled: 4 4 1
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import openvino as ov
from openvino import opset13

from headrace.worker.draft_heads.eagle_files import EagleFiles, layers_to_read
from headrace.worker.draft_heads.eagle_graph import product
from headrace.worker.draft_heads.hidden_states import (
    check_width,
    compute_all,
    last_states,
    states_before,
    width_of,
)
from headrace.worker.kv.exclusions import EAGLE3, MTP, impossible
from headrace.worker.kv.layers import LayerKind
from headrace.worker.model.batch import Batch
from headrace.worker.model.state_tables import has_states
from headrace.worker.model.window_tables import attentions
from headrace.worker.request.step import BlockCopy

FloatArray = npt.NDArray[np.float32]
_OUTPUT = "features"


class FeatureStore:
    """The features of `num_blocks` blocks, of one for padding, and of `num_spare` blocks that only the heads have, in
    bfloat16."""

    def __init__(self, num_blocks: int, block_size: int, width: int, num_spare: int = 0) -> None:
        # The kernel allocates pages when they are written.
        self._values = np.zeros((num_blocks + 1 + num_spare, block_size, width), np.uint16)
        self.num_filled = [0] * (num_blocks + 1)
        """How many tokens of each block have features, counted from its first token."""
        self.block_size = block_size
        self._copied: dict[int, int] = {}

    def write(self, batch: Batch, features: FloatArray) -> None:
        """Keep the features `[tokens, width]` of a step of the target, after copying its `copies`."""
        for source, destination in batch.copies:
            self.copy(source, destination)
            self.num_filled[destination] = self.num_filled[source]
            self._copied.pop(destination, None)
            self._copied[destination] = source
        blocks, offsets = self.places(batch)
        self._values[blocks, offsets] = _rounded(features)
        size, filled = self.block_size, self.num_filled
        tables, firsts = batch.block_indices.tolist(), batch.block_indices_begins.tolist()
        counts = np.diff(batch.subsequence_begins).tolist()
        for past, count, first in zip(batch.past_lens.tolist(), counts, firsts, strict=False):
            end = past + count
            for index in range(past // size, -(-end // size)):
                block, start = tables[first + index], max(0, past - index * size)
                if start <= filled[block]:
                    filled[block] = min(size, end - index * size)

    def forget(self, blocks: Iterable[int]) -> None:
        """Forget the features of these blocks, because their content is about to change."""
        for block in blocks:
            self.num_filled[block] = 0

    def copy(self, source: int, destination: int) -> None:
        """Copy the features of a block."""
        self._values[destination] = self._values[source]

    def take_copies(self) -> list[BlockCopy]:
        """The copies of blocks that the target has made since the last call, in their order."""
        copies = [BlockCopy(source, destination) for destination, source in self._copied.items()]
        self._copied.clear()
        return copies

    def read(self, blocks: npt.NDArray[np.int32], offsets: npt.NDArray[np.int64]) -> FloatArray:
        """The features of tokens, float32 `[tokens, width]`: those at `offsets` `[tokens]` in the blocks `blocks`
        `[tokens]`."""
        wide: npt.NDArray[np.uint32] = np.left_shift(self._values[blocks, offsets].astype(np.uint32), 16)
        return wide.view(np.float32)

    def set(self, block: int, offset: int, features: FloatArray) -> None:
        """Replace the features `[width]` of the token at `offset` in a block, which the target has not computed yet."""
        self._values[block, offset] = _rounded(features)

    def places(self, batch: Batch) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """For each token of a step, its block and its place in the block, both `[tokens]`, padding included."""
        indices, offsets = np.divmod(batch.position_ids, self.block_size)
        firsts = np.repeat(batch.block_indices_begins[:-1], np.diff(batch.subsequence_begins))
        return batch.block_indices[firsts + indices], offsets

    def first_usable(self, table: Sequence[int], start: int, end: int) -> int:
        """The index of the first block from which on tokens up to `end` have features without a gap; tokens before
        `start` need none. The index is beyond the block of `end - 1` if that one has a gap."""
        size, filled = self.block_size, self.num_filled
        for index in range((end - 1) // size, start // size - 1, -1):
            if filled[table[index]] < min(size, end - index * size):
                return index + 1
        return start // size


class FeatureReader:
    """Makes the target's graph compute features, and keeps them. See `headrace.worker.model.runner.StateReader`."""

    computes_all_states = False

    def __init__(self, files: EagleFiles) -> None:
        self._files = files
        self._store: FeatureStore | None = None

    def allocate(self, num_blocks: int, block_size: int, width: int, num_spare: int = 0) -> None:
        """Make room for the features of `num_blocks` blocks of `block_size` tokens, with `width` numbers for each
        token, and of `num_spare` blocks of the heads. Until then features are not kept."""
        self._store = FeatureStore(num_blocks, block_size, width, num_spare)

    @property
    def store(self) -> FeatureStore:
        """The features that are kept."""
        assert self._store is not None, "nothing is allocated yet"
        return self._store

    def prepare(self, model: ov.Model) -> None:
        """Add an output `features` [tokens, size]. The states are found by the products that follow them, which
        adapters would hide. ConfigurationError if the heads do not fit the model."""
        shape = self._files.shape
        if has_states(model):
            raise impossible(EAGLE3, LayerKind.RECURRENT)
        layers = layers_to_read(shape, len(attentions(model)))
        states = [states_before(model, layer) for layer in layers]
        width = width_of(states[0])
        check_width(self._files.path, shape.target_size, width)
        flat = [opset13.reshape(each, opset13.constant(np.array([-1, width])), False) for each in states]
        mixed = product(opset13.concat(flat, -1), self._files.weights["fc.weight"])
        mixed.get_tensor().set_names({_OUTPUT})
        model.add_results([opset13.result(mixed)])

    def add_outputs(self, model: ov.Model) -> None:
        """Does nothing: `prepare` has added the output."""

    def read(self, batch: Batch, request: ov.InferRequest) -> None:
        """Keep the features of the step that was just computed."""
        if self._store is not None:
            self._store.write(batch, request.get_tensor(_OUTPUT).data)


class LastStateReader(FeatureReader):
    """As `FeatureReader`, for a layer that predicts more tokens (MTP): its features are the last hidden states of all
    tokens."""

    computes_all_states = True

    def prepare(self, model: ov.Model) -> None:
        """Add an output `features` [tokens, size]. So the graph computes the last states of all tokens, not of the
        sampled ones only. ConfigurationError if the layer does not fit the model."""
        if has_states(model):
            raise impossible(MTP, LayerKind.RECURRENT)
        check_width(self._files.path, self._files.shape.size, width_of(last_states(model).get_source_output()))
        flat = compute_all(model)
        flat.get_tensor().set_names({_OUTPUT})
        model.add_results([opset13.result(flat)])


class AllStates:
    """Makes the graph of a rank compute the last hidden states of all tokens, because that of rank 0 does, and reads
    nothing. See `headrace.worker.model.runner.StateReader`."""

    computes_all_states = True

    def prepare(self, model: ov.Model) -> None:
        """Compute the states of all tokens."""
        compute_all(model)

    def add_outputs(self, model: ov.Model) -> None:
        """Does nothing."""

    def read(self, batch: Batch, request: ov.InferRequest) -> None:
        """Does nothing."""


def _rounded(values: FloatArray) -> npt.NDArray[np.uint16]:
    """The bits of the nearest bfloat16."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    rounded: npt.NDArray[np.uint16] = ((bits + np.uint32(0x8000)) >> 16).astype(np.uint16)
    return rounded
