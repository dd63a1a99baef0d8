"""The field `cache_eviction` of a request: which KV blocks it evicts when it becomes long. Pure."""

from __future__ import annotations

import msgspec

from headrace.gateway.checks import check_range, invalid, unsupported
from headrace.protos.cache_eviction import SIZES, aggregation_mode_of
from headrace.protos.inference_pb2 import CacheEviction


class CacheEvictionFields(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The settings of OpenVINO Model Server's `cache_eviction_config`, sizes in tokens; None for the defaults."""

    max_cache_size: int | None = None
    start_size: int | None = None
    recent_size: int | None = None
    aggregation_mode: str | None = None
    apply_rotation: bool | None = None


def eviction_rule(fields: CacheEvictionFields | bool | None) -> CacheEviction | None:
    """The rule of a request; None if the field is not set, and an empty one if the request keeps all blocks. Raises
    `StatusError`. Only a model's card says whether the sizes fit."""
    if fields is None:
        return None
    if fields is False:
        return CacheEviction(max_cache_size=0)
    if fields is True:
        raise invalid("cache_eviction", "cache_eviction must be false or an object with max_cache_size")
    if fields.apply_rotation:
        raise unsupported(
            "cache_eviction.apply_rotation",
            "cache_eviction.apply_rotation is not supported: tokens keep their positions; leave it out",
        )
    rule = CacheEviction()
    for name in SIZES:
        value = getattr(fields, name)
        if value is not None:
            check_range(f"cache_eviction.{name}", value, 1, 2**31 - 1)
            setattr(rule, name, value)
    if fields.aggregation_mode is not None:
        try:
            rule.aggregation_mode = aggregation_mode_of(fields.aggregation_mode.lower())
        except ValueError as error:
            raise invalid("cache_eviction.aggregation_mode", f"cache_eviction.{error}") from None
    return rule
