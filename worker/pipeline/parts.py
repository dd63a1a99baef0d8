"""Divides a step with prompts into parts that follow one another through the stages, so that several stages compute at
a time. Pure.

    stage 0   | part 0 | part 1 | part 2 |        | logits |
    stage 1            | part 0 | part 1 | part 2 |

Parts have whole sequences, or the beginning and the end of one. Each stage computes parts in order, so a token sees the
keys and values of those before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.worker.model.batch import Batch

# A part of fewer tokens would cost nearly as much: it reads the same weights. So would parts of decode steps; there,
# steps with other streams follow one another (`worker/engine/pipelined.py`).
LEAST_TOKENS = 64
_MOST_PARTS = 4


class Part(NamedTuple):
    """Some tokens of a step, as a batch, and the step's rows that belong to them, in the order of the batch."""

    batch: Batch
    rows: npt.NDArray[np.intp]


def num_parts(batch: Batch) -> int:
    """The number of parts into which a step is divided."""
    return 1 if batch.is_decode else max(1, min(_MOST_PARTS, len(batch.input_ids) // LEAST_TOKENS))


def parts_of(batch: Batch, count: int, block_size: int) -> Sequence[Part]:
    """`count` parts with equal numbers of tokens. The first part has the copies of blocks."""
    if count == 1:
        return [Part(batch, np.arange(len(batch.sampled_tokens_indices)))]
    return list(_parts_of(batch, count, block_size))


def _parts_of(batch: Batch, count: int, block_size: int) -> Iterator[Part]:
    num_tokens = len(batch.input_ids)
    begins, ends = batch.subsequence_begins[:-1], batch.subsequence_begins[1:]
    for number in range(count):
        first, end = number * num_tokens // count, (number + 1) * num_tokens // count
        found = np.flatnonzero((begins < end) & (ends > first))
        starts, stops = np.maximum(begins[found], first), np.minimum(ends[found], end)
        past_lens = batch.past_lens[found] + (starts - begins[found])
        contexts = past_lens + (stops - starts)
        num_blocks = -(-contexts // block_size)
        tables = [
            batch.block_indices[begin : begin + length]
            for begin, length in zip(batch.block_indices_begins[found], num_blocks, strict=True)
        ]
        rows = np.flatnonzero((batch.sampled_tokens_indices >= first) & (batch.sampled_tokens_indices < end))
        part = replace(
            batch,
            input_ids=batch.input_ids[first:end],
            position_ids=batch.position_ids[first:end],
            past_lens=past_lens.astype(np.int32),
            subsequence_begins=np.concatenate([starts - first, [end - first]]).astype(np.int32),
            block_indices=np.concatenate(tables).astype(np.int32),
            block_indices_begins=np.cumsum([0, *num_blocks], dtype=np.int32),
            max_context_len=np.array(contexts.max(), np.int32),
            sampled_tokens_indices=batch.sampled_tokens_indices[rows] - first,
            copies=batch.copies if number == 0 else (),
        )
        yield Part(part, rows)
