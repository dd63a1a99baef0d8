"""One rank of a divided model: its part of the graph, and its tokens of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import openvino as ov

from headrace.worker.model.adapter_memory import AdapterPart
from headrace.worker.model.rank_sum import Add
from headrace.worker.model.runner import WHOLE, Part
from headrace.worker.model.state_tables import has_states
from headrace.worker.ranks.adapters import cuts_of
from headrace.worker.ranks.constants import ConstantCutter
from headrace.worker.ranks.cutting import cut
from headrace.worker.ranks.division import Division, divide, divide_stage
from headrace.worker.ranks.owners import Owners, positions_of
from headrace.worker.ranks.patterns import settle_patterns
from headrace.worker.weights.file_memory import FileMemory


class Rank:
    """Rank `number` of `num_ranks`, whose graph calls `add` for each sum over the ranks. It also writes the adapters of
    the ranks in `writes_for`, whose memory prefers these NUMA nodes. `divide` sets `division` and `division_of_logits`.
    The latter differs in the first stage of a pipeline, and is None in later stages."""

    division: Division
    division_of_logits: Division | None

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

    def divide(self, model: ov.Model, part: Part = WHOLE) -> Part:
        """Reduce a model with PagedAttention to this rank's part. With `part`, the model is already a part, such as a
        stage of a pipeline. ConfigurationError if it cannot be divided."""
        if has_states(model):
            settle_patterns(model)
        if part.layers is None:
            self.division = self.division_of_logits = divide(model, self.num_ranks)
        else:
            self.division, self.division_of_logits = divide_stage(model, part.head, self.num_ranks)
        adapters = [AdapterPart(cuts_of(model, self.division, rank), node) for rank, node in self._nodes.items()]
        keeps = [self._cut(model, self.division)]
        if part.head is not None:
            assert self.division_of_logits is not None
            keeps.append(self._cut(part.head, self.division_of_logits))
        return part._replace(keeps=keeps, run=self.run, adapters=adapters)

    def _cut(self, model: ov.Model, division: Division) -> ConstantCutter:
        return cut(model, division, self.number, FileMemory(), self._add)

    @property
    def run(self) -> int | None:
        """The length of the runs in this rank's part of the vocabulary; see `Division`."""
        return None if self.division_of_logits is None else self.division_of_logits.run

    @property
    def vocabulary(self) -> Owners | None:
        """The owners of the vocabulary; None if every rank has all of it or nothing."""
        return None if self.division_of_logits is None else self.division_of_logits.vocabulary

    @property
    def first_token(self) -> int | None:
        """The first token of this rank's part of the vocabulary; None if that is not divided."""
        return None if self.vocabulary is None else int(positions_of(self.vocabulary, self.number)[0])
