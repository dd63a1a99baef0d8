"""The body of a new batch, and the fields of an upload, decoded and checked (pure)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal

import msgspec

from headrace.gateway.batches.records import BATCH_PURPOSE
from headrace.gateway.checks import invalid, unsupported

MIN_TTL_S = 3600
MAX_WINDOW_S = 7 * 24 * 3600
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 24 * 3600}
_WINDOW = re.compile(r"([1-9][0-9]{0,6})([smhd])")
_MAX_METADATA = 16


class ExpiresAfter(msgspec.Struct, kw_only=True):
    """When files are deleted."""

    anchor: Literal["created_at"]
    seconds: int


class CreateBatch(msgspec.Struct, kw_only=True):
    """Body of POST /v1/batches."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: ExpiresAfter | None = None


def window_s(text: str) -> int:
    """The seconds of a completion window, such as 24h. Raises `StatusError`."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        problem = "completion_window must be a time of at most 7d, such as 24h; units are s, m, h and d"
        raise invalid("completion_window", problem)
    return seconds


def check_metadata(metadata: Mapping[str, str] | None) -> None:
    """Raises `StatusError` if there is more metadata than OpenAI allows."""
    if metadata is None:
        return
    if len(metadata) > _MAX_METADATA or any(len(k) > 64 or len(v) > 512 for k, v in metadata.items()):
        limits = f"at most {_MAX_METADATA} pairs, with names of up to 64 characters and values of up to 512"
        raise invalid("metadata", f"metadata may have {limits}")


def ttl_s(expires: ExpiresAfter | None, field: str, retention_s: int) -> int | None:
    """For how long a file is kept; None by default. Raises `StatusError`."""
    if expires is None:
        return None
    least = min(MIN_TTL_S, retention_s)
    if not least <= expires.seconds <= retention_s:
        problem = f"{field}.seconds must be from {least} to {retention_s}, for which this server keeps files"
        raise invalid(f"{field}.seconds", problem)
    return expires.seconds


def upload_ttl_s(fields: Mapping[str, str], retention_s: int) -> int | None:
    """For how long an uploaded file is kept, by the fields of its form; None by default. Raises `StatusError`."""
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        raise invalid("expires_after[anchor]", "expires_after[anchor] must be created_at")
    if seconds is None or not seconds.isascii() or not seconds.isdigit() or len(seconds) > 10:
        raise invalid("expires_after[seconds]", "expires_after[seconds] must be a number of seconds")
    return ttl_s(ExpiresAfter(anchor="created_at", seconds=int(seconds)), "expires_after", retention_s)


def check_purpose(purpose: str | None) -> None:
    """Raises `StatusError` unless files of this purpose are taken."""
    if purpose is None:
        raise invalid("purpose", "purpose is required; it must be batch")
    if purpose != BATCH_PURPOSE:
        problem = f"purpose {purpose[:50]!r} is not supported: files are for batches here; send purpose=batch"
        raise unsupported("purpose", problem)
