"""Files and batches as the API shows them and as the store keeps them (pure)."""

from __future__ import annotations

import hashlib
import secrets
import time
from typing import Any, Literal

import msgspec

from headrace.gateway.edge.wire import Shape

BatchStatus = Literal[
    "validating",
    "failed",
    "in_progress",
    "finalizing",
    "completed",
    "expired",
    "cancelling",
    "cancelled",
]
BATCH_PURPOSE = "batch"
OUTPUT_PURPOSE = "batch_output"


class FileObject(Shape, kw_only=True):
    """A file. Times are in seconds of Unix time."""

    id: str
    object: Literal["file"] = "file"
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"] = "processed"
    status_details: None = None


class DeletedFile(Shape, kw_only=True):
    """The answer to a deletion."""

    id: str
    object: Literal["file"] = "file"
    deleted: bool = True


class FileList(Shape, kw_only=True):
    """A page of files."""

    object: Literal["list"] = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class LineError(Shape, kw_only=True):
    """What is wrong with a line of the input file; `line` counts from 1."""

    code: str
    line: int | None
    message: str
    param: str | None = None


class LineErrors(Shape, kw_only=True):
    """What is wrong with an input file."""

    object: Literal["list"] = "list"
    data: list[LineError]


class RequestCounts(Shape, kw_only=True):
    """Lines by their state."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Shape, kw_only=True):
    """A batch. Times are in seconds of Unix time."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: str
    model: str | None = None
    """The model of all lines; null if they name several."""
    errors: LineErrors | None = None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    in_progress_at: int | None = None
    expires_at: int
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    metadata: dict[str, str] | None = None


class BatchList(Shape, kw_only=True):
    """A page of batches."""

    object: Literal["list"] = "list"
    data: list[Batch]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch as it was created. It is never changed: what happens to the batch is in objects beside it."""

    id: str
    tenant: str
    key_id: str
    """The id of the key with which it was created; empty without keys."""
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    output_ttl_s: int
    """For how long the files of output and errors are kept."""
    metadata: dict[str, str] | None = None


class PlanSummary(msgspec.Struct, kw_only=True):
    """What the check of an input file has found."""

    at: int
    num_lines: int = 0
    model: str | None = None
    errors: list[LineError] = []


def tenant_folder(tenant: str) -> str:
    """The folder of a tenant. A name may have any character, so this is its hash."""
    return f"tenants/{hashlib.sha256(tenant.encode()).hexdigest()[:32]}"


def new_id(kind: str) -> str:
    """A new id, such as file-..., which sorts by time and cannot be guessed."""
    return f"{kind}{time.time_ns() // 1_000_000:011x}{secrets.token_hex(10)}"


def now_s() -> int:
    """Unix time in seconds."""
    return int(time.time())


def row_of_answer(batch_id: str, custom_id: str, request_id: str, status: int, body: bytes) -> bytes:
    """The line of output for an answer, an error of the endpoint among them. `body` is JSON."""
    response = _Response(status_code=status, request_id=request_id, body=msgspec.Raw(body))
    return _ENCODER.encode(_Row(id=_row_id(batch_id, custom_id), custom_id=custom_id, response=response, error=None))


def row_of_error(batch_id: str, custom_id: str, code: str, message: str) -> bytes:
    """The line of errors for a line that was not answered."""
    error = {"code": code, "message": message}
    return _ENCODER.encode(_Row(id=_row_id(batch_id, custom_id), custom_id=custom_id, response=None, error=error))


class _Response(Shape, kw_only=True):
    status_code: int
    request_id: str
    body: msgspec.Raw


class _Row(Shape, kw_only=True):
    id: str
    custom_id: str
    response: _Response | None
    error: dict[str, Any] | None


_ENCODER = msgspec.json.Encoder()


def _row_id(batch_id: str, custom_id: str) -> str:
    """The id of a line's answer. The same batch and `custom_id` always give the same id."""
    return f"batch_req_{hashlib.sha256(f'{batch_id} {custom_id}'.encode()).hexdigest()[:32]}"
