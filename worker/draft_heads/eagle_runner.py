"""Computes steps of EAGLE-3 heads with OpenVINO, and those of layers that predict more tokens, which are like them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov

from headrace.common.model_files.heads import HeadsKind
from headrace.worker.config import ConfigurationError
from headrace.worker.draft_heads.eagle_files import EagleFiles, read_eagle
from headrace.worker.draft_heads.eagle_graph import build_eagle, build_mtp
from headrace.worker.draft_heads.features import FeatureReader, FeatureStore, LastStateReader
from headrace.worker.draft_heads.hidden_states import embeddings_of, width_of
from headrace.worker.draft_heads.mtp_files import read_mtp
from headrace.worker.kv.arena import KVArena
from headrace.worker.model.batch import Batch
from headrace.worker.model.lm_head import InputTensors
from headrace.worker.model.paging import STEP_INPUTS, read_paged
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.state_tables import bytes_of, dims_of
from headrace.worker.request.step import BlockCopy
from headrace.worker.sampling.logits import Logits

_LOWEST = np.float32(-3e38)
_FEATURE_BYTES = 2


class EagleHeads(NamedTuple):
    """Heads as read from their files, and the reader that makes the target's graph compute their features. `num_spare`
    says how many spare blocks they need beside those of the pool, given the tokens of a block; None for none."""

    files: EagleFiles
    reader: FeatureReader
    num_spare: Callable[[int], int] | None = None
    kind: HeadsKind = HeadsKind.EAGLE3

    @classmethod
    def read(cls, path: Path, num_spare: Callable[[int], int] | None = None) -> EagleHeads:
        """Read the heads in a directory. ConfigurationError."""
        files = read_eagle(path)
        return cls(files, FeatureReader(files), num_spare)

    @classmethod
    def read_mtp(cls, path: Path, num_spare: Callable[[int], int] | None = None) -> EagleHeads:
        """Read the layer of a checkpoint that predicts more tokens. ConfigurationError."""
        files = read_mtp(path)
        return cls(files, LastStateReader(files), num_spare, HeadsKind.MTP)

    def compile(self, target_dir: Path, threads: int, target: OpenVINOModelRunner | None = None) -> EagleRunner:
        """Compile them for the model in `target_dir`. ConfigurationError if they do not fit it."""
        build = build_mtp if self.kind is HeadsKind.MTP else build_eagle
        return EagleRunner(self.files, target_dir, self.reader, build, threads=threads, num_spare=self.num_spare)


class EagleRunner:
    """Compiled heads. Slot t of a sequence has token t + 1 and the features of token t. Logits are over the target's
    vocabulary; tokens that the heads do not know have the lowest possible logit.

    A step reads the features of its tokens from the store. After it, the heads' own state is in the store as the
    features of the next token, for proposals that continue a proposal. The target overwrites it when it verifies them.
    """

    def __init__(
        self,
        files: EagleFiles,
        target_dir: Path,
        reader: FeatureReader,
        build: Callable[[EagleFiles, ov.Model], ov.Model] = build_eagle,
        *,
        threads: int,
        num_spare: Callable[[int], int] | None = None,
    ) -> None:
        """Compile `files` for the model in `target_dir`, whose features `reader` keeps. `build` makes their graph. For
        `num_spare` see `EagleHeads`. ConfigurationError if the heads do not fit the model."""
        core = ov.Core()
        target = read_paged(core, target_dir).graph
        _check_embeddings(files, target)
        properties = {
            "PERFORMANCE_HINT": "LATENCY",
            "NUM_STREAMS": "1",
            "INFERENCE_NUM_THREADS": threads,
            "KV_CACHE_PRECISION": ov.Type.u8,
            "KEY_CACHE_QUANT_MODE": "BY_TOKEN",
        }
        compiled = core.compile_model(build(files, target), "CPU", properties)
        self._request = compiled.create_infer_request()
        self._inputs = InputTensors(self._request)
        self._caches = [port for port in compiled.inputs if "_cache." in port.any_name]
        self._cache_views: list[npt.NDArray[np.uint8]] = []
        self._token_ids = files.token_ids
        self._reader = reader
        self._batch: Batch | None = None
        self._width = files.shape.size
        self.vocab_size = files.shape.vocab_size
        self.block_size = dims_of(self._caches[0])[1]
        self._kv_bytes = sum(map(bytes_of, self._caches))
        self.block_bytes = self._kv_bytes + self.block_size * self._width * _FEATURE_BYTES
        self.spare_blocks = range(0 if num_spare is None else num_spare(self.block_size))
        """The blocks that are none of the pool's."""
        self.infer_s = 0.0

    def allocate(self, num_blocks: int, *, huge_pages: bool = True) -> None:
        """Allocate the heads' part of `num_blocks` blocks, of one for padding, and of spare ones: keys and values, and
        features. ConfigurationError if there is no memory for it."""
        num_spare = len(self.spare_blocks)
        self._reader.allocate(num_blocks, self.block_size, self._width, num_spare)
        num_blocks += 1 + num_spare
        self.spare_blocks = range(num_blocks - num_spare, num_blocks)
        try:
            arena = KVArena(num_blocks * self._kv_bytes, len(self._caches), huge_pages=huge_pages)
        except (OSError, OverflowError) as error:
            raise ConfigurationError(
                f"no memory for the heads' part of {num_blocks} KV blocks; ask for less with --kv-cache-gb"
            ) from error
        for port in self._caches:
            piece = arena.take(num_blocks * bytes_of(port))
            self._request.set_tensor(
                port.any_name, ov.Tensor(piece, ov.Shape([num_blocks, *dims_of(port)]), port.element_type)
            )
            self._cache_views.append(piece.reshape(num_blocks, -1))  # it owns the memory

    @property
    def store(self) -> FeatureStore:
        """The features of the target's tokens."""
        return self._reader.store

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Set the inputs of the next step. Logits are copies, so `keeps_logits` changes nothing."""
        self._batch = batch
        self._copy_caches(self.store.take_copies())
        for name in STEP_INPUTS:
            self._inputs.set(name, getattr(batch, name))
        self._inputs.set("features", self.store.read(*self.store.places(batch)))
        self._inputs.set("rows", batch.sampled_tokens_indices)

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy keys, values and features of blocks, in this order."""
        self._copy_caches(copies)
        for source, destination in copies:
            self.store.copy(source, destination)

    def _copy_caches(self, copies: Sequence[BlockCopy]) -> None:
        for source, destination in copies:
            for cache in self._cache_views:
                cache[destination] = cache[source]

    def run(self) -> Logits:
        """Compute the step. Returns logits `[rows, vocab_size]`."""
        assert self._batch is not None
        start_s = time.perf_counter()
        self._request.infer()
        self.infer_s = time.perf_counter() - start_s
        rows = len(self._batch.sampled)
        values = np.full((rows, self.vocab_size), _LOWEST, np.float32)
        if rows:
            values[:, self._token_ids] = self._request.get_tensor("logits").data.reshape(rows, -1)
            self._continue(self._batch, self._request.get_tensor("states").data.reshape(rows, -1))
        return Logits(values)

    def _continue(self, batch: Batch, states: npt.NDArray[np.float32]) -> None:
        """Make the states of rows the features of the tokens after them, as far as there are blocks."""
        positions = batch.position_ids[batch.sampled_tokens_indices].tolist()
        for request, position, state in zip(batch.sampled, positions, states, strict=True):
            index, offset = divmod(position + 1, self.block_size)
            if index < len(request.block_table):
                self.store.set(request.block_table[index], offset, state)


def _check_embeddings(files: EagleFiles, target: ov.Model) -> None:
    """ConfigurationError if the target's vocabulary is not that of the heads, or its embeddings have another size."""
    shape, path = files.shape, files.path
    vocabulary = int(target.get_results()[0].get_output_partial_shape(0)[-1].get_length())
    if vocabulary != shape.vocab_size:
        raise ConfigurationError(
            f"the heads in {path} are for a vocabulary of {shape.vocab_size} tokens, and this model has {vocabulary}; "
            "name heads that were trained for this model"
        )
    if "embed_tokens.weight" not in files.weights and width_of(embeddings_of(target)) != shape.size:
        raise ConfigurationError(
            f"the heads in {path} have no embeddings of their own, and this model's have another size than "
            f"{shape.size}; name heads that were trained for this model"
        )
