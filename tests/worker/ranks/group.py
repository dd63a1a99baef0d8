"""The ranks of a divided model in one process, each with a thread of its own. Sums are added in the order of ranks."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from headrace.worker.kv.arena import KVArena
from headrace.worker.model.adapter_memory import AdapterPart
from headrace.worker.model.batch import Batch
from headrace.worker.model.runner import OpenVINOModelRunner, Part
from headrace.worker.model.state_tables import has_states
from headrace.worker.ranks.adapters import cuts_of
from headrace.worker.ranks.cutting import cut
from headrace.worker.ranks.division import Division, divide
from headrace.worker.ranks.owners import positions_of
from headrace.worker.ranks.patterns import settle_patterns
from headrace.worker.sampling.logits import Logits
from headrace.worker.weights.file_memory import FileMemory

Array = npt.NDArray[np.float32]


class Sums:
    """Adds up what the ranks' threads bring."""

    def __init__(self, num_ranks: int) -> None:
        self._barrier = threading.Barrier(num_ranks)
        self._parts: list[Array] = [np.zeros(0, np.float32)] * num_ranks
        self.num_sums = 0

    def add(self, rank: int, number: int, part: Array, total: Array) -> None:
        """One rank's part of a sum."""
        self._parts[rank] = part
        self._barrier.wait()
        np.add(self._parts[0], self._parts[1], out=total)
        for other in self._parts[2:]:
            total += other
        self.num_sums += rank == 0
        self._barrier.wait()

    def abort(self) -> None:
        """Let no thread wait for another that has failed."""
        self._barrier.abort()


class Group:
    """A divided model as the engine sees it. Its ranks are compiled with one thread each."""

    def __init__(self, directory: Path, num_ranks: int, **asked: Any) -> None:
        self.sums = Sums(num_ranks)
        self.division: Division
        self.ranks = [
            OpenVINOModelRunner(directory, threads=1, divide=partial(self._divide, num_ranks, rank), **asked)
            for rank in range(num_ranks)
        ]
        first = self.ranks[0]
        self.block_size, self.small_decode, self.least_decode = first.block_size, 0, first.least_decode
        self.exact_rows = min(rank.exact_rows for rank in self.ranks)
        self.state_bytes = sum(rank.state_bytes for rank in self.ranks)
        owners = self.division.vocabulary
        self.tokens = None if owners is None else [positions_of(owners, rank) for rank in range(num_ranks)]
        self.vocab_size = first.vocab_size if owners is None else owners.size
        self.infer_s = 0.0
        self._pool = ThreadPoolExecutor(num_ranks)

    def _divide(self, num_ranks: int, rank: int, model: ov.Model) -> Part:
        if has_states(model):
            settle_patterns(model)
        self.division = divide(model, num_ranks)
        cuts = cuts_of(model, self.division, rank)
        keeps = cut(model, self.division, rank, FileMemory([]), partial(self.sums.add, rank))
        return Part(keeps, self.division.run, [AdapterPart(cuts)])

    def allocate(self, num_blocks: int, num_state_slots: int = 0) -> list[KVArena]:
        """Make the ranks' caches, with as many blocks each, and as many slots if they have recurrent layers."""
        for rank in self.ranks:
            if rank.state_bytes:
                rank.allocate_states(num_state_slots)
        return [rank.allocate(num_blocks) for rank in self.ranks]

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Set the inputs of the next step, the same for each rank."""
        for rank in self.ranks:
            rank.bind(batch, keeps_logits=keeps_logits)

    def run(self) -> Logits:
        """Compute the step. The logits are those of all ranks."""
        parts = [future.result().values for future in [self._pool.submit(self._run, rank) for rank in self.ranks]]
        return Logits(parts[0] if self.tokens is None else np.concatenate(parts, axis=1))

    def _run(self, rank: OpenVINOModelRunner) -> Logits:
        try:
            return rank.run()
        except BaseException:
            self.sums.abort()
            raise
