"""Eviction of KV blocks of one long sequence: which blocks it evicts, and the scores of the others.

The cache of a sequence has three areas, in tokens:

    | start_size |        evictable         | recent_size |
    |  0  1  2   | 3  4  5  6  7  8  9 ...   |  ... newest |

When the sequence has a full block more than `max_cache_size` tokens, each layer evicts the evictable block that its
queries have attended to least. Scores are sums of attention weights over heads and queries: the last tokens of the
prompt, then each token of the answer. The algorithm is that of OpenVINO GenAI (docs/decisions/kv-cache.md).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]

# The last tokens of a prompt whose attention gives the first scores (SnapKV, arXiv 2404.14469).
SCORED_PROMPT_TOKENS = 8
# A token's score is the highest of its own and the following ones, so that neighbours stay together.
_NEIGHBOURS = 7


class Aggregation(enum.Enum):
    """How the scores of a token are added up: as a sum, or as the mean over the queries that could attend to it."""

    SUM = "sum"
    NORM_SUM = "norm_sum"


class EvictionRule(NamedTuple):
    """How much of a sequence stays in the cache, in tokens: its first `start_size`, its last `recent_size`, and of the
    others those with the highest scores, `max_cache_size` in all. Multiples of the block size."""

    max_cache_size: int
    start_size: int = 32
    recent_size: int = 128
    aggregation: Aggregation = Aggregation.NORM_SUM


class Eviction:
    """The state of one request. `tables` `[layers, blocks]` has the block tables of its layers, once it has lost
    blocks; None before. `num_evicted_tokens` are the computed tokens that it has lost in each layer."""

    def __init__(self, rule: EvictionRule) -> None:
        self.rule = rule
        self.kept: IntArray | None = None
        """Indices `[layers, blocks]` of the blocks that stay, until the first eviction is carried out."""
        self.reset()

    def reset(self) -> None:
        """Forget everything: the sequence is computed again from its beginning."""
        self.num_evicted_tokens = 0
        self.tables: IntArray | None = None
        self.kept = None
        self._size = 0
        self._sums = np.zeros((0, 0), np.float64)
        self._counts = np.zeros((0, 0), np.int32)
        self._of_prompt = np.zeros((0, 0), np.float32)
        self._num_of_prompt = 0

    @property
    def has_begun(self) -> bool:
        """Whether the sequence has lost blocks. Then its other blocks are useless to other sequences."""
        return self.num_evicted_tokens > 0

    def num_reusable(self, num_prompt_tokens: int) -> int:
        """How many of its tokens may come from the cache: those whose attention is scored must be computed."""
        return 0 if self.has_begun else num_prompt_tokens - SCORED_PROMPT_TOKENS

    def num_scored(self, past: int, num_tokens: int, num_prompt_tokens: int) -> int:
        """How many of a prompt's next tokens have queries that are scored."""
        return min(num_tokens, max(0, past + num_tokens - max(0, num_prompt_tokens - SCORED_PROMPT_TOKENS)))

    def add(self, scores: FloatArray, num_queries: int, *, is_whole: bool = True) -> None:
        """Add the attention that `num_queries` queries, the last ones, gave to each cached token `[layers, tokens]`.
        Unless it `is_whole`, more queries of the prompt follow and are added to the same sum."""
        if self._num_of_prompt:
            scores = scores.copy()
            scores[:, : self._of_prompt.shape[1]] += self._of_prompt
            num_queries += self._num_of_prompt
        self._of_prompt = self._of_prompt[:, :0] if is_whole else scores.copy()
        self._num_of_prompt = 0 if is_whole else num_queries
        size = scores.shape[1] - self.rule.start_size
        if size <= 0 or not is_whole:
            return
        self._grow(len(scores), size)
        # A query does not attend to the tokens after it.
        num_new = np.minimum(np.arange(size, 0, -1, dtype=np.int32), num_queries)
        self._sums[:, :size] += _highest_of_neighbours(scores[:, self.rule.start_size :])
        self._counts[:, :size] += num_new
        self._size = size

    def choose(self, num_cached: int, block_size: int) -> IntArray | None:
        """The indices `[layers, blocks]` of the blocks that stay, in order, if the sequence has too many; else None.
        `num_cached` tokens are in the cache. Forgets the scores of the others."""
        rule = self.rule
        if num_cached < rule.max_cache_size + block_size:
            return None
        num_full, first = num_cached // block_size, rule.start_size // block_size
        num_evicted = num_full - rule.max_cache_size // block_size
        num_evictable = num_full - rule.recent_size // block_size - first
        values = self._sums[:, : num_evictable * block_size]
        if rule.aggregation is Aggregation.NORM_SUM:
            values = values / self._counts[:, : num_evictable * block_size]
        of_blocks = values.reshape(len(values), num_evictable, block_size).sum(axis=2)
        lowest = np.argsort(of_blocks, axis=1, kind="stable")[:, :num_evicted]
        stays = np.ones((len(values), -(-num_cached // block_size)), np.bool_)
        np.put_along_axis(stays, first + lowest, values=False, axis=1)
        kept = np.nonzero(stays)[1].astype(np.int32).reshape(len(values), -1)
        self._drop(stays[:, first:], num_evicted * block_size, block_size)
        self.num_evicted_tokens += num_evicted * block_size
        return kept

    def _drop(self, stays: npt.NDArray[np.bool_], num_tokens: int, block_size: int) -> None:
        """Forget the scores of `num_tokens` tokens of each layer."""
        of_tokens = np.repeat(stays, block_size, axis=1)[:, : self._size]
        size = self._size - num_tokens
        for values in (self._sums, self._counts):
            values[:, :size] = values[:, : self._size][of_tokens].reshape(len(values), size)
            values[:, size:] = 0
        self._size = size
        room = self.rule.max_cache_size + block_size
        if self._sums.shape[1] > 2 * room:  # after a long prompt
            self._sums, self._counts = self._sums[:, :room].copy(), self._counts[:, :room].copy()

    def _grow(self, num_layers: int, size: int) -> None:
        """Make room for this many tokens."""
        if size > self._sums.shape[1]:
            missing = (num_layers, max(size, self.rule.max_cache_size) + 1 - self._sums.shape[1])
            if not self._sums.size:
                self._sums = np.zeros((num_layers, 0))
                self._counts = np.zeros((num_layers, 0), np.int32)
            self._sums = np.concatenate([self._sums, np.zeros(missing)], axis=1)
            self._counts = np.concatenate([self._counts, np.zeros(missing, np.int32)], axis=1)


def _highest_of_neighbours(scores: FloatArray) -> FloatArray:
    """For each token the highest score among itself and the tokens after it, `_NEIGHBOURS` in all."""
    highest = np.array(scores)
    reach = 1
    while reach < _NEIGHBOURS:
        step = min(reach, _NEIGHBOURS - reach)
        if step >= highest.shape[1]:
            break
        highest[:, :-step] = np.maximum(highest[:, :-step], highest[:, step:])
        reach += step
    return highest
