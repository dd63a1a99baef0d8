"""Errors for HTTP clients, before a protocol gives them its format."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

from headrace.gateway.edge.wire import Shape, encode
from headrace.protos.status import Reason, StatusError

Headers = list[tuple[bytes, bytes]]

MIN_RETRY_AFTER_S = 1.0
RETRY_SPREAD = 0.5
"""Random extra part of Retry-After times."""
_RANDOM = random.Random()


class HttpError(Exception):
    """An error that exists only in HTTP and is not in the table of statuses."""

    def __init__(
        self, status: int, code: str, message: str, headers: Headers | None = None, param: str | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.headers = headers or []
        self.param = param


@dataclass(frozen=True, slots=True)
class Failure:
    """The HTTP form of an error."""

    status: int
    kind: str
    """OpenAI's type of error, such as `invalid_request_error`."""
    code: str | None
    """OpenAI's code, such as `model_not_found`."""
    message: str
    param: str | None
    """The field at fault, by the name that the caller used."""
    headers: Headers


class ErrorDetail(Shape):
    """The message and type of an error. `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class Error(Shape):
    """OpenAI's format of errors."""

    error: ErrorDetail


class ErrorShape(Protocol):
    """The error format of a protocol."""

    kind: ClassVar[Any] = Error
    """The type of an error response."""

    def status(self, failure: Failure) -> int:
        """The status of an error response."""
        return failure.status

    def whole(self, failure: Failure) -> bytes:
        """The body of an error response."""

    def event(self, failure: Failure) -> bytes:
        """The last events of a stream that had begun: by default a server-sent event with the error, which no chunk and
        no [DONE] may follow."""
        return b"data: " + self.whole(failure) + b"\n\n"


def spread(error: StatusError) -> StatusError:
    """The error with a Retry-After that is not too short and has jitter, so that clients do not all return at once.

    The time of a rate limit stays exact.
    """
    if error.row.http_status not in (429, 503) or error.reason is Reason.QUOTA:
        return error
    wait_s = max(error.retry_after_s or 0.0, MIN_RETRY_AFTER_S) * (1 + RETRY_SPREAD * _RANDOM.random())
    return StatusError(error.reason, error.message, field=error.field, retry_after_s=wait_s)


def failure_of(error: StatusError | HttpError) -> Failure:
    """The error as an HTTP client gets it."""
    if isinstance(error, HttpError):
        return Failure(error.status, "invalid_request_error", error.code, error.message, error.param, error.headers)
    row = error.row
    headers: Headers = []
    if row.http_status in (429, 503):
        told_s = spread(error).retry_after_s
        wait_s = MIN_RETRY_AFTER_S if told_s is None else told_s
        headers.append((b"retry-after", b"%d" % max(1, math.ceil(wait_s))))
        # OpenAI's own clients read this header first.
        headers.append((b"retry-after-ms", b"%d" % math.ceil(wait_s * 1000)))
    elif row.http_status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    return Failure(row.http_status, row.openai_type, row.openai_code, error.message, error.field, headers)


def draining() -> StatusError:
    """The error for requests that a stopping server does not finish."""
    return StatusError(Reason.DRAINING, "the gateway is stopping; try again", retry_after_s=1.0)


def detail_of(failure: Failure) -> ErrorDetail:
    """The `error` object of a failure."""
    return ErrorDetail(failure.message, failure.kind, failure.param, failure.code)


class _OpenAiErrors(ErrorShape):
    """OpenAI's error format."""

    def whole(self, failure: Failure) -> bytes:
        """The error object."""
        return encode(Error(detail_of(failure)))


OPENAI_ERRORS = _OpenAiErrors()
"""Also the format of errors outside of all protocols."""
