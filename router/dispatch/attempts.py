"""How an attempt at a worker ends without a finish, and the running call of an attempt."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import grpc

from headrace.common.transport.sessions import Call
from headrace.protos import worker_pb2

Metadata = Sequence[tuple[str, str | bytes]]


class UpstreamError(Exception):
    """A worker's own error, which is passed on unchanged."""

    def __init__(self, error: grpc.aio.AioRpcError) -> None:
        super().__init__(error.details())
        self.code = error.code()
        self.details = error.details() or ""
        self.trailing_metadata = tuple(cast("Metadata", tuple(error.trailing_metadata() or ())))


class AttemptFailedError(Exception):
    """This worker will not finish the request, but another one may. `refusal` says why the worker did not take it,
    `full` or `draining`; it is empty if the worker was lost. `passed_on` is the worker's own error, for the case that
    there is no other worker."""

    def __init__(self, why: str, refusal: str = "", passed_on: UpstreamError | None = None) -> None:
        super().__init__(why)
        self.refusal = refusal
        self.passed_on = passed_on


class GivenBackError(Exception):
    """The worker has more work than was believed when the request was placed there."""


class PrefilledError(Exception):
    """The worker has computed the prompt, and the answer continues at another worker."""


class OutgrownError(Exception):
    """The answer has reached the end of the worker's context, and continues at a worker with a longer one."""


class EndOfContextError(Exception):
    """The answer has reached the end of the longest context of all workers, that of `card`."""

    def __init__(self, card: worker_pb2.ModelCard) -> None:
        super().__init__()
        self.card = card


class RunningCall:
    """A running call to a worker, which its link may abandon."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self.abandoned_because: str | None = None

    def abandon(self, why: str) -> None:
        """End the call. The reader gets the reason."""
        self.abandoned_because = why
        self._call.cancel()
