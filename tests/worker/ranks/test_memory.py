"""What the ranks of a group read in the memory that they share."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.worker.model.batch import Batch, Sums, build_batch
from headrace.worker.ranks.memory import (
    STEP_BYTES,
    GroupMemory,
    LogitsShape,
    SharedLogits,
    StepTooLargeError,
    give_room,
    make_logits,
)
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import BlockCopy, Scheduled, StateStep, StepPlan
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.reduction import Reduction

VOCAB, RUN = 1024, 32
BLOCK = 32


def batch_of(num_tokens: int, num_others: int = 0) -> Batch:
    """A step with a prompt, and with `num_others` more streams, of which every other has an adapter."""
    scheduled = []
    for number in range(1 + num_others):
        sampling = SamplingParams(max_tokens=4, seed=1, temperature=0.7)
        request = Request(f"r{number}", list(range(num_tokens)), sampling, 1, adapter_slot=number if number % 2 else -1)
        request.block_table.extend(range(5 * number, 5 * number + 5))
        scheduled.append(Scheduled(request, num_tokens))
    copies = [BlockCopy(3, 7), BlockCopy(4, 8)]
    states = [StateStep(2, (5,), 0, 0)] if not num_others else None  # of recurrent layers
    return build_batch(scheduled, BLOCK, StepPlan(copies=copies, states=states))


@pytest.fixture
def both() -> Iterator[tuple[GroupMemory, GroupMemory]]:
    """The views of two ranks."""
    descriptor = GroupMemory.make(2)
    yield GroupMemory(descriptor, 0, 2), GroupMemory(descriptor, 1, 2)
    os.close(descriptor)


def test_another_rank_reads_the_step_that_was_written(both: tuple[GroupMemory, GroupMemory]) -> None:
    first, second = both
    for num_tokens, num_others in ((70, 0), (3, 4)):
        batch = batch_of(num_tokens, num_others)
        if num_others:  # of a later stage of a pipeline
            hidden = np.arange(5 * len(batch.input_ids), dtype=np.float32).reshape(-1, 5)
            batch = dataclasses.replace(batch, hidden=hidden, least_rows=8)
        assert (batch.adapter_slots is None) == (num_others == 0)
        first.write_step(batch, 1, 2)
        step = second.read_step()
        assert step is not None
        assert (step.place, step.num_moves) == (1, 2)
        for field in dataclasses.fields(Batch):
            written, read = getattr(batch, field.name), getattr(step.batch, field.name)
            if isinstance(written, np.ndarray):
                assert isinstance(read, np.ndarray), field.name
                assert (read.dtype, read.shape, read.tobytes()) == (written.dtype, written.shape, written.tobytes())
        assert list(step.batch.copies) == [BlockCopy(3, 7), BlockCopy(4, 8)]
        assert step.batch.sums is batch.sums is Sums.DRAWN
        assert step.batch.is_decode == batch.is_decode
        assert step.batch.least_rows == batch.least_rows
        assert (step.batch.hidden is None) == (num_others == 0)
        assert (step.batch.states is None) == (batch.states is None) == (num_others > 0)
        for written, read in zip(batch.states or (), step.batch.states or (), strict=True):
            np.testing.assert_array_equal(read, written)
    first.write_step(None, 0)
    assert second.read_step() is None


def test_a_step_without_room_is_refused_before_it_is_announced(both: tuple[GroupMemory, GroupMemory]) -> None:
    first, second = both
    large = dataclasses.replace(batch_of(3), block_indices=np.zeros(STEP_BYTES // 4, np.int32))
    with pytest.raises(StepTooLargeError):
        first.write_step(large, 0)
    assert second.steps.of(0) == 0


def test_ranks_see_the_times_of_all(both: tuple[GroupMemory, GroupMemory]) -> None:
    first, second = both
    second.note_step(1.5)
    second.note_step(0.5)
    assert first.times_of(1) == (2.0, 0.0)
    assert first.times_of(0) == (0.0, 0.0)


def logits_of(num_rows: int, sums: Sums) -> Logits:
    """Random logits, and numbers in place of a summary."""
    rng = np.random.default_rng(num_rows)
    values, *runs = (
        rng.standard_normal((num_rows, size)).astype(np.float32) for size in (VOCAB, *(3 * [VOCAB // RUN]))
    )
    maxima, drawn, of_model = runs
    reduction = Reduction(maxima, drawn if sums is not Sums.NONE else drawn[:, :0])
    return Logits(values, reduction, of_model if sums is Sums.DRAWN_AND_MODEL else None)


def part_of(logits: Logits, first: int, end: int) -> Logits:
    assert logits.reduction is not None
    runs = slice(first // RUN, end // RUN)
    reduction = Reduction(*(array[:, runs] for array in logits.reduction))
    return Logits(
        logits.values[:, first:end], reduction, None if logits.model_sums is None else logits.model_sums[:, runs]
    )


@pytest.mark.parametrize("sums", list(Sums))
def test_the_parts_of_all_ranks_are_the_logits(sums: Sums) -> None:
    descriptor, shape = make_logits(), LogitsShape(rows=16, vocab_size=VOCAB, num_runs=VOCAB // RUN)
    give_room(descriptor, shape)
    first, second = SharedLogits(descriptor, shape), SharedLogits(descriptor, shape)
    os.close(descriptor)
    kept = []
    for place, num_rows in ((0, 0), (0, 5), (1, 9)):
        wanted = logits_of(num_rows, sums)
        second.put(place, part_of(wanted, 352, VOCAB), 352)
        own = part_of(wanted, 0, 352)
        first.put(place, own, 0)
        kept.append((wanted, first.whole(place, own)))
    # The first are still there when the second step has been computed.
    for wanted, found in kept[1:]:
        assert found.reduction is not None
        assert wanted.reduction is not None
        np.testing.assert_array_equal(found.values, wanted.values)
        np.testing.assert_array_equal(found.reduction.maxima, wanted.reduction.maxima)
        np.testing.assert_array_equal(found.reduction.sums, wanted.reduction.sums)
        assert (found.model_sums is None) == (wanted.model_sums is None)
        if wanted.model_sums is not None:
            np.testing.assert_array_equal(found.model_sums, wanted.model_sums)


def test_logits_without_runs_have_no_summary() -> None:
    descriptor, shape = make_logits(), LogitsShape(rows=4, vocab_size=VOCAB, num_runs=0)
    give_room(descriptor, shape)
    shared = SharedLogits(descriptor, shape)
    os.close(descriptor)
    values = np.arange(2 * VOCAB, dtype=np.float32).reshape(2, VOCAB)
    shared.put(0, Logits(values[:, 500:]), 500)
    shared.put(0, Logits(values[:, :500]), 0)
    found = shared.whole(0, Logits(values[:, :500]))
    assert found.reduction is None
    np.testing.assert_array_equal(found.values, values)
    with pytest.raises(StepTooLargeError):
        shared.put(0, Logits(np.zeros((5, 500), np.float32)), 0)
