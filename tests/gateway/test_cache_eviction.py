"""The field cache_eviction, from a request to the message for the worker."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.gateway.cache_eviction import CacheEvictionFields, eviction_rule
from headrace.gateway.chat.sampling import Sampling, sampling_params
from headrace.protos.inference_pb2 import AGGREGATION_MODE_SUM, CacheEviction
from headrace.protos.status import StatusError
from headrace.protos.worker_pb2 import ModelCard

CARD = ModelCard(vocab_size=100, block_size=32, max_context_tokens=1000, max_evicting_context_tokens=8000)


def test_the_fields_become_a_rule() -> None:
    fields = CacheEvictionFields(max_cache_size=640, recent_size=64, aggregation_mode="SUM", apply_rotation=False)
    rule = CacheEviction(max_cache_size=640, recent_size=64, aggregation_mode=AGGREGATION_MODE_SUM)
    assert eviction_rule(fields) == rule
    assert eviction_rule(None) is None
    assert eviction_rule(False) == CacheEviction(max_cache_size=0)


@pytest.mark.parametrize(
    ("fields", "field", "problem"),
    [
        (True, "cache_eviction", "must be false or an object"),
        (CacheEvictionFields(apply_rotation=True), "cache_eviction.apply_rotation", "leave it out"),
        (CacheEvictionFields(max_cache_size=0), "cache_eviction.max_cache_size", "at least 1"),
        (CacheEvictionFields(aggregation_mode="mean"), "cache_eviction.aggregation_mode", "sum or norm_sum"),
    ],
)
def test_wrong_fields_are_refused(fields: CacheEvictionFields | bool, field: str, problem: str) -> None:
    with pytest.raises(StatusError, match=problem) as error:
        eviction_rule(fields)
    assert error.value.field == field


def test_only_requests_that_give_up_blocks_may_exceed_the_cache() -> None:
    rule = CacheEviction(max_cache_size=640)
    sampling = Sampling(cache_eviction=rule, max_tokens=7000)
    params = sampling_params(sampling, CARD, 900, 1)
    assert params.cache_eviction == rule
    assert sampling_params(replace(sampling, max_tokens=None), CARD, 900, 1).max_tokens == 7100
    for other in (None, CacheEviction(max_cache_size=0)):
        with pytest.raises(StatusError, match="maximum context length is 1000"):
            sampling_params(replace(sampling, cache_eviction=other), CARD, 900, 1)
    with pytest.raises(StatusError, match="maximum context length is 1000"):
        sampling_params(sampling, CARD, 1000, 1)
