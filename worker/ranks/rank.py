"""One rank of a divided model: its part of the graph, and its tokens of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import openvino as ov

from headrace.worker.model.adapter_memory import AdapterPart
from headrace.worker.model.rank_sum import Add
from headrace.worker.model.runner import Part
from headrace.worker.ranks.adapters import cuts_of
from headrace.worker.ranks.cutting import cut
from headrace.worker.ranks.division import Division, divide
from headrace.worker.ranks.owners import positions_of
from headrace.worker.weights.file_memory import FileMemory


class Rank:
    """Rank `number` of `num_ranks`, whose graph calls `add` for each sum over the ranks. It also writes the adapters of
    the ranks in `writes_for`, whose memory prefers these NUMA nodes. `division` is known once `divide` was called."""

    division: Division

    def __init__(
        self,
        number: int,
        num_ranks: int,
        add: Add,
        *,
        node: int | None = None,
        writes_for: Mapping[int, int | None] = MappingProxyType({}),
    ) -> None:
        self.number, self.num_ranks = number, num_ranks
        self._add = add
        self._nodes = {number: node, **writes_for}

    def divide(self, model: ov.Model) -> Part:
        """Make a model with PagedAttention that of this rank. ConfigurationError if it cannot be divided."""
        self.division = divide(model, self.num_ranks)
        adapters = [AdapterPart(cuts_of(model, self.division, rank), node) for rank, node in self._nodes.items()]
        keeps = cut(model, self.division, self.number, FileMemory(), self._add)
        return Part(keeps, self.division.run, adapters)

    @property
    def first_token(self) -> int | None:
        """The first token of this rank's part of the vocabulary; None if it has the whole vocabulary."""
        owners = self.division.vocabulary
        return None if owners is None else int(positions_of(owners, self.number)[0])
