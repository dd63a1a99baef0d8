"""Makes the inputs of OpenVINO's PagedAttention operator from a scheduled step. Pure.

For two sequences, the first with 40 cached tokens and 1 new one, the second with 0 and 3 (block size 32):

    input_ids             [ t40 | u0 u1 u2 ]      all new tokens of the step, flattened
    position_ids          [ 40  | 0  1  2  ]
    past_lens             [ 40, 0 ]               tokens already in the cache
    subsequence_begins    [ 0, 1, 4 ]
    block_indices         [ 7 3 | 12 ]            block tables as far as the step reaches
    block_indices_begins  [ 0, 2, 3 ]
    max_context_len       41                      largest past + new
    sampled_tokens_indices [ 0, 3 ]               rows whose logits are wanted

Source of the layout: the operator's description in OpenVINO's paged_attention_extension.
"""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.worker.kv.manager import BlockCopy
from headrace.worker.request.request import Request
from headrace.worker.request.step import Scheduled

IntArray = npt.NDArray[np.int32]
LongArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """Inputs of one step; names, shapes and types are the operator's.

    The first rows of logits belong to the `sampled` requests, in that order. After them, each of `prompts` has a row
    for each of its prompt tokens in the step, except the last token of the prompt. `copies` of KV blocks are made
    before anything is computed. `sums` says what is computed besides the logits; nothing if there are `prompts`, which
    may have many rows.
    """

    input_ids: LongArray
    position_ids: LongArray
    past_lens: IntArray
    subsequence_begins: IntArray
    block_indices: IntArray
    block_indices_begins: IntArray
    max_context_len: IntArray
    sampled_tokens_indices: LongArray
    sampled: Sequence[Request]
    copies: Sequence[BlockCopy]
    prompts: Sequence[PromptRows]
    sums: Sums

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one new token."""
        return len(self.input_ids) == len(self.past_lens)

    @property
    def inverse_temperatures(self) -> npt.NDArray[np.float32]:
        """The factor of each sampled row's logits, `[rows]`."""
        return np.array([request.sampling.inverse_temperature for request in self.sampled], np.float32)


class Sums(enum.Enum):
    """Which sums of weights are computed with the logits: none, if only the best token is needed; at each row's
    temperature, for draws; also at temperature 1, for log-probabilities."""

    NONE = enum.auto()
    DRAWN = enum.auto()
    DRAWN_AND_MODEL = enum.auto()


class PromptRows(NamedTuple):
    """Rows of a request that wants log-probabilities of its prompt: the position of the first, and their number."""

    request: Request
    position: int
    num_rows: int


def build_batch(scheduled: Sequence[Scheduled], block_size: int, copies: Sequence[BlockCopy] = ()) -> Batch:
    """The inputs of a step. Every request has blocks for its computed and scheduled tokens."""
    input_ids, block_indices = array("I"), array("i")
    past_lens, subsequence_begins, block_indices_begins = [], [0], [0]
    sampled_indices, sampled = [], []
    prompt_indices: list[int] = []
    prompts: list[PromptRows] = []
    max_context_len = 0
    for request, num_tokens in scheduled:
        past = request.num_computed_tokens
        end = past + num_tokens
        if num_tokens == 1:
            input_ids.append(request.token_ids[past])
        else:
            input_ids.extend(request.token_ids[past:end])
        num_blocks = -(-end // block_size)
        table = request.block_table
        block_indices.extend(table if len(table) == num_blocks else table[:num_blocks])
        past_lens.append(past)
        subsequence_begins.append(len(input_ids))
        block_indices_begins.append(len(block_indices))
        max_context_len = max(max_context_len, end)
        if request.wants_prompt_logprobs:
            num_rows = min(end, request.num_prompt_tokens - 1) - past
            prompt_indices.extend(range(subsequence_begins[-2], subsequence_begins[-2] + num_rows))
            prompts.append(PromptRows(request, past, num_rows))
        if end == len(request.token_ids):
            sampled_indices.append(len(input_ids) - 1)
            sampled.append(request)
    past_array = np.array(past_lens, np.int32)
    begins = np.array(subsequence_begins, np.int32)
    return Batch(
        input_ids=np.frombuffer(input_ids, np.uint32).astype(np.int64),
        position_ids=_positions(past_array, begins),
        past_lens=past_array,
        subsequence_begins=begins,
        block_indices=np.frombuffer(block_indices, np.int32),
        block_indices_begins=np.array(block_indices_begins, np.int32),
        max_context_len=np.array(max_context_len, np.int32),
        sampled_tokens_indices=np.array(sampled_indices + prompt_indices, np.int64),
        sampled=sampled,
        copies=copies,
        prompts=prompts,
        sums=Sums.NONE if prompts else sums_for(sampled),
    )


def padded(batch: Batch, num_tokens: int, block: int) -> Batch:
    """The batch with `num_tokens` more sequences of one token, which are not sampled. Their keys and values go to the
    beginning of `block`, which belongs to no request."""
    ones = np.arange(1, num_tokens + 1, dtype=np.int32)
    nothing = np.zeros(num_tokens, np.int32)
    return replace(
        batch,
        input_ids=np.concatenate([batch.input_ids, nothing]),
        position_ids=np.concatenate([batch.position_ids, nothing]),
        past_lens=np.concatenate([batch.past_lens, nothing]),
        subsequence_begins=np.concatenate([batch.subsequence_begins, batch.subsequence_begins[-1] + ones]),
        block_indices=np.concatenate([batch.block_indices, nothing + np.int32(block)]),
        block_indices_begins=np.concatenate([batch.block_indices_begins, batch.block_indices_begins[-1] + ones]),
    )


def sums_for(sampled: Sequence[Request]) -> Sums:
    """The sums that are needed to sample the requests."""
    sums = Sums.NONE
    for request in sampled:
        sampling = request.sampling
        if sampling.num_logprobs is not None and sampling.inverse_temperature != 1.0:
            return Sums.DRAWN_AND_MODEL
        if not sampling.is_greedy or sampling.num_logprobs is not None:
            sums = Sums.DRAWN
    return sums


def _positions(past_lens: IntArray, begins: IntArray) -> LongArray:
    """Position of each token in its sequence."""
    if begins[-1] == len(past_lens):
        return past_lens.astype(np.int64)
    offsets: LongArray = np.arange(begins[-1], dtype=np.int64)
    offsets += np.repeat(past_lens.astype(np.int64) - begins[:-1], np.diff(begins))
    return offsets
