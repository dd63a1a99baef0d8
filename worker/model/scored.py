"""The sequences of a step whose attention scores decide which of their blocks are evicted, and the step's arrays.
Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.worker.request.eviction import Eviction, FloatArray, IntArray


class Scored(NamedTuple):
    """A sequence in the batch whose attention is scored: its number, its state, and how many of its last queries count.
    Unless `is_whole`, later steps add more queries of the prompt."""

    sequence: int
    eviction: Eviction
    num_queries: int
    is_whole: bool


def tables_of(block_indices: IntArray, block_tables: IntArray | None, num_layers: int) -> IntArray:
    """The block indices of each layer, `[layers, blocks]`, if all layers have the same blocks."""
    return np.broadcast_to(block_indices, (num_layers, len(block_indices))) if block_tables is None else block_tables


def merged_tables(block_indices: IntArray, begins: Sequence[int], lost: dict[int, Eviction]) -> IntArray:
    """The block indices of each layer, `[layers, blocks]`: those of sequences that have `lost` blocks, and for others
    the same in all layers. The blocks of sequence i begin at `begins[i]`."""
    num_layers = max(len(eviction.tables) for eviction in lost.values() if eviction.tables is not None)
    tables = np.tile(block_indices, (num_layers, 1))
    for number, eviction in lost.items():
        begin, end = begins[number : number + 2]
        assert eviction.tables is not None
        tables[:, begin:end] = eviction.tables[:, : end - begin]
    return tables


def padded_tables(tables: IntArray | None, num_tokens: int, block: int) -> IntArray | None:
    """The block tables of layers, `[layers, blocks]`, with `num_tokens` more sequences for padding, each with the one
    block `block`. None if there are no tables."""
    return None if tables is None else np.pad(tables, ((0, 0), (0, num_tokens)), constant_values=block)


def score_windows(scored: Sequence[Scored], num_sequences: int) -> IntArray:
    """How many of the last queries of each sequence are scored, at least one: i32 `[sequences]`."""
    windows = np.ones(num_sequences, np.int32)
    for one in scored:
        windows[one.sequence] = one.num_queries
    return windows


def add_scores(scored: Sequence[Scored], past_lens: IntArray, begins: IntArray, scores: FloatArray) -> None:
    """Pass the scores of cached tokens to their sequences: `scores` `[layers, tokens]` of all sequences, whose new
    tokens begin at `begins`."""
    ends = np.cumsum(past_lens + np.diff(begins)).tolist()
    for sequence, eviction, num_queries, is_whole in scored:
        begin = ends[sequence - 1] if sequence else 0
        eviction.add(scores[:, begin : ends[sequence]], num_queries, is_whole=is_whole)
