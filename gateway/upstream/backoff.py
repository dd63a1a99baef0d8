"""When the attempts of one generation follow one another. Pure."""

from __future__ import annotations

from headrace.common.retries import Attempts, Verdict

# A generation fails after this many lost attempts in a row without a token.
MAX_IN_VAIN = 12
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.5


class Backoff:
    """The pauses between the attempts of one generation at several addresses."""

    def __init__(self, num_addresses: int, number: int = 0) -> None:
        """`number` is the number of the first attempt."""
        self.attempts = Attempts(MAX_IN_VAIN, number=number)
        self._num_addresses = num_addresses
        self._num_waits = 0
        self._num_unknown = 0  # addresses that did not know the model, since the last one that did

    def after(
        self, verdict: Verdict, *, progressed: bool = False, has_begun: bool = True, was_connected: bool = True
    ) -> float | None:
        """Seconds from the beginning of the failed attempt to the next one; None to give up.

        `was_connected`: there was a connection when the attempt began. `progressed`: this attempt delivered tokens;
        `has_begun`: any attempt has. An answer that has begun waits for room and is never refused.
        """
        if progressed:
            self._num_waits = 0
        if verdict not in (Verdict.LOST, Verdict.UNKNOWN_MODEL):
            self._num_unknown = 0  # this address knows the model, and may only be waiting for its worker
        is_nobody_there = verdict is Verdict.NO_WORKER or (verdict is Verdict.LOST and not was_connected)
        if is_nobody_there or (has_begun and verdict in (Verdict.FULL, Verdict.DRAINING)):
            self._num_waits += 1
            self.attempts.waited(progressed=progressed, has_begun=has_begun)
            return self._pause_s(self._num_waits)
        if verdict is Verdict.UNKNOWN_MODEL and self._num_unknown + 1 < self._num_addresses:
            self._num_unknown += 1
            return 0.0  # routers may know different workers
        if verdict not in (Verdict.LOST, Verdict.DRAINING):
            return None
        self._num_waits = 0
        self.attempts.lost(progressed=progressed)
        return self._pause_s(self.attempts.num_in_vain) if self.attempts.are_left else None

    def _pause_s(self, number: int) -> float:
        """Seconds to wait after `number` failed attempts."""
        rounds, position = divmod(number, self._num_addresses)
        if position:  # an address that has not been tried in this round
            return 0.0
        return min(FIRST_BACKOFF_S * 2.0 ** min(rounds - 1, 16), MAX_BACKOFF_S)
