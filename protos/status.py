"""The table that maps each domain error to a gRPC status with details, and to an HTTP status with an OpenAI error.

Every failure that leaves a headrace process is a `StatusError`. Over gRPC it becomes a status with google.rpc details:
always ErrorInfo, BadRequest if a field is wrong, and RetryInfo if a later retry may succeed. Over HTTP, the gateway
uses the same row for status code, error type and error code.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2, status_pb2

DOMAIN = "headrace"
DETAILS_KEY = "grpc-status-details-bin"
"""The key in the trailing metadata under which gRPC sends the details of a status."""
MAX_MESSAGE_BYTES = 1000
MAX_FIELD_BYTES = 250
"""A status contains its message three times, once with three characters for a byte, and its field. gRPC clients refuse
a status with headers of more than 8 KiB, and then do not see the error."""

_Detail = TypeVar("_Detail", bound=Message)


class Reason(enum.Enum):
    """Why a request failed. The name is the `reason` of the ErrorInfo."""

    INVALID_FIELD = enum.auto()
    CONTEXT_TOO_LONG = enum.auto()
    UNSUPPORTED = enum.auto()
    UNAUTHENTICATED = enum.auto()
    PERMISSION_DENIED = enum.auto()
    MODEL_NOT_FOUND = enum.auto()
    NOT_FOUND = enum.auto()
    QUOTA = enum.auto()
    QUEUE_FULL = enum.auto()
    TOO_LARGE_FOR_CACHE = enum.auto()
    NO_CAPACITY = enum.auto()
    MODEL_NOT_LOADED = enum.auto()
    GIVEN_BACK = enum.auto()
    DRAINING = enum.auto()
    WORKER_LOST = enum.auto()
    MODEL_CHANGED = enum.auto()
    DEADLINE = enum.auto()
    CANCELLED = enum.auto()
    SCHEMA_VIOLATED = enum.auto()
    INTERNAL = enum.auto()


@dataclass(frozen=True, slots=True)
class StatusRow:
    """What a reason is in gRPC and in HTTP: status codes, and the kind of error."""

    grpc_code: grpc.StatusCode
    http_status: int
    openai_type: str
    openai_code: str | None


_Code = grpc.StatusCode
TABLE: dict[Reason, StatusRow] = {
    Reason.INVALID_FIELD: StatusRow(_Code.INVALID_ARGUMENT, 400, "invalid_request_error", None),
    Reason.CONTEXT_TOO_LONG: StatusRow(_Code.INVALID_ARGUMENT, 400, "invalid_request_error", "context_length_exceeded"),
    Reason.UNSUPPORTED: StatusRow(_Code.UNIMPLEMENTED, 400, "invalid_request_error", "unsupported"),
    Reason.UNAUTHENTICATED: StatusRow(_Code.UNAUTHENTICATED, 401, "authentication_error", "invalid_api_key"),
    Reason.PERMISSION_DENIED: StatusRow(_Code.PERMISSION_DENIED, 403, "permission_error", "permission_denied"),
    Reason.MODEL_NOT_FOUND: StatusRow(_Code.NOT_FOUND, 404, "invalid_request_error", "model_not_found"),
    Reason.NOT_FOUND: StatusRow(_Code.NOT_FOUND, 404, "invalid_request_error", "not_found"),
    Reason.QUOTA: StatusRow(_Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "rate_limit_exceeded"),
    Reason.QUEUE_FULL: StatusRow(_Code.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "queue_full"),
    Reason.TOO_LARGE_FOR_CACHE: StatusRow(
        _Code.INVALID_ARGUMENT, 400, "invalid_request_error", "context_length_exceeded"
    ),
    Reason.NO_CAPACITY: StatusRow(_Code.UNAVAILABLE, 503, "server_error", "no_capacity"),
    Reason.MODEL_NOT_LOADED: StatusRow(_Code.UNAVAILABLE, 503, "server_error", "model_not_loaded"),
    # Used only between worker and router: the router places such a request again.
    Reason.GIVEN_BACK: StatusRow(_Code.ABORTED, 503, "server_error", "given_back"),
    Reason.DRAINING: StatusRow(_Code.UNAVAILABLE, 503, "server_error", "draining"),
    Reason.WORKER_LOST: StatusRow(_Code.UNAVAILABLE, 503, "server_error", "worker_lost"),
    Reason.MODEL_CHANGED: StatusRow(_Code.UNAVAILABLE, 503, "server_error", "model_changed"),
    Reason.DEADLINE: StatusRow(_Code.DEADLINE_EXCEEDED, 504, "timeout_error", "deadline_exceeded"),
    Reason.CANCELLED: StatusRow(_Code.CANCELLED, 499, "invalid_request_error", "cancelled"),
    # Not a 5xx: clients would repeat the request unasked.
    Reason.SCHEMA_VIOLATED: StatusRow(_Code.FAILED_PRECONDITION, 422, "invalid_request_error", "schema_violated"),
    Reason.INTERNAL: StatusRow(_Code.INTERNAL, 500, "server_error", "internal_error"),
}

# The reason for a status without our ErrorInfo, which comes from the transport or from a foreign server.
_REASON_OF_BARE_CODE: dict[grpc.StatusCode, Reason] = {
    _Code.INVALID_ARGUMENT: Reason.INVALID_FIELD,
    _Code.OUT_OF_RANGE: Reason.INVALID_FIELD,
    _Code.UNIMPLEMENTED: Reason.UNSUPPORTED,
    _Code.UNAUTHENTICATED: Reason.UNAUTHENTICATED,
    _Code.PERMISSION_DENIED: Reason.PERMISSION_DENIED,
    _Code.NOT_FOUND: Reason.NOT_FOUND,
    _Code.RESOURCE_EXHAUSTED: Reason.QUEUE_FULL,
    _Code.UNAVAILABLE: Reason.WORKER_LOST,
    _Code.DEADLINE_EXCEEDED: Reason.DEADLINE,
    _Code.CANCELLED: Reason.CANCELLED,
}

# Statuses that gRPC creates when a connection or a server is lost during a call. The ambiguous ones count only with one
# of the messages.
_LOST_CODES = frozenset({_Code.UNAVAILABLE, _Code.CANCELLED})
_AMBIGUOUS_CODES = frozenset({_Code.INTERNAL, _Code.UNKNOWN})
_LOST_MESSAGES = ("RST_STREAM", "Stream removed", "GOAWAY", "Socket closed", "Connection reset")


class StatusError(Exception):
    """A failure with a status for the caller.

    `field` is the request field at fault, under the name that the caller used. `retry_after_s` is the time in seconds
    after which the same request may succeed. `detail` is an additional message for the calling program; see
    `detail_of`.
    """

    def __init__(
        self,
        reason: Reason,
        message: str,
        *,
        field: str | None = None,
        retry_after_s: float | None = None,
        detail: Message | None = None,
    ) -> None:
        message = _shortened(message, MAX_MESSAGE_BYTES)
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.field = None if field is None else _shortened(field, MAX_FIELD_BYTES)
        self.retry_after_s = retry_after_s
        self.detail = detail

    @property
    def row(self) -> StatusRow:
        """What this error's reason is in gRPC and in HTTP."""
        return TABLE[self.reason]

    def to_status(self) -> status_pb2.Status:
        """The google.rpc.Status, including its details."""
        packed = [_packed(error_details_pb2.ErrorInfo(reason=self.reason.name, domain=DOMAIN))]
        if self.field is not None:
            violation = error_details_pb2.BadRequest.FieldViolation(field=self.field, description=self.message)
            packed.append(_packed(error_details_pb2.BadRequest(field_violations=[violation])))
        if self.retry_after_s is not None:
            nanos = math.ceil(self.retry_after_s * 1e9)
            delay = Duration(seconds=nanos // 1_000_000_000, nanos=nanos % 1_000_000_000)
            packed.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
        if self.detail is not None:
            packed.append(_packed(self.detail))
        return status_pb2.Status(code=self.row.grpc_code.value[0], message=self.message, details=packed)

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        """The trailing metadata of gRPC that has the error's details (google.rpc.Status)."""
        return ((DETAILS_KEY, self.to_status().SerializeToString()),)


def _shortened(text: str, most: int) -> str:
    """The text, or as much of its beginning as has `most` bytes with the ellipsis that follows."""
    raw = text.encode(errors="replace")
    return raw.decode() if len(raw) <= most else raw[: most - 3].decode(errors="ignore") + "…"


def _packed(message: Message) -> AnyMessage:
    box = AnyMessage()
    box.Pack(message)
    return box


class _Context(Protocol):
    """A call that can be ended with an error."""

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: tuple[tuple[str, str | bytes], ...] = ()
    ) -> NoReturn: ...


