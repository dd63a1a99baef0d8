"""The parts of a step, and steps as messages."""

from __future__ import annotations

from array import array
from dataclasses import replace

import numpy as np
import pytest

from headrace.worker.model.batch import Batch, StatesType, build_batch
from headrace.worker.pipeline.messages import batch_of, message_of, pieces_of, states_of
from headrace.worker.pipeline.parts import LEAST_TOKENS, num_parts, parts_of
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import BlockCopy, Scheduled, StepPlan

BLOCK = 32
GREEDY = SamplingParams(max_tokens=4, seed=0, temperature=0.0)
# Of hidden states.
DTYPES = [np.dtype(np.float32), np.dtype(np.uint16)]


def step_of(*sequences: tuple[int, int, int], copies: list[BlockCopy] | None = None) -> Batch:
    """A step of requests with so many tokens, of which so many are computed before, and so many now."""
    scheduled = []
    block = 0
    for number, (length, past, count) in enumerate(sequences):
        request = Request(f"r{number}", [1000 * number + place for place in range(length)], GREEDY, 0)
        request.num_computed_tokens = past
        num_blocks = -(-length // BLOCK)
        request.block_table = array("i", range(block, block + num_blocks))
        block += num_blocks
        scheduled.append(Scheduled(request, count))
    return build_batch(scheduled, BLOCK, StepPlan(copies=copies or ()))


def tokens_of(batch: Batch) -> list[tuple[int, int, tuple[int, ...]]]:
    """Each token of a step with its position and the blocks that it sees."""
    found = []
    bounds = zip(batch.subsequence_begins[:-1], batch.subsequence_begins[1:], batch.block_indices_begins, strict=False)
    for past, (begin, end, first_block) in zip(batch.past_lens, bounds, strict=True):
        assert batch.max_context_len >= past + end - begin
        for place in range(begin, end):
            position = past + place - begin
            assert batch.position_ids[place] == position
            blocks = batch.block_indices[first_block:][: position // BLOCK + 1]
            found.append((int(batch.input_ids[place]), int(position), tuple(blocks.tolist())))
    return found


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize(
    "sequences",
    [
        [(300, 0, 300)],
        [(40 + number, 39 + number, 1) for number in range(32)],
        [(90, 89, 1), (33, 32, 1), (200, 60, 140), (65, 0, 65)],
    ],
)
def test_parts_are_the_step_in_order(sequences: list[tuple[int, int, int]], count: int) -> None:
    whole = step_of(*sequences, copies=[BlockCopy(1, 2)])
    parts = parts_of(whole, count, BLOCK)
    sizes = [len(part.batch.input_ids) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert [token for part in parts for token in tokens_of(part.batch)] == tokens_of(whole)
    assert [list(part.batch.copies) for part in parts] == [[BlockCopy(1, 2)], *[[]] * (count - 1)]
    for part in parts:
        sampled = whole.input_ids[whole.sampled_tokens_indices[part.rows]]
        np.testing.assert_array_equal(part.batch.input_ids[part.batch.sampled_tokens_indices], sampled)
    assert sorted(row for part in parts for row in part.rows) == list(range(len(sequences)))


def test_small_steps_and_those_of_decode_have_one_part() -> None:
    assert num_parts(step_of(*[(40, 39, 1)] * (2 * LEAST_TOKENS))) == 1
    assert num_parts(step_of((300, 0, 2 * LEAST_TOKENS - 1))) == 1
    assert num_parts(step_of((300, 0, 3 * LEAST_TOKENS))) == 3
    whole = step_of((40, 39, 1))
    ((part, rows),) = parts_of(whole, 1, BLOCK)
    assert part is whole
    assert rows.tolist() == [0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_is_the_same_as_a_message(dtype: StatesType) -> None:
    whole = step_of((90, 89, 1), (200, 60, 140), copies=[BlockCopy(3, 4), BlockCopy(5, 6)])
    states = np.arange(3 * len(whole.input_ids), dtype=dtype).reshape(-1, 3)
    message = message_of(replace(whole, least_rows=8))
    found = batch_of(type(message).FromString(message.SerializeToString()), list(pieces_of(states)), dtype)
    assert tokens_of(found) == tokens_of(whole)
    assert found.sampled_tokens_indices.tolist() == whole.sampled_tokens_indices.tolist()
    assert found.max_context_len == whole.max_context_len
    assert found.copies == whole.copies
    assert found.least_rows == 8
    np.testing.assert_array_equal(found.hidden, states)
    assert batch_of(message_of(step_of((90, 89, 1))), list(pieces_of(states[:1])), dtype).copies == []


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [0, 1, 700])
def test_hidden_states_are_the_same_in_pieces(num_rows: int, dtype: StatesType) -> None:
    states = np.random.default_rng(0).integers(0, 60_000, (num_rows, 4096)).astype(dtype)
    pieces = list(pieces_of(states))
    assert len(pieces) == -(-states.nbytes // (4 << 20))
    found = states_of(pieces, num_rows, dtype)
    assert found.dtype == dtype
    assert len(found) == num_rows
    np.testing.assert_array_equal(found.reshape(states.shape), states)
