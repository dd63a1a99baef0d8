"""Bounds of request bodies: the size of each, the size of all together, and the time for one to arrive."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.protos.status import Reason, StatusError

MAX_BODY_BYTES = 16 * 1024 * 1024


@dataclass(slots=True)
class Bodies:
    """The bounds, and the bytes that all requests hold now. For one event loop."""

    max_bytes: int = MAX_BODY_BYTES
    timeout_s: float = 60.0
    max_total_bytes: int = 1024 * 1024 * 1024
    num_bytes: int = 0

    def take(self, num_bytes: int) -> None:
        """Count bytes that are kept until `give_back`. Raises StatusError (QUEUE_FULL)."""
        if self.num_bytes + num_bytes > self.max_total_bytes:
            problem = f"the requests at the gateway have {self.max_total_bytes} bytes in their bodies, the maximum"
            raise StatusError(Reason.QUEUE_FULL, problem, retry_after_s=1.0)
        self.num_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Note that the bytes are no longer kept."""
        self.num_bytes -= num_bytes
