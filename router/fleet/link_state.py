"""The states of a worker, the reasons why it is lost, and the calls that its link can abandon."""

from __future__ import annotations

import enum
import logging
from typing import Protocol

import grpc

from headrace.protos import router_pb2

log = logging.getLogger(__name__)


class OutOfStepError(Exception):
    """The worker's reports are out of sequence, so the watch must start again."""


class SilentError(OutOfStepError):
    """The worker has been silent for too long."""


def is_silence(error: Exception) -> bool:
    """Whether a watch ended because no message arrived, not because a connection was refused or closed."""
    if isinstance(error, grpc.aio.AioRpcError):
        return error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return isinstance(error, SilentError)


def reason_of(error: Exception, worker_id: str) -> str:
    """Why a watch ended, in words. Logs unexpected exceptions."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, OutOfStepError):
        return str(error)
    log.exception("the link to worker %s failed; reconnecting", worker_id)
    return f"the link to it failed: {type(error).__name__}"


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
