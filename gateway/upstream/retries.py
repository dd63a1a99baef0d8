"""Whether and when a generation is attempted again (pure)."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.protos.status import Reason, StatusError

# A generation fails after this many lost attempts in a row without a token, and after this many lost attempts in all.
MAX_FRUITLESS_ATTEMPTS = 12
MAX_ATTEMPTS = 32
FIRST_BACKOFF_S = 0.05
MAX_BACKOFF_S = 1.5


@dataclass(slots=True)
class Retries:
    """Counts the attempts of a generation, and decides on the next one (pure)."""

    num_addresses: int
    attempt: int = 0
    fruitless: int = 0
    losses: int = 0
    waits: int = 0
    unknown: int = 0
    """Addresses that did not know the model, since the last one that did."""

    def after(
        self, failure: StatusError, *, lost: bool, progress: bool = False, started: bool = True, present: bool = True
    ) -> float | None:
        """Seconds from the beginning of the failed attempt to the next one; None to give up.

        `lost` means that the transport failed, `present` that there was a connection when the attempt began.
        `progress` means that this attempt delivered tokens, `started` that any attempt has. An answer that has
        started waits for room and is never refused.
        """
        if progress:
            self.fruitless = self.waits = 0
        if not lost and failure.reason is not Reason.MODEL_NOT_FOUND:
            self.unknown = 0  # this address knows the model, and may only be waiting for its worker
        if _has_no_worker(failure, lost, present) or (started and not lost and failure.reason in _CROWDED):
            self.waits += 1
            self.attempt += started  # for routers and workers, an attempt that no worker accepted does not count
            return self._pause(self.waits)
        if failure.reason is Reason.MODEL_NOT_FOUND and self.unknown + 1 < self.num_addresses:
            self.unknown += 1
            return 0.0  # routers may know different workers
        if not (lost or failure.reason is Reason.DRAINING):
            return None
        self.attempt += 1
        self.fruitless += 1
        self.losses += 1
        self.waits = 0
        if self.fruitless >= MAX_FRUITLESS_ATTEMPTS or self.losses >= MAX_ATTEMPTS:
            return None
        return self._pause(self.fruitless)

    def _pause(self, number: int) -> float:
        """Seconds to wait after `number` failed attempts."""
        rounds, position = divmod(number, self.num_addresses)
        if position:  # an address that has not been tried in this round
            return 0.0
        return min(FIRST_BACKOFF_S * 2.0 ** min(rounds - 1, 16), MAX_BACKOFF_S)


_CROWDED = frozenset({Reason.QUEUE_FULL, Reason.DRAINING})


def _has_no_worker(failure: StatusError, lost: bool, present: bool) -> bool:
    """Whether no worker got the request: none takes requests, or none is reachable."""
    return not present if lost else failure.reason is Reason.NO_CAPACITY
