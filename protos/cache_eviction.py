"""Eviction of KV blocks of long requests: its settings as a flag, and their limits. Pure.

Gateway and worker check requests with it, and `headrace serve` and the worker their flags.
"""

from __future__ import annotations

from headrace.protos.inference_pb2 import (
    AGGREGATION_MODE_NORM_SUM,
    AGGREGATION_MODE_SUM,
    AggregationMode,
    CacheEviction,
    SamplingParams,
)
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ModelCard

OFF = "off"
ON_REQUEST = "on-request"
AGGREGATION_MODES = {"sum": AGGREGATION_MODE_SUM, "norm_sum": AGGREGATION_MODE_NORM_SUM}
SIZES = ("start_size", "recent_size", "max_cache_size")
# The defaults of a rule: blocks of the beginning, and of the end.
_START_BLOCKS = 1
_RECENT_BLOCKS = 4
_EXAMPLE = "max_cache_size=8192,start_size=32,recent_size=1024,aggregation_mode=norm_sum"


def parse_eviction(text: str) -> CacheEviction | None:
    """The meaning of --cache-eviction: None for "off", a rule for all requests, or an empty rule if only requests have
    rules. ValueError says what is wrong and what to write."""
    if text == OFF:
        return None
    rule = CacheEviction()
    if text == ON_REQUEST:
        return rule
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if name == "aggregation_mode":
            rule.aggregation_mode = aggregation_mode_of(value)
        elif name in SIZES and value.isascii() and value.isdigit() and 0 < int(value) < 1 << 31:
            setattr(rule, name, int(value))
        else:
            raise ValueError(
                f"{part.strip()!r} is not understood; say {OFF}, {ON_REQUEST}, or settings like {_EXAMPLE}"
            )
    if not rule.max_cache_size:
        raise ValueError(f"max_cache_size is missing; say how many tokens may stay, as in {_EXAMPLE}")
    return rule


def aggregation_mode_of(name: str) -> AggregationMode:
    """The value of a mode's name. ValueError if there is none."""
    if name not in AGGREGATION_MODES:
        raise ValueError(f"aggregation_mode must be sum or norm_sum, not {name[:50]!r}")
    return AGGREGATION_MODES[name]


def rule_for(card: ModelCard, sampling: SamplingParams) -> CacheEviction | None:
    """The complete rule of a request, its own or the worker's; None if it keeps all blocks. StatusError names the field
    that is wrong."""
    if not sampling.HasField("cache_eviction"):
        return card.cache_eviction if card.cache_eviction.max_cache_size else None
    if not sampling.cache_eviction.HasField("max_cache_size"):
        raise _invalid("max_cache_size", "is missing: say how many tokens of the request may stay in the KV cache")
    if not sampling.cache_eviction.max_cache_size:
        return None
    if not card.max_evicting_context_tokens:
        problem = (
            "cache_eviction is not possible: the model is served without --cache-eviction; serve it with "
            f"--cache-eviction {ON_REQUEST}, or leave the field out"
        )
        raise StatusError(Reason.UNSUPPORTED, problem, field="cache_eviction")
    return complete(sampling.cache_eviction, card)


def complete(rule: CacheEviction, card: ModelCard) -> CacheEviction:
    """The rule with all of its settings. StatusError names the one that is wrong."""
    whole, size = CacheEviction(start_size=_START_BLOCKS * card.block_size), card.block_size
    whole.recent_size = _RECENT_BLOCKS * size
    whole.aggregation_mode = AGGREGATION_MODE_NORM_SUM
    whole.MergeFrom(rule)
    if whole.aggregation_mode not in AGGREGATION_MODES.values():
        known = " or ".join(AggregationMode.Name(mode) for mode in AGGREGATION_MODES.values())
        raise _invalid("aggregation_mode", f"must be {known}, not {whole.aggregation_mode}")
    for name in SIZES:
        value = getattr(whole, name)
        if value < 1 or value % size:
            raise _invalid(name, f"must be a multiple of the KV block size {size} and above 0, not {value}")
    most = card.max_context_tokens // size * size - size
    if whole.max_cache_size > most:
        raise _invalid(
            "max_cache_size",
            f"must be at most {most}, so that it fits the KV cache and the context with one more block, not "
            f"{whole.max_cache_size}; say less, or serve the model with more (--kv-cache-gb)",
        )
    if whole.max_cache_size <= whole.start_size + whole.recent_size:
        raise _invalid(
            "max_cache_size",
            f"must exceed start_size and recent_size together, {whole.start_size + whole.recent_size}, not be "
            f"{whole.max_cache_size}; say more, or make these smaller",
        )
    return whole


def longest_context_of(card: ModelCard, sampling: SamplingParams) -> int:
    """How many tokens a request with this sampling may have in all: more than the context of the model's card if it
    evicts."""
    return longest_context(card, sampling.cache_eviction if sampling.HasField("cache_eviction") else None)


def longest_context(card: ModelCard, own: CacheEviction | None) -> int:
    """The maximum number of prompt and generated tokens of a request with this rule; None if the rule sets none. A
    request that evicts KV blocks may have more than the card's max_context_tokens."""
    rule = card.cache_eviction if own is None else own
    return max(card.max_context_tokens, card.max_evicting_context_tokens if rule.max_cache_size else 0)


def _invalid(name: str, problem: str) -> StatusError:
    field = f"cache_eviction.{name}"
    return StatusError(Reason.INVALID_FIELD, f"{field} {problem}", field=field)
