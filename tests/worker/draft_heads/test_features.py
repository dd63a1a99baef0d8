"""Features are kept for each token of each block, and only features of the right tokens are used."""

from __future__ import annotations

from array import array

import numpy as np

from headrace.worker.draft_heads.features import FeatureStore
from headrace.worker.model.batch import Batch, build_batch, padded
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import BlockCopy, Scheduled, StepPlan
from tests.worker.draft_heads.files import FloatArray

BLOCK_SIZE, WIDTH = 4, 3


def request_with(tokens: int, computed: int, blocks: list[int]) -> Request:
    request = Request("r", list(range(tokens)), SamplingParams(8, 0), 1)
    request.block_table = array("i", blocks)
    request.num_computed_tokens = computed
    return request


def features_of(batch: Batch) -> FloatArray:
    """Small whole numbers, which bfloat16 can represent: the token in each column, and the column."""
    return (batch.input_ids[:, None] + np.arange(WIDTH)).astype(np.float32)


def test_features_are_found_by_block_and_place() -> None:
    store = FeatureStore(8, BLOCK_SIZE, WIDTH)
    first, second = request_with(6, 0, [5, 2]), request_with(10, 8, [1, 3, 6])
    batch = build_batch([Scheduled(first, 6), Scheduled(second, 2)], BLOCK_SIZE)
    store.write(batch, features_of(batch))
    np.testing.assert_array_equal(store.read(*store.places(batch)), features_of(batch))
    assert [store.num_filled[block] for block in (5, 2, 1, 3, 6)] == [4, 2, 0, 0, 2]
    assert store.first_usable([5, 2], 0, 6) == 0
    assert store.first_usable([5, 2], 0, 7) == 2, "the last token has none"
    assert store.first_usable([1, 3, 6], 0, 10) == 2
    assert store.first_usable([1, 3, 6], 8, 10) == 2, "earlier tokens need none"


def test_a_step_with_padding_and_a_draft_writes_to_no_other_block() -> None:
    store = FeatureStore(8, BLOCK_SIZE, WIDTH)
    request = request_with(4, 3, [5, 2])
    request.draft = [9, 9]
    batch = padded(build_batch([Scheduled(request, 3)], BLOCK_SIZE), 2, 8)
    store.num_filled[5] = 3
    store.write(batch, features_of(batch))
    assert store.num_filled == [0, 0, 2, 0, 0, 4, 0, 0, 1]
    request.draft = ()
    request.token_ids.append(7)
    request.num_computed_tokens = 4
    batch = build_batch([Scheduled(request, 1)], BLOCK_SIZE)
    store.write(batch, features_of(batch))
    assert store.num_filled[2] == 1, "what follows the first rejected token is none of the request's"


def test_blocks_that_are_copied_or_taken_again() -> None:
    store = FeatureStore(8, BLOCK_SIZE, WIDTH)
    batch = build_batch([Scheduled(request_with(4, 0, [5]), 4)], BLOCK_SIZE)
    store.write(batch, features_of(batch))
    copied = build_batch([Scheduled(request_with(4, 2, [1]), 2)], BLOCK_SIZE, StepPlan([BlockCopy(5, 1)]))
    store.write(copied, features_of(copied) + 8)
    whole = build_batch([Scheduled(request_with(4, 0, [1]), 4)], BLOCK_SIZE)
    assert store.read(*store.places(whole))[:, 0].tolist() == [0, 1, 10, 11]
    store.forget([5])
    assert store.first_usable([5], 0, 4) == 1
    assert store.first_usable([1], 0, 4) == 0
    copied = build_batch([Scheduled(request_with(4, 2, [3]), 2)], BLOCK_SIZE, StepPlan([BlockCopy(5, 3)]))
    store.write(copied, features_of(copied))
    assert store.first_usable([3], 0, 4) == 1, "the copied beginning has none"


def test_features_are_rounded_to_bfloat16() -> None:
    store = FeatureStore(2, BLOCK_SIZE, WIDTH)
    batch = build_batch([Scheduled(request_with(4, 0, [1]), 4)], BLOCK_SIZE)
    values = np.random.default_rng(0).standard_normal((4, WIDTH)).astype(np.float32)
    store.write(batch, values)
    np.testing.assert_allclose(store.read(*store.places(batch)), values, rtol=2**-8)
    store.set(1, 2, np.full(WIDTH, 1e38, np.float32))
    assert np.isfinite(store.read(*store.places(batch))).all()
