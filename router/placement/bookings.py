"""The requests that a router has placed on a worker and that the worker's reports do not include yet.

A placement counts as load of its worker from the moment of the decision. It is pending until the worker's reports
include the request: until a report names the placement, or at the latest until its first token arrives.

Pure: no I/O and no clock. Times are in seconds of a monotonic clock.
"""

from __future__ import annotations

from collections.abc import Iterable


class Booking:
    """The load of one request that was placed on a worker, until it is released."""

    __slots__ = ("at_s", "is_pending", "num_blocks", "num_image_tokens", "num_tokens", "placement_id")

    def __init__(
        self, placement_id: int, num_tokens: int, num_blocks: int, at_s: float, num_image_tokens: int = 0
    ) -> None:
        self.placement_id = placement_id
        self.num_image_tokens = num_image_tokens
        self.num_tokens = num_tokens
        self.num_blocks = num_blocks
        self.at_s = at_s
        self.is_pending = True  # the worker's reports do not include it yet


class Bookings:
    """The bookings of one worker.

    `num_in_flight` counts the bookings that are not released. `num_pending`, `num_tokens` (uncached), `num_blocks`
    (new) and `num_image_tokens` (uncached) are totals over the pending ones.
    """

    __slots__ = ("_last_id", "_pending", "num_blocks", "num_image_tokens", "num_in_flight", "num_tokens")

    def __init__(self) -> None:
        self.num_in_flight = 0
        self.num_tokens = 0
        self.num_blocks = 0
        self.num_image_tokens = 0
        self._last_id = 0
        self._pending: dict[int, Booking] = {}  # by placement id, oldest first

    @property
    def num_pending(self) -> int:
        """Bookings that the worker's reports do not include yet."""
        return len(self._pending)

    def book(self, num_tokens: int, num_blocks: int, now_s: float, num_image_tokens: int = 0) -> Booking:
        """Count a request's uncached tokens, those of them of images, and its new blocks as load until reports include
        them."""
        self._last_id += 1
        booking = Booking(self._last_id, num_tokens, num_blocks, now_s, num_image_tokens)
        self.num_in_flight += 1
        self._pending[booking.placement_id] = booking
        self.num_tokens += num_tokens
        self.num_blocks += num_blocks
        self.num_image_tokens += num_image_tokens
        return booking

    def settle(self, booking: Booking) -> bool:
        """Stop counting a booking as pending, because the worker's reports include it from now on. Returns False if
        they already did."""
        if not booking.is_pending:
            return False
        booking.is_pending = False
        del self._pending[booking.placement_id]
        self.num_tokens -= booking.num_tokens
        self.num_blocks -= booking.num_blocks
        self.num_image_tokens -= booking.num_image_tokens
        return True

    def settle_named(self, placement_ids: Iterable[int]) -> None:
        """As `settle`, for the placements with these ids. Ids that are not pending have no effect."""
        for placement_id in placement_ids:
            booking = self._pending.get(placement_id)
            if booking is not None:
                self.settle(booking)

    def settle_until(self, at_s: float) -> None:
        """As `settle`, for everything that was booked until `at_s`."""
        shown = []
        for booking in self._pending.values():
            if booking.at_s > at_s:
                break
            shown.append(booking)
        for booking in shown:
            self.settle(booking)

    def release(self, booking: Booking) -> None:
        """Remove a booking. Must be called exactly once for each."""
        self.settle(booking)
        self.num_in_flight -= 1
        assert self.num_in_flight >= 0, "released more than was booked"

    def check(self) -> None:
        """Assert that the totals match the bookings. For tests."""
        assert len(self._pending) <= self.num_in_flight
        assert self.num_tokens == sum(booking.num_tokens for booking in self._pending.values())
        assert self.num_blocks == sum(booking.num_blocks for booking in self._pending.values())
        assert self.num_image_tokens == sum(booking.num_image_tokens for booking in self._pending.values())
