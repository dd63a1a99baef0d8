"""A placement as attributes of a span: the decision, its reason, and the cost of each candidate."""

from __future__ import annotations

from headrace.common.telemetry.span import Span
from headrace.router.fleet.routed_request import PlacedRequest
from headrace.router.placement.policy import CostTerms

# Number of candidates to describe, cheapest first; a fleet may have hundreds.
MAX_CANDIDATES = 16


def describe_placement(span: Span, placed: PlacedRequest) -> None:
    """Add the chosen worker and the reason."""
    if not span.is_recording:
        return
    placement = placed.placement
    span.set(
        {
            "headrace.placement.worker": placed.link.worker_id,
            "headrace.placement.reason": placement.reason.value,
            "headrace.placement.predicted_cached_tokens": placement.predicted_cached_tokens,
            "headrace.placement.num_candidates": placement.num_candidates,
            "headrace.placement.decision_us": 1e6 * placed.decision_s,
            **({} if placement.cost is None else _terms(placement.cost)),
        }
    )
    for weighed in placement.weighed:
        cached = weighed.num_cached_tokens
        attributes: dict[str, str | float] = {"server.address": weighed.worker_id, "headrace.cached_tokens": cached}
        span.event("candidate", {**attributes, **_terms(weighed.cost)})


def _terms(cost: CostTerms) -> dict[str, float]:
    return {f"headrace.cost.{name}": getattr(cost, name) for name in CostTerms.__struct_fields__}
