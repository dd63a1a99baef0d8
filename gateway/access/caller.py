"""The caller of a request."""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass

from headrace.gateway.access.admission import Authorization

authorization_var: ContextVar[Authorization | None] = ContextVar("authorization", default=None)
"""What the key of the current request allows; None without keys."""
deadline_var: ContextVar[float | None] = ContextVar("deadline", default=None)
"""Monotonic time at which the client of the current request stops waiting; None if unknown."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of a request: its ids in logs and traces, its time, its key."""

    request_id: str
    traceparent: str
    """W3C trace context; empty for none."""
    arrived_s: float
    """Monotonic time of the request's arrival."""
    authorization: Authorization | None = None
    """What its key allows; None without keys."""
    deadline_s: float | None = None
    """Monotonic time at which the caller stops waiting; None if unknown."""
    is_background: bool = False
    """Whether nobody waits for the answer: it takes only what other requests leave, whatever priority it names."""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """The metadata for upstream calls."""
        found = (("x-request-id", self.request_id),)
        return (*found, ("traceparent", self.traceparent)) if self.traceparent else found
