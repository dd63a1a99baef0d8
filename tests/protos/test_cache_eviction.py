"""Settings of eviction: as a flag, and complete for a request."""

from __future__ import annotations

import pytest

from headrace.protos.cache_eviction import complete, longest_context, parse_eviction, rule_for
from headrace.protos.inference_pb2 import (
    AGGREGATION_MODE_NORM_SUM,
    AGGREGATION_MODE_SUM,
    CacheEviction,
    SamplingParams,
)
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ModelCard

CARD = ModelCard(block_size=32, max_context_tokens=1000, max_evicting_context_tokens=8000)


def test_the_flag() -> None:
    assert parse_eviction("off") is None
    assert parse_eviction("on-request") == CacheEviction()
    assert parse_eviction("max_cache_size=640") == CacheEviction(max_cache_size=640)
    text = "start_size=64, recent_size=128, max_cache_size=640, aggregation_mode=sum"
    whole = CacheEviction(start_size=64, recent_size=128, max_cache_size=640, aggregation_mode=AGGREGATION_MODE_SUM)
    assert parse_eviction(text) == whole


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("on", "'on' is not understood; say off, on-request, or settings like max_cache_size=8192"),
        ("start_size=32", "max_cache_size is missing"),
        ("max_cache_size=0", "'max_cache_size=0' is not understood"),
        ("max_cache_size=-32", "is not understood"),
        ("max_cache_size=640,apply_rotation=true", "'apply_rotation=true' is not understood"),
        ("max_cache_size=640,aggregation_mode=max", "aggregation_mode must be sum or norm_sum, not 'max'"),
    ],
)
def test_a_wrong_flag_is_refused_with_the_remedy(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        parse_eviction(text)


def test_a_rule_is_completed() -> None:
    rule = complete(CacheEviction(max_cache_size=640), CARD)
    assert (rule.start_size, rule.recent_size, rule.aggregation_mode) == (32, 128, AGGREGATION_MODE_NORM_SUM)
    own = complete(CacheEviction(max_cache_size=640, start_size=64, aggregation_mode=AGGREGATION_MODE_SUM), CARD)
    assert (own.start_size, own.recent_size, own.aggregation_mode) == (64, 128, AGGREGATION_MODE_SUM)


@pytest.mark.parametrize(
    ("rule", "field", "problem"),
    [
        ({"max_cache_size": 650}, "max_cache_size", "must be a multiple of the KV block size 32"),
        ({"max_cache_size": 640, "start_size": 33}, "start_size", "must be a multiple"),
        ({"max_cache_size": 640, "recent_size": 0}, "recent_size", "above 0, not 0"),
        ({"max_cache_size": 160}, "max_cache_size", "must exceed start_size and recent_size together, 160"),
        ({"max_cache_size": 992}, "max_cache_size", "must be at most 960"),
        ({"start_size": 32}, "max_cache_size", "is missing"),
        (
            {"max_cache_size": 640, "aggregation_mode": 7},
            "aggregation_mode",
            "must be AGGREGATION_MODE_SUM or AGGREGATION_MODE_NORM_SUM, not 7",
        ),
    ],
)
def test_a_wrong_rule_is_refused_with_the_remedy(rule: dict[str, int], field: str, problem: str) -> None:
    with pytest.raises(StatusError, match=problem) as error:
        rule_for(CARD, SamplingParams(cache_eviction=CacheEviction(**rule)))
    assert error.value.field == f"cache_eviction.{field}"


def test_a_request_may_differ_from_the_default_of_the_server() -> None:
    evicting = ModelCard()
    evicting.CopyFrom(CARD)
    evicting.cache_eviction.CopyFrom(complete(CacheEviction(max_cache_size=640), CARD))
    keeps_all = SamplingParams(cache_eviction=CacheEviction(max_cache_size=0))
    asks = SamplingParams(cache_eviction=CacheEviction(max_cache_size=320))
    assert rule_for(CARD, SamplingParams()) is rule_for(CARD, keeps_all) is rule_for(evicting, keeps_all) is None
    of_server, own = rule_for(evicting, SamplingParams()), rule_for(evicting, asks)
    assert of_server is not None
    assert own is not None
    assert (of_server.max_cache_size, own.max_cache_size) == (640, 320)
    assert longest_context(evicting, None) == longest_context(CARD, asks.cache_eviction) == 8000
    assert longest_context(evicting, keeps_all.cache_eviction) == longest_context(CARD, None) == 1000


def test_a_server_without_eviction_refuses_it() -> None:
    with pytest.raises(StatusError, match="serve it with --cache-eviction on-request") as error:
        rule_for(
            ModelCard(block_size=32, max_context_tokens=1000), SamplingParams(cache_eviction={"max_cache_size": 640})
        )
    assert (error.value.reason, error.value.field) == (Reason.UNSUPPORTED, "cache_eviction")
