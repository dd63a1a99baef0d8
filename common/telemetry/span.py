"""A span: one part of the processing of a request. `tracing` makes spans that record."""

from __future__ import annotations

import asyncio
import enum
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Self, TypeAlias

TRACEPARENT_KEY = "traceparent"
"""gRPC metadata key and HTTP header of a trace's context."""

Attributes: TypeAlias = Mapping[str, str | bool | int | float | Sequence[str]]
Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]


class SpanKind(enum.Enum):
    """The side of a call that a span describes."""

    SERVER = enum.auto()
    CLIENT = enum.auto()
    INTERNAL = enum.auto()


class Span:
    """One part of the processing of a request. This one records nothing. Times are monotonic seconds, None for now.

    As a context manager it ends with the block, as failed if the block raises.
    """

    __slots__ = ()

    @property
    def is_recording(self) -> bool:
        """Whether the span's attributes are recorded."""
        return False

    @property
    def traceparent(self) -> str:
        """The trace context for calls under this span; empty if it has none."""
        return ""

    def child(
        self,
        name: str,
        attributes: Attributes | None = None,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        start_s: float | None = None,
    ) -> Span:
        """A child of this span. The caller ends it."""
        return self

    def set(self, attributes: Attributes) -> None:
        """Add attributes to the span, or replace those of the same names."""

    def add(self, name: str, number: int) -> None:
        """Add to an attribute that is a number, 0 at first."""

    def append(self, name: str, text: str) -> None:
        """Add to an attribute that is a list of texts, empty at first."""

    def event(self, name: str, attributes: Attributes | None = None, *, at_s: float | None = None) -> None:
        """Record an event `name` within the span, at `at_s` (seconds of the monotonic clock); None for now."""

    def fail(self, error_type: str, message: str = "") -> None:
        """Mark the span as failed, with a reason from a small set such as `queue_full`."""

    def end(self, *, end_s: float | None = None) -> None:
        """End the span at `end_s` (seconds of the monotonic clock), or now. Later changes are ignored."""

    def onto(self, metadata: Metadata) -> tuple[tuple[str, str | bytes], ...]:
        """The metadata of a call that is made within this span: `metadata`, and what names the span to the server."""
        if not self.traceparent:
            return tuple(metadata)
        others = tuple((key, value) for key, value in metadata if key != TRACEPARENT_KEY)
        return (*others, (TRACEPARENT_KEY, self.traceparent))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        # Return early if nothing is recorded, because every request passes here.
        if error is not None and self.is_recording:
            if isinstance(error, (asyncio.CancelledError, GeneratorExit)):
                self.set({"headrace.cancelled": True})
            else:
                reason = getattr(error, "reason", None)
                named = reason.name.lower() if isinstance(reason, enum.Enum) else type(error).__name__.strip("_")
                self.fail(named, str(error))
        self.end()


NO_SPAN = Span()
