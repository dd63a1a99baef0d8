"""The message to a worker about the placement of a request (pure)."""

from __future__ import annotations

import math

from headrace.protos.inference_pb2 import Belief as BeliefMessage
from headrace.router.placement.bookings import Booking
from headrace.router.placement.policy import Belief

# How many times workers may return one request; after that it stays where it is placed. In simulated bursts of ten
# requests at eight routers, four times were not enough (docs/decisions/0035).
MAX_GIVEN_BACK = 8


def belief_message(watcher_id: int, booking: Booking, num_cached_tokens: int, believed: Belief | None) -> BeliefMessage:
    """The belief of router `watcher_id` about a placement with this many expected cached tokens. With `believed`, the
    worker returns the request if it has more work than believed; without, it never does."""
    message = BeliefMessage(
        watcher_id=watcher_id, placement_id=booking.placement_id, num_cached_tokens=num_cached_tokens
    )
    if believed is not None and believed.slack_ms != math.inf:
        message.slack_ms = believed.slack_ms
        message.num_requests = believed.num_requests
        message.num_uncached_tokens = believed.num_uncached_tokens
        message.ms_per_request = believed.ms_per_request
        message.ms_per_token = believed.ms_per_token
    return message
