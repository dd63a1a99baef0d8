"""Parses the flag --cache-eviction, and makes the eviction rules of requests."""

from __future__ import annotations

from headrace.protos.cache_eviction import complete, parse_eviction, rule_for
from headrace.protos.inference_pb2 import AGGREGATION_MODE_SUM, CacheEviction, SamplingParams
from headrace.protos.status import StatusError
from headrace.protos.worker_pb2 import ModelCard
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.request.eviction import Aggregation, Eviction, EvictionRule


def eviction_of(config: WorkerConfig) -> CacheEviction | None:
    """The parsed flag --cache-eviction; see `parse_eviction`. ConfigurationError if it is invalid."""
    if config.cache_eviction is None:
        return None
    try:
        return parse_eviction(config.cache_eviction)
    except ValueError as error:
        raise ConfigurationError(f"--cache-eviction: {error}") from None


def add_rule(card: ModelCard, rule: CacheEviction | None, longest: int) -> None:
    """Record in the model card that requests may evict blocks. With an empty `rule`, only requests that ask for it do;
    with None, no request does. Contexts then have at most `longest` tokens. ConfigurationError if the rule does not fit
    the cache."""
    if rule is None:
        return
    card.max_evicting_context_tokens = max(longest, card.max_context_tokens)
    if not rule.max_cache_size:
        return
    try:
        card.cache_eviction.CopyFrom(complete(rule, card))
    except StatusError as error:
        raise ConfigurationError(f"--cache-eviction: {error.message.removeprefix('cache_eviction.')}") from None


def eviction_for(card: ModelCard, sampling: SamplingParams) -> Eviction | None:
    """The state of a request's eviction; None if it keeps all blocks. StatusError names the wrong field."""
    rule = rule_for(card, sampling)
    if rule is None:
        return None
    aggregation = Aggregation.SUM if rule.aggregation_mode == AGGREGATION_MODE_SUM else Aggregation.NORM_SUM
    return Eviction(EvictionRule(rule.max_cache_size, rule.start_size, rule.recent_size, aggregation))
