"""The states of a worker, and what its link does to the calls that run there."""

from __future__ import annotations

import enum
from typing import Protocol

from headrace.protos import router_pb2


class LinkState(enum.Enum):
    """The state of a worker, with the values of the protocol."""

    UNREACHABLE = router_pb2.WORKER_STATE_UNREACHABLE
    READY = router_pb2.WORKER_STATE_READY
    DRAINING = router_pb2.WORKER_STATE_DRAINING
    SUSPECT = router_pb2.WORKER_STATE_SUSPECT


class Abandonable(Protocol):
    """A running call that its link can abandon."""

    def abandon(self, why: str) -> None:
        """End the call. Its reader gets an error that the worker was lost."""
