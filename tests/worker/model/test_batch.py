"""The operator's arrays."""

from __future__ import annotations

from headrace.worker.model.batch import build_batch
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import Scheduled


def sequence(tokens: range, computed: int, table: list[int]) -> Request:
    request = Request("r", list(tokens), SamplingParams(max_tokens=1, seed=0), 0)
    request.num_computed_tokens = computed
    request.block_table.extend(table)
    return request


def test_the_example_of_the_module_is_what_is_built() -> None:
    first = sequence(range(100, 141), 40, [7, 3])
    second = sequence(range(3), 0, [12])
    batch = build_batch([Scheduled(first, 1), Scheduled(second, 3)], 32)
    assert batch.input_ids.tolist() == [140, 0, 1, 2]
    assert batch.position_ids.tolist() == [40, 0, 1, 2]
    assert batch.past_lens.tolist() == [40, 0]
    assert batch.subsequence_begins.tolist() == [0, 1, 4]
    assert batch.block_indices.tolist() == [7, 3, 12]
    assert batch.block_indices_begins.tolist() == [0, 2, 3]
    assert batch.max_context_len.tolist() == 41
    assert batch.sampled_tokens_indices.tolist() == [0, 3]
    assert list(batch.sampled) == [first, second]


def test_a_chunk_that_does_not_reach_the_end_is_not_sampled_and_uses_only_the_blocks_it_reaches() -> None:
    batch = build_batch([Scheduled(sequence(range(100), 32, [5, 6, 7, 8]), 20)], 32)
    assert batch.block_indices.tolist() == [5, 6]
    assert batch.position_ids.tolist() == list(range(32, 52))
    assert batch.sampled_tokens_indices.tolist() == []
    assert list(batch.sampled) == []


def test_types_are_those_of_the_operator() -> None:
    batch = build_batch([Scheduled(sequence(range(3), 0, [1]), 3)], 32)
    for name in ("input_ids", "position_ids", "sampled_tokens_indices"):
        assert getattr(batch, name).dtype == "int64"
    for name in ("past_lens", "subsequence_begins", "block_indices", "block_indices_begins", "max_context_len"):
        assert getattr(batch, name).dtype == "int32"
    assert batch.max_context_len.shape == ()
