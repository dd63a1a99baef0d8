"""Heads in the format of EAGLE-3 propose trees of tokens.

After each of the best tokens of a depth, the heads propose several; the best of all of these are continued. A token
sees the tokens on its path, so each continued path has blocks of the heads of its own:

    request's blocks      ... [s0 s1 s2 a1] [a2 a3 ..]      the path that is continued here
    spare blocks              [s0 s1 s2 b1] [b2 ..   ]      another one, over a copy of the last block

A path whose last token has several continuations leaves its blocks to the best one, and the others get copies. In the
end the best tokens of the whole tree are proposed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import numpy as np

from headrace.worker.kv.cache import KVCache
from headrace.worker.request.request import Request
from headrace.worker.request.step import BlockCopy
from headrace.worker.sampling.logits import Logits, floats_of
from headrace.worker.sampling.reduction import DoubleArray, FloatArray
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.draft_model import Asked, DraftTimes, Proposal
from headrace.worker.speculation.eagle import EagleModel, HeadRunner
from headrace.worker.speculation.proposer import Source, TreeToken
from headrace.worker.speculation.tree import Candidate, TreeShape, drawn_candidate, greedy_candidate, part_of, paths_of

# Other requests of the same step get drafts without branches, because trees of large batches do not pay.
MOST_TREES = 8
_LOWEST = np.float32(-3e38)


class TreeRunner(HeadRunner, Protocol):
    """Computes steps of heads whose arena has spare blocks; see `headrace.worker.draft_heads.eagle_runner`."""

    @property
    def spare_blocks(self) -> range:
        """The blocks that are none of the pool's."""
        ...

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy keys, values and features of blocks."""
        ...


def blocks_of_path(depth: int, block_size: int) -> int:
    """The most blocks that the tokens of a path, up to this depth, can be in."""
    return (depth + block_size - 2) // block_size + 1


def num_spare_blocks(shape: TreeShape, block_size: int) -> int:
    """How many spare blocks trees of this shape need."""
    return MOST_TREES * (shape.top_k - 1) * blocks_of_path(shape.depth, block_size)


class _Node(NamedTuple):
    """A token of a tree: the index of its parent, its level, how likely it is together with those before it, and
    whether others may follow."""

    parent: int
    token_id: int
    level: int
    confidence: float
    may_continue: bool


@dataclass(slots=True)
class _Growth:
    """A tree while it grows. `shadows` are the request as the heads see it, once for each path that can be continued,
    the first in the request's own blocks. `ends` maps the nodes that are continued now, -1 for the request's latest
    token, to the shadows with their paths."""

    asked: Asked
    shadows: list[Request]
    nodes: list[_Node] = field(default_factory=list)
    ends: dict[int, Request] = field(default_factory=dict)
    depth: int = 0

    @property
    def width(self) -> int:
        return len(self.shadows)


class _Row(NamedTuple):
    """A row of a step in which a tree is continued after this node."""

    growth: _Growth
    node: int
    shadow: Request


class EagleTrees(EagleModel):
    """The heads, for the requests of one scheduler, which propose trees of a shape. Requests whose penalties count
    tokens get drafts without branches."""

    def __init__(
        self,
        runner: TreeRunner,
        sampler: BatchSampler,
        kv_cache: KVCache,
        times: DraftTimes,
        vocab_size: int,
        *,
        shape: TreeShape,
    ) -> None:
        super().__init__(runner, sampler, kv_cache, times, vocab_size)
        self.max_tokens, self.width = shape.depth, shape.top_k
        self._shape = shape
        self._heads = runner

    def propose(self, asked: Sequence[Asked]) -> list[Proposal]:
        """See `DraftModel.propose`."""
        shadows = self._begin(asked)
        spare = iter(self._heads.spare_blocks)
        growths = [self._growth(one, shadow, spare) for one, shadow in zip(asked, shadows, strict=True)]
        while rows := [_Row(growth, node, shadow) for growth in growths for node, shadow in growth.ends.items()]:
            self._extend(rows, self._forward([row.shadow for row in rows]))
            copies: list[BlockCopy] = []
            for growth in growths:
                self._continue(growth, copies)
            if copies:
                self._heads.copy(copies)
        self._end(asked, shadows)
        return [self._proposal(growth) for growth in growths]

    def _growth(self, asked: Asked, shadow: Request, spare: Iterator[int]) -> _Growth:
        """A tree without tokens. The number of its paths is limited by the spare blocks."""
        shadows = [shadow]
        count = blocks_of_path(self._shape.depth, self._runner.block_size)
        if not shadow.sampling.has_penalties:
            for _ in range(self._shape.top_k - 1):
                blocks = [block for block, _ in zip(spare, range(count), strict=False)]
                if len(blocks) == count:
                    shadows.append(self._twin(shadow, blocks))
        return _Growth(asked, shadows, ends={-1: shadow})

    def _twin(self, shadow: Request, blocks: Sequence[int]) -> Request:
        """The same request, with other blocks for proposed tokens."""
        twin = Request(shadow.request_id, (), shadow.sampling, shadow.root_hash)
        twin.prompt_token_ids, twin.num_prompt_tokens = shadow.prompt_token_ids, shadow.num_prompt_tokens
        twin.token_ids = shadow.token_ids[:]
        first = (shadow.num_tokens - self._lag) // self._runner.block_size
        twin.block_table = shadow.block_table[:first] + array("i", blocks)
        self._starts[twin] = self._starts[shadow]
        return twin

    def _extend(self, rows: Sequence[_Row], logits: Logits) -> None:
        """Add the best tokens after each row, the best first."""
        values = floats_of(logits.values)
        log_sums = _log_sums(values)
        left = list(range(len(rows)))
        for number in range(self._shape.top_k):
            left = [row for row in left if rows[row].growth.width > number]
            if not left:
                break
            sampled = self._sampler.sample([rows[row].shadow for row in left], Logits(values[left]))
            kept = []
            for row, entry in zip(left, sampled, strict=True):
                token_id = entry.token_id
                if 0 <= token_id < self._vocab_size and values[row, token_id] > _LOWEST:
                    self._add(rows[row], token_id, number, float(values[row, token_id] - log_sums[row]))
                    values[row, token_id] = _LOWEST
                    kept.append(row)
            left = kept
        for _, _, shadow in rows:
            if shadow.sampling.has_edits:  # the sampler has followed the token that it chose last
                self._sampler.take_back(shadow, shadow.num_tokens)

    def _add(self, row: _Row, token_id: int, number: int, log_probability: float) -> None:
        growth, sampling = row.growth, row.shadow.sampling
        found: Candidate
        found = greedy_candidate(float(np.exp(log_probability))) if sampling.is_greedy else drawn_candidate(number)
        before = 1.0 if row.node < 0 else growth.nodes[row.node].confidence
        may_continue = token_id not in sampling.stop_token_ids
        growth.nodes.append(_Node(row.node, token_id, found.level, before * found.confidence, may_continue))

    def _continue(self, growth: _Growth, copies: list[BlockCopy]) -> None:
        """Choose the tokens of the last depth that are continued. Adds to the copies of blocks that this needs."""
        growth.depth += 1
        ends, growth.ends = growth.ends, {}
        if growth.depth == growth.asked.num_tokens:
            return
        latest = [number for number, node in enumerate(growth.nodes) if node.parent in ends and node.may_continue]
        latest.sort(key=lambda number: -growth.nodes[number].confidence)
        chosen = latest[: growth.width]
        heirs: dict[int, int] = {}
        for number in chosen:
            heirs.setdefault(growth.nodes[number].parent, number)
        free = [shadow for shadow in growth.shadows if all(shadow is not ends[parent] for parent in heirs)]
        for number in chosen:
            node = growth.nodes[number]
            if heirs[node.parent] != number:
                shadow = free.pop()
                self._take_over(growth.asked.request.num_tokens, ends[node.parent], shadow, copies)
                growth.ends[number] = shadow
        for parent, number in heirs.items():
            growth.ends[number] = ends[parent]
        for number, shadow in growth.ends.items():
            shadow.token_ids.append(growth.nodes[number].token_id)

    def _take_over(self, num_tokens: int, source: Request, shadow: Request, copies: list[BlockCopy]) -> None:
        """Give a shadow the path of another one. The first `num_tokens` tokens are the request's."""
        self._sampler.take_back(shadow, num_tokens)
        del shadow.token_ids[num_tokens:]
        shadow.token_ids.extend(source.token_ids[num_tokens:])
        shadow.num_computed_tokens = source.num_computed_tokens
        size = self._runner.block_size
        blocks = slice((num_tokens - self._lag) // size, (source.num_tokens - self._lag) // size + 1)
        copies += map(BlockCopy, source.block_table[blocks], shadow.block_table[blocks])

    def _proposal(self, growth: _Growth) -> Proposal:
        """The best tokens of a tree, or the only path."""
        nodes = growth.nodes
        tree = [TreeToken(node.parent, node.token_id, node.level) for node in nodes]
        if growth.width == 1:
            return Proposal([token.token_id for token in tree])
        best = sorted(range(len(nodes)), key=lambda number: -nodes[number].confidence)[: self._shape.num_tokens]
        tree = part_of(tree, best)
        return Proposal(list(paths_of(tree)[0].token_ids) if tree else [], None, tree)


class MtpTrees(EagleTrees):
    """As `EagleTrees`, for a layer that predicts more tokens (MTP)."""

    source: ClassVar[Source] = Source.MTP


def _log_sums(values: FloatArray) -> DoubleArray:
    """For each row, the logarithm of the sum of exp(logit)."""
    best = values.max(axis=1, keepdims=True)
    sums: DoubleArray = np.log(np.exp(values - best).sum(axis=1, dtype=np.float64)) + best[:, 0]
    return sums
