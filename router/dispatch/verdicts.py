"""Decides the consequence of a failed call to a worker for its request (pure)."""

from __future__ import annotations

import enum

import grpc

from headrace.protos.status import Reason, details_of, error_of, is_peer_lost


class Verdict(enum.Enum):
    """The consequence of a failed call to a worker for its request."""

    LOST = enum.auto()  # the worker or its connection failed: go elsewhere, and suspect the worker
    LOST_BEHIND = enum.auto()  # a service that it depends on failed: go elsewhere
    DRAINING = enum.auto()  # it takes no requests: go elsewhere
    GIVEN_BACK = enum.auto()  # it has more work than was believed: place the request again, on any worker
    FULL = enum.auto()  # it has no room: go elsewhere if possible
    FINAL = enum.auto()  # every worker would answer the same


def verdict_of(error: grpc.aio.AioRpcError) -> Verdict:
    """Classify a failed call. An error with our details comes from a worker; one without comes from the transport."""
    if is_peer_lost(error):
        return Verdict.LOST
    if details_of(error) is None:
        return Verdict.FINAL
    by_reason = {
        Reason.WORKER_LOST: Verdict.LOST_BEHIND,
        Reason.MODEL_CHANGED: Verdict.LOST_BEHIND,
        Reason.DRAINING: Verdict.DRAINING,
        Reason.GIVEN_BACK: Verdict.GIVEN_BACK,
        Reason.QUEUE_FULL: Verdict.FULL,
        Reason.NO_CAPACITY: Verdict.FULL,
    }
    return by_reason.get(error_of(error).reason, Verdict.FINAL)


def was_reached(error: grpc.aio.AioRpcError) -> bool:
    """Whether a lost worker may have received the call. It has not if the connection could not be made."""
    return "ailed to connect" not in (error.details() or "")
