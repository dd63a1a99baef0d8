"""Who asks."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.gateway.access.admission import Authorization


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks, as logs and traces know it, and since when."""

    request_id: str
    traceparent: str
    """W3C trace context; empty for none."""
    arrived_s: float
    """Monotonic time of the request's arrival."""
    authorization: Authorization | None = None
    """What its key allows; None without keys."""
    deadline_s: float | None = None
    """Monotonic time at which the caller wants no answer any more; None if it did not say."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What goes with calls upstream."""
        found = (("x-request-id", self.request_id),)
        return (*found, ("traceparent", self.traceparent)) if self.traceparent else found
