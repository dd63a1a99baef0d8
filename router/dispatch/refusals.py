"""Refusals with a retry time (pure)."""

from __future__ import annotations

import math

from headrace.protos.status import Reason, StatusError

_MIN_RETRY_S = 0.1
_MAX_RETRY_S = 60.0
_CHANGED_RETRY_S = 1.0
_BACKGROUND_RETRY_S = 1.0


def retry_after(seconds: float) -> float:
    """A retry time, rounded up to tenths of seconds, within bounds."""
    return min(max(_MIN_RETRY_S, math.ceil(10 * seconds) / 10), _MAX_RETRY_S)


def too_late(predicted_s: float, bound_s: float) -> StatusError:
    """The refusal of a request whose first token would take `predicted_s` if only `bound_s` is allowed."""
    return StatusError(
        Reason.QUEUE_FULL,
        f"the service is busy: the first token would come after about {predicted_s:.1f} s, later than the "
        f"{max(bound_s, 0.0):.1f} s that this request may wait; try again later",
        retry_after_s=retry_after(predicted_s - bound_s),
    )


def queue_full(num_waiting: int, wait_s: float) -> StatusError:
    """The refusal of a request if the queue is full. It would have waited for `wait_s`."""
    return StatusError(
        Reason.QUEUE_FULL,
        f"the service is busy: {num_waiting} requests wait already, the maximum; try again later",
        retry_after_s=retry_after(wait_s),
    )


def background_full() -> StatusError:
    """The refusal of a request in the background when no worker has room to spare."""
    problem = "every worker is at least half full, and a request of a batch takes only what others leave"
    return StatusError(Reason.QUEUE_FULL, f"{problem}; try again later", retry_after_s=_BACKGROUND_RETRY_S)


def tenant_full(tenant: str, num_in_flight: int) -> StatusError:
    """The refusal of a request whose tenant has its maximum number of requests in flight."""
    return StatusError(
        Reason.QUOTA,
        f"tenant {tenant[:100]!r} has {num_in_flight} requests in flight, the maximum of a tenant; "
        "wait until one has ended",
        retry_after_s=1.0,
    )


def model_changed(why: str) -> StatusError:
    """The error for an answer that only other model files could continue."""
    problem = f"the answer cannot be continued: {why}; ask again"
    return StatusError(Reason.MODEL_CHANGED, problem, retry_after_s=_CHANGED_RETRY_S)