async def abort(context: grpc.aio.ServicerContext[Any, Any] | _Context, error: StatusError) -> NoReturn:
    """End the call with the error's status and details. Raises, so it does not return."""
    await context.abort(error.row.grpc_code, error.message, error.trailing_metadata())
    raise AssertionError("abort returned")


def error_of(rpc_error: grpc.RpcError) -> StatusError:
    """Convert a failed call to a domain error: the exact one if the server sent it, otherwise by its status code."""
    code: grpc.StatusCode = rpc_error.code()
    raw = details_of(rpc_error)
    parsed = None if raw is None else _error_of_details(raw)
    if parsed is not None:
        return parsed
    return StatusError(_REASON_OF_BARE_CODE.get(code, Reason.INTERNAL), rpc_error.details() or code.name)


def details_of(rpc_error: grpc.RpcError) -> bytes | None:
    """The serialized google.rpc.Status of a failed call; None if there is none."""
    for metadatum in rpc_error.trailing_metadata() or ():
        key, value = cast("tuple[str, str | bytes]", metadatum)
        if key == DETAILS_KEY and isinstance(value, bytes):
            return value
    return None


def detail_of(rpc_error: grpc.RpcError, kind: type[_Detail]) -> _Detail | None:
    """The detail of type `kind` of a failed call; None if there is none."""
    for box in status_pb2.Status.FromString(details_of(rpc_error) or b"").details:
        detail = kind()
        if box.Unpack(detail):
            return detail
    return None


