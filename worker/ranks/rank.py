"""One rank of a divided model: its part of the graph, and its tokens of the vocabulary."""

from __future__ import annotations

import openvino as ov

from headrace.worker.model.rank_sum import Add
from headrace.worker.model.runner import Part
from headrace.worker.ranks.cutting import cut
from headrace.worker.ranks.division import Division, divide
from headrace.worker.ranks.owners import positions_of
from headrace.worker.weights.file_memory import FileMemory


class Rank:
    """Rank `number` of `num_ranks`, whose graph calls `add` for each sum over the ranks. `division` is known once
    `divide` was called."""

    division: Division

    def __init__(self, number: int, num_ranks: int, add: Add) -> None:
        self.number, self.num_ranks = number, num_ranks
        self._add = add

    def divide(self, model: ov.Model) -> Part:
        """Make a model with PagedAttention that of this rank. ConfigurationError if it cannot be divided."""
        self.division = divide(model, self.num_ranks)
        keeps = cut(model, self.division, self.number, FileMemory(), self._add)
        return Part(keeps, self.division.run)

    @property
    def first_token(self) -> int | None:
        """The first token of this rank's part of the vocabulary; None if it has the whole vocabulary."""
        owners = self.division.vocabulary
        return None if owners is None else int(positions_of(owners, self.number)[0])
