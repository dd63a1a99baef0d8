"""Which blocks a sequence gives up, compared with a plain computation of the same rule."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from headrace.worker.request.eviction import SCORED_PROMPT_TOKENS, Aggregation, Eviction, EvictionRule

BLOCK_SIZE = 4
LAYERS = 2
RULE = EvictionRule(24, start_size=4, recent_size=8)
FloatArray = npt.NDArray[np.float32]


class PlainLayer:
    """One layer's tokens, with their positions, sums and counts, one by one."""

    def __init__(self, rule: EvictionRule) -> None:
        self.rule = rule
        self.positions: list[int] = []
        self.sums: list[float] = []
        self.counts: list[int] = []

    def add(self, scores: FloatArray, num_queries: int, first_position: int) -> None:
        start = self.rule.start_size
        while len(self.positions) < len(scores):
            self.positions.append(first_position)
            self.sums.append(0.0)
            self.counts.append(0)
            first_position += 1
        for index in range(start, len(scores)):
            self.sums[index] += float(max(scores[index : index + 7]))
            self.counts[index] += min(num_queries, len(scores) - index)

    def evict(self) -> None:
        rule, size = self.rule, BLOCK_SIZE
        if len(self.positions) < rule.max_cache_size + size:
            return
        num_full = len(self.positions) // size
        evictable = range(rule.start_size // size, num_full - rule.recent_size // size)

        def value(block: int) -> float:
            tokens = range(block * size, (block + 1) * size)
            if rule.aggregation is Aggregation.SUM:
                return sum(self.sums[token] for token in tokens)
            return sum(self.sums[token] / self.counts[token] for token in tokens)

        lowest = sorted(evictable, key=value)[: num_full - rule.max_cache_size // size]
        for block in sorted(lowest, reverse=True):
            for values in (self.positions, self.sums, self.counts):
                del values[block * size : (block + 1) * size]  # type: ignore[attr-defined]


def scores_of(rng: np.random.Generator, num_tokens: int) -> FloatArray:
    return rng.random((LAYERS, num_tokens), np.float32) ** 4


@pytest.mark.parametrize("aggregation", list(Aggregation))
@pytest.mark.parametrize("num_prompt", [2, 10, 27, 28, 61, 120])
def test_the_blocks_with_the_least_attention_go(num_prompt: int, aggregation: Aggregation) -> None:
    rng = np.random.default_rng(num_prompt)
    rule = RULE._replace(aggregation=aggregation)
    eviction, plain = Eviction(rule), [PlainLayer(rule) for _ in range(LAYERS)]
    positions = np.tile(np.arange(num_prompt), (LAYERS, 1))
    scores = scores_of(rng, num_prompt)
    num_queries = eviction.num_scored(0, num_prompt, num_prompt)
    assert num_queries == min(num_prompt, SCORED_PROMPT_TOKENS)
    eviction.add(scores, num_queries)
    for layer, each in enumerate(plain):
        each.add(scores[layer], num_queries, 0)
    for position in range(num_prompt, num_prompt + 90):
        positions = np.concatenate([positions, np.full((LAYERS, 1), position)], axis=1)
        scores = scores_of(rng, positions.shape[1])
        eviction.add(scores, 1)
        kept = eviction.choose(positions.shape[1], BLOCK_SIZE)
        if kept is not None:
            of_tokens = (kept[:, :, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(LAYERS, -1)
            num_left = position + 1 - eviction.num_evicted_tokens
            positions = np.take_along_axis(positions, of_tokens[:, :num_left], axis=1)
        for layer, each in enumerate(plain):
            each.add(scores[layer], 1, position)
            each.evict()
            assert positions[layer].tolist() == each.positions
        assert positions.shape[1] < rule.max_cache_size + BLOCK_SIZE
    assert eviction.num_evicted_tokens == num_prompt + 90 - positions.shape[1] > 0


@pytest.mark.parametrize("cuts", [[], [57], [56, 59], [40, 54, 55, 58]])
def test_scores_of_a_prompt_do_not_depend_on_its_chunks(cuts: list[int]) -> None:
    """The attention of each query is a power of two, so sums are exact in any order."""
    rng = np.random.default_rng(7)
    of_query = np.exp2(-rng.integers(0, 12, (61, LAYERS, 61)).astype(np.float32))
    whole, divided = Eviction(RULE), Eviction(RULE)
    last = 61 - SCORED_PROMPT_TOKENS
    whole.add(_causal(of_query, last, 61), SCORED_PROMPT_TOKENS)
    for begin, end in zip([0, *cuts], [*cuts, 61], strict=True):
        count = divided.num_scored(begin, end - begin, 61)
        if count:
            divided.add(_causal(of_query, end - count, end), count, is_whole=end == 61)
    kept, same = whole.choose(61, BLOCK_SIZE), divided.choose(61, BLOCK_SIZE)
    assert kept is not None
    assert same is not None
    assert np.array_equal(kept, same)


def _causal(of_query: FloatArray, begin: int, end: int) -> FloatArray:
    """The sum of the attention of queries `[begin, end)` to the tokens up to `end`."""
    total = np.zeros((LAYERS, end), np.float32)
    for query in range(begin, end):
        total[:, : query + 1] += of_query[query][:, : query + 1]
    return total


def test_start_and_recent_blocks_stay() -> None:
    eviction = Eviction(RULE)
    scores = np.zeros((LAYERS, 80), np.float32)
    scores[:, 40:48] = 1.0  # two blocks in the middle, and what is before them within reach
    eviction.add(scores, 8)
    kept = eviction.choose(80, BLOCK_SIZE)
    assert kept is not None
    for row in kept.tolist():
        assert row[0] == 0
        assert row[-2:] == [18, 19]
        assert {10, 11} <= set(row)
        assert len(row) == RULE.max_cache_size // BLOCK_SIZE
    assert eviction.num_evicted_tokens == 80 - 24
