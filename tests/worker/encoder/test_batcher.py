"""Which texts are encoded together."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.worker.encoder.batcher import Batcher, BatchLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request


def text(num_tokens: int, **fields: object) -> Request:
    return Request("t", [7] * num_tokens, SamplingParams(max_tokens=0, seed=0), 0, **fields)  # type: ignore[arg-type]


def filled(lengths: list[int], limits: BatchLimits) -> Batcher:
    batcher = Batcher(limits)
    for length in lengths:
        batcher.add(text(length))
    return batcher


def lengths_of(batch: object) -> list[int]:
    return [request.num_tokens for request in batch]  # type: ignore[attr-defined]


def test_texts_of_about_the_same_length_go_together() -> None:
    batcher = filled([100, 10, 101, 11, 99, 9], BatchLimits())
    assert lengths_of(batcher.take()) == [99, 100, 101]
    assert lengths_of(batcher.take()) == [9, 10, 11]
    assert not batcher.take()
    batcher.check()


@given(
    st.lists(st.integers(1, 300), min_size=1, max_size=80),
    st.builds(BatchLimits, st.integers(1, 40), st.integers(1, 600), st.floats(0, 0.5)),
)
def test_each_batch_has_the_first_in_rank_and_keeps_its_bounds(lengths: list[int], limits: BatchLimits) -> None:
    batcher = filled(lengths, limits)
    num_taken = 0
    while len(batcher):
        first = batcher.requests()[0]
        window = batcher.requests()[: limits.window]
        batch = batcher.take()
        assert first in batch
        assert set(batch) <= set(window)
        size = len(batch) * max(lengths_of(batch))
        assert len(batch) == 1 or size <= max(limits.max_tokens, 1)
        assert 1 - sum(lengths_of(batch)) / size <= limits.max_padding + 1e-9
        num_taken += len(batch)
        batcher.check()
    assert num_taken == len(lengths)


def test_sorting_keeps_padding_far_below_that_of_batches_in_order() -> None:
    rng = random.Random(4)
    lengths = [max(3, min(256, int(rng.lognormvariate(3.7, 0.9)))) for _ in range(128)]
    batcher = filled(lengths, BatchLimits())
    size = 0
    while batch := batcher.take():
        size += len(batch) * max(lengths_of(batch))
    in_order = sum(8 * max(lengths[i : i + 8]) for i in range(0, 128, 8))
    assert size / sum(lengths) - 1 < 0.11
    assert in_order / sum(lengths) - 1 > 0.5


def test_what_waits_is_divided_among_the_places_that_are_free() -> None:
    batcher = filled([200] * 4, BatchLimits())
    assert len(batcher.take(2)) == 2
    assert len(batcher.take(1)) == 2
    assert len(filled([8] * 8, BatchLimits()).take(2)) == 8, "too short to be worth two batches"


def test_a_tenant_with_many_texts_does_not_hold_up_another_one() -> None:
    batcher = Batcher(BatchLimits(max_tokens=100))
    for _ in range(100):
        batcher.add(text(100, tenant="many"))
    assert lengths_of(batcher.take()) == [100]
    late = text(100, tenant="few")
    batcher.add(late)
    assert late in [*batcher.take(), *batcher.take()]


def test_a_tenant_is_not_charged_for_texts_that_nobody_waits_for_any_more() -> None:
    batcher = Batcher(BatchLimits(max_tokens=100))
    waiting = [text(100, tenant="gives up") for _ in range(50)]
    for request in waiting:
        batcher.add(request)
    for _ in range(20):
        batcher.add(text(100, tenant="waits"))
    assert [batcher.take()[0].tenant for _ in range(4)] == ["gives up", "waits"] * 2
    for request in waiting[2:]:
        assert batcher.remove(request)
    batcher.add(text(100, tenant="gives up"))
    assert "gives up" in [request.tenant for _ in range(2) for request in batcher.take()]
    batcher.check()


def test_priority_goes_first_and_order_of_arrival_decides_otherwise() -> None:
    batcher = Batcher(BatchLimits(max_tokens=1))
    first, second, urgent = text(5), text(5), text(5, priority=3)
    for request in (first, second, urgent):
        batcher.add(request)
    assert batcher.tokens_ahead(text(5)) == 15
    assert batcher.tokens_ahead(text(5, priority=1)) == 5
    assert [batcher.take()[0] for _ in range(3)] == [urgent, first, second]


def test_a_text_that_is_removed_is_never_taken() -> None:
    batcher = Batcher(BatchLimits())
    kept, removed = text(5), text(5)
    batcher.add(kept)
    batcher.add(removed)
    assert batcher.remove(removed)
    assert not batcher.remove(removed)
    assert list(batcher.take()) == [kept]
    assert not batcher.remove(kept)
    assert batcher.num_tokens == 0


@pytest.mark.parametrize("num_tokens", [1, 5000])
def test_a_text_longer_than_a_batch_is_alone(num_tokens: int) -> None:
    batcher = filled([num_tokens], BatchLimits(max_tokens=64))
    assert lengths_of(batcher.take()) == [num_tokens]
