"""One call over gRPC: who makes it, its outcome in metrics and spans, and its failure as a status."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeAlias, TypeVar

import grpc

from headrace.common.telemetry.logs import request_id_of, request_id_var
from headrace.common.telemetry.tracing import serving_span
from headrace.gateway.access.caller import Caller, authorization_var
from headrace.gateway.edge.failures import draining, spread
from headrace.gateway.hints import Hints, hints_var
from headrace.gateway.telemetry.metrics import Metrics, outcome_of
from headrace.protos.status import Reason, StatusError, abort

_LOG = logging.getLogger(__name__)

_M = TypeVar("_M")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class GrpcCalls:
    """Runs the calls of one service."""

    def __init__(self, service: str, metrics: Metrics) -> None:
        """`service` is its name with its package."""
        self._service = service
        self._metrics = metrics
        self.stopping = False
        """Set when the server stops: new calls are refused."""

    async def answered(self, work: Callable[[], Awaitable[_M]], name: str, method: str, context: Context) -> _M:
        """The one message of a call that streams nothing. `name` is the call's name in metrics."""

        async def once() -> AsyncGenerator[_M, None]:
            yield await work()

        # To its end: a call that is left before counts as cancelled.
        (message,) = [one async for one in self.streamed(once(), name, method, caller_of(context), context)]
        return message

    async def streamed(
        self, answers: AsyncGenerator[_M, None], name: str, method: str, caller: Caller, context: Context
    ) -> AsyncGenerator[_M, None]:
        """The messages of a call; a failure ends it with its status. Their metadata names what had no effect."""
        hints = Hints()
        hints_var.set(hints)
        try:
            async with aclosing(self.counted(answers, name, method, caller)) as messages:
                is_first = True
                async for message in messages:
                    if is_first and (found := hints.headers()):
                        await context.send_initial_metadata([(key.decode(), value) for key, value in found])
                    is_first = False
                    yield message
        except StatusError as error:
            await abort(context, spread(error))

    async def counted(
        self, answers: AsyncGenerator[_M, None], name: str, method: str, caller: Caller
    ) -> AsyncGenerator[_M, None]:
        """The messages, with their outcome counted. Every failure is raised as a `StatusError`."""
        request_id_var.set(caller.request_id)
        with self._outcome(name, method, caller) as outcome:
            try:
                if self.stopping:
                    raise draining()
                async with aclosing(answers):
                    async for answer in answers:
                        yield answer
                outcome[0] = "ok"
            except StatusError as error:
                outcome[0] = outcome_of(error, has_deadline=caller.deadline_s is not None)
                raise
            except Exception as error:
                outcome[0] = "internal"
                _LOG.exception("%s failed", name)
                raise StatusError(Reason.INTERNAL, f"the gateway failed: {type(error).__name__}") from error

    @contextmanager
    def _outcome(self, name: str, method: str, caller: Caller) -> Iterator[list[str]]:
        """Count a call under the outcome that is left in the list; calls that are cut off are cancelled."""
        outcome = ["cancelled"]
        span = serving_span(f"{self._service}/{method}", caller.traceparent)
        span.set({"rpc.system": "grpc", "headrace.request_id": caller.request_id})
        self._metrics.in_flight.inc()
        try:
            yield outcome
        finally:
            span.set({"headrace.outcome": outcome[0]})
            span.end()
            self._metrics.in_flight.dec()
            self._metrics.request_ended(name, outcome[0], time.monotonic() - caller.arrived_s)


def caller_of(context: Context) -> Caller:
    """The caller of a call, from its metadata and deadline."""
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    request_id = request_id_of(context.invocation_metadata()) or f"req_{secrets.token_hex(16)}"
    now_s = time.monotonic()
    remaining_s = context.time_remaining()
    deadline_s = None if remaining_s is None else now_s + remaining_s
    return Caller(request_id, metadata.get("traceparent", ""), now_s, authorization_var.get(), deadline_s)