def is_peer_lost(rpc_error: grpc.RpcError) -> bool:
    """Whether a call failed because its connection or the process at the other end was lost.

    The failure then says nothing about the request, which may succeed elsewhere. A status with details comes from a
    headrace server and never counts, regardless of its code.
    """
    if details_of(rpc_error) is not None:
        return False
    if rpc_error.code() in _LOST_CODES:
        return True
    message = rpc_error.details() or ""
    return rpc_error.code() in _AMBIGUOUS_CODES and any(words in message for words in _LOST_MESSAGES)


def _error_of_details(raw: bytes) -> StatusError | None:
    status = status_pb2.Status.FromString(raw)
    reason: Reason | None = None
    field: str | None = None
    retry_after_s: float | None = None
    for box in status.details:
        if box.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            box.Unpack(info)
            if info.domain == DOMAIN and info.reason in Reason.__members__:
                reason = Reason[info.reason]
        elif box.Is(error_details_pb2.BadRequest.DESCRIPTOR):
            bad = error_details_pb2.BadRequest()
            box.Unpack(bad)
            field = bad.field_violations[0].field if bad.field_violations else None
        elif box.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            box.Unpack(retry)
            retry_after_s = retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9
    return None if reason is None else StatusError(reason, status.message, field=field, retry_after_s=retry_after_s)
