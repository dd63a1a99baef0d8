"""What a router has placed on one worker and the worker's reports do not show yet.

A placement counts as load of its worker from the moment of the decision. It is pending until the worker's reports show
the request: when its first token arrives, or with a report that is young enough to have been made after it arrived.

Pure: no I/O, no clock of its own. Times are seconds of any one monotonic clock.
"""

from __future__ import annotations

# A report may have been made before a request arrived that was placed this long before the report came in.
BOOKING_GRACE_S = 0.05


class Booking:
    """The load of one request that was placed on a worker, until it is released."""

    __slots__ = ("at_s", "is_pending", "num_blocks", "num_tokens")

    def __init__(self, num_tokens: int, num_blocks: int, at_s: float) -> None:
        self.num_tokens = num_tokens
        self.num_blocks = num_blocks
        self.at_s = at_s
        self.is_pending = True  # the worker's reports do not show it yet


class Bookings:
    """The bookings of one worker.

    `num_in_flight` counts those that are not released; `num_pending`, `num_tokens` (uncached) and `num_blocks` (new)
    are sums over those that are pending.
    """

    __slots__ = ("_pending", "num_blocks", "num_in_flight", "num_tokens")

    def __init__(self) -> None:
        self.num_in_flight = 0
        self.num_tokens = 0
        self.num_blocks = 0
        self._pending: dict[Booking, None] = {}

    @property
    def num_pending(self) -> int:
        """Bookings that the worker's reports do not show yet."""
        return len(self._pending)

    def book(self, num_tokens: int, num_blocks: int, now_s: float) -> Booking:
        """Count a request's uncached tokens and its new blocks as load until reports show them."""
        booking = Booking(num_tokens, num_blocks, now_s)
        self.num_in_flight += 1
        self._pending[booking] = None
        self.num_tokens += num_tokens
        self.num_blocks += num_blocks
        return booking

    def settle(self, booking: Booking) -> bool:
        """The worker's reports show this request from now on. False when they did before."""
        if not booking.is_pending:
            return False
        booking.is_pending = False
        del self._pending[booking]
        self.num_tokens -= booking.num_tokens
        self.num_blocks -= booking.num_blocks
        return True

    def settle_shown(self, now_s: float) -> None:
        """A report came in now: settle what it must show."""
        shown = []
        for booking in self._pending:  # oldest first
            if booking.at_s > now_s - BOOKING_GRACE_S:
                break
            shown.append(booking)
        for booking in shown:
            self.settle(booking)

    def release(self, booking: Booking) -> None:
        """The request is no longer there. Once for each booking."""
        self.settle(booking)
        self.num_in_flight -= 1
        assert self.num_in_flight >= 0, "released more than was booked"

    def check(self) -> None:
        """Assert that the sums are those of the bookings. For tests."""
        assert len(self._pending) <= self.num_in_flight
        assert self.num_tokens == sum(booking.num_tokens for booking in self._pending)
        assert self.num_blocks == sum(booking.num_blocks for booking in self._pending)
