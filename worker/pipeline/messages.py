"""Steps and hidden states as messages between stages. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.protos import stage_pb2
from headrace.worker.model.batch import Batch, HiddenStates, StatesType, Sums
from headrace.worker.request.step import BlockCopy

# The most bytes of hidden states in a message.
PIECE_BYTES = 4 << 20
_Number = TypeVar("_Number", np.int32, np.int64)


def message_of(batch: Batch) -> stage_pb2.StageStep:
    """A step as a message, without its hidden states."""
    copies = np.array([(copy.source, copy.destination) for copy in batch.copies], np.int32)
    return stage_pb2.StageStep(
        input_ids=batch.input_ids.tobytes(),
        position_ids=batch.position_ids.tobytes(),
        past_lens=batch.past_lens.tobytes(),
        subsequence_begins=batch.subsequence_begins.tobytes(),
        block_indices=batch.block_indices.tobytes(),
        block_indices_begins=batch.block_indices_begins.tobytes(),
        max_context_len=int(batch.max_context_len),
        rows=batch.sampled_tokens_indices.tobytes(),
        copies=copies.tobytes(),
        least_rows=batch.least_rows,
    )


def batch_of(step: stage_pb2.StageStep, pieces: Sequence[bytes], dtype: StatesType) -> Batch:
    """The step in a message, with everything that a stage needs, and the hidden states of its tokens in pieces, whose
    numbers are of this type."""
    copies = _numbers(step.copies, np.int32).reshape(-1, 2).tolist()
    input_ids = _numbers(step.input_ids, np.int64)
    return Batch(
        input_ids=input_ids,
        position_ids=_numbers(step.position_ids, np.int64),
        past_lens=_numbers(step.past_lens, np.int32),
        subsequence_begins=_numbers(step.subsequence_begins, np.int32),
        block_indices=_numbers(step.block_indices, np.int32),
        block_indices_begins=_numbers(step.block_indices_begins, np.int32),
        max_context_len=np.array(step.max_context_len, np.int32),
        sampled_tokens_indices=_numbers(step.rows, np.int64),
        sampled=(),
        ahead=None,
        later=(),
        beams=(),
        copies=[BlockCopy(source, destination) for source, destination in copies],
        prompts=(),
        sums=Sums.NONE,
        inverse_temperatures=np.zeros(0, np.float32),
        hidden=states_of(pieces, len(input_ids), dtype),
        least_rows=step.least_rows,
    )


def pieces_of(states: HiddenStates) -> Iterator[bytes]:
    """The hidden states, copied into pieces that fit into messages. Yields nothing without hidden states."""
    flat = np.ascontiguousarray(states).reshape(-1).view(np.uint8)
    for start in range(0, flat.size, PIECE_BYTES):
        yield flat[start : start + PIECE_BYTES].tobytes()


def states_of(pieces: Sequence[bytes], num_rows: int, dtype: StatesType) -> HiddenStates:
    """The hidden states of `num_rows` tokens or rows: `[rows, numbers]` of this type."""
    data = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    numbers: Any = np.frombuffer(data, dtype).reshape(num_rows, -1) if num_rows else np.zeros((0, 0), dtype)
    states: HiddenStates = numbers
    return states


def _numbers(data: bytes, kind: type[_Number]) -> npt.NDArray[_Number]:
    return np.frombuffer(data, kind)
