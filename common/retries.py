"""Decides what happens after a failed attempt at an answer, and how many attempts are allowed. Pure.

Gateways call routers, and routers call workers. For both, one generation is one or more attempts:

    attempt -> finish: done
            -> the peer is lost:         again, elsewhere; bounded
            -> the peer takes it not:    again, elsewhere or later
            -> every peer would say so:  the error goes to the caller
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

import grpc

from headrace.protos.status import Reason, details_of, error_of, is_peer_lost

# The most attempts of one generation that may fail.
MAX_FAILED = 32


class Verdict(enum.Enum):
    """The consequence of a failed attempt: whether the request is tried again, and where."""

    LOST = enum.auto()  # the peer or its connection failed: go elsewhere, and suspect the peer
    LOST_BEHIND = enum.auto()  # what the peer depends on failed: go elsewhere
    DRAINING = enum.auto()  # the peer takes no new requests: go elsewhere
    GIVEN_BACK = enum.auto()  # a worker has more work than was believed: place the request again, on any worker
    FULL = enum.auto()  # the peer has no room: go elsewhere if possible
    NO_WORKER = enum.auto()  # a router has no worker that takes requests: wait for one
    UNKNOWN_MODEL = enum.auto()  # a router does not know the model: another one may
    FINAL = enum.auto()  # every peer would answer the same


# The verdicts by the reason that the peer gives. All other reasons are final.
AT_WORKERS: Mapping[Reason, Verdict] = {
    Reason.WORKER_LOST: Verdict.LOST_BEHIND,
    Reason.MODEL_CHANGED: Verdict.LOST_BEHIND,
    Reason.DRAINING: Verdict.DRAINING,
    Reason.GIVEN_BACK: Verdict.GIVEN_BACK,
    Reason.QUEUE_FULL: Verdict.FULL,
    Reason.NO_CAPACITY: Verdict.FULL,
}
# A router has already tried several workers, so its WORKER_LOST and MODEL_CHANGED are final.
AT_ROUTERS: Mapping[Reason, Verdict] = {
    Reason.DRAINING: Verdict.DRAINING,
    Reason.QUEUE_FULL: Verdict.FULL,
    Reason.NO_CAPACITY: Verdict.NO_WORKER,
    Reason.MODEL_NOT_FOUND: Verdict.UNKNOWN_MODEL,
}


def verdict_of(error: grpc.aio.AioRpcError, reasons: Mapping[Reason, Verdict]) -> Verdict:
    """The verdict on a failed call; `reasons` is `AT_WORKERS` or `AT_ROUTERS`. An error with our details comes from the
    peer, one without from the transport."""
    if is_peer_lost(error):
        return Verdict.LOST
    if details_of(error) is None:
        return Verdict.FINAL
    return reasons.get(error_of(error).reason, Verdict.FINAL)


class Attempts:
    """The attempts of one generation: counts them, and says whether there may be another one."""

    def __init__(self, max_in_vain: int, *, max_failed: int = MAX_FAILED, number: int = 0) -> None:
        """A generation may lose `max_in_vain` peers in a row without a token from any, and fail `max_failed` times in
        all. `number` is the number that its request had on arrival."""
        self.number = number
        """The number of the next attempt, for the peers. It stays the same as long as no peer accepts the request."""
        self.num_failed = 0
        self.num_in_vain = 0
        """Peers that were lost in a row without a token."""
        self._max_in_vain = max_in_vain
        self._max_failed = max_failed

    @property
    def are_left(self) -> bool:
        """Whether there may be another attempt."""
        return self.num_in_vain < self._max_in_vain and self.num_failed < self._max_failed

    def lost(self, *, progressed: bool) -> None:
        """Record that the peer was lost. `progressed`: it had delivered a token."""
        self.number += 1
        self.num_failed += 1
        self.num_in_vain = 1 if progressed else self.num_in_vain + 1

    def refused(self) -> None:
        """Record that the peer refused the request, and that another peer is tried."""
        self.number += 1
        self.num_failed += 1

    def moved(self, *, progressed: bool) -> None:
        """Record that the answer continues elsewhere, although the peer did not fail."""
        self.number += 1
        self.num_in_vain = 0 if progressed else self.num_in_vain + 1

    def waited(self, *, progressed: bool, has_begun: bool) -> None:
        """Record that the request waits for a peer. `has_begun`: some of its answer was delivered before."""
        self.number += has_begun
        if progressed:
            self.num_in_vain = 0
