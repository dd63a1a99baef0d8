"""Errors that name the wrong field."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from headrace.protos.status import Reason, StatusError

MAX_NESTING = 256
"""Levels of arrays and objects in the JSON of a request. Code that follows a value recursively needs fewer than three
frames for a level, and Python has 1,000."""
MAX_ECHO_CHARS = 64
"""How much of a caller's own words an error repeats."""
_STEPS = tuple(1 if byte in b"[{" else -1 if byte in b"]}" else 0 for byte in range(256))
_NO_MARKS = bytes(byte for byte in range(256) if not _STEPS[byte] and byte != ord('"'))


def invalid(field_name: str, message: str) -> StatusError:
    """The error for a bad value of a field."""
    return StatusError(Reason.INVALID_FIELD, message, field=field_name)


def unsupported(name: str, message: str) -> StatusError:
    """The error for a known field that is not supported."""
    return StatusError(Reason.UNSUPPORTED, message, field=name)


def check_range(name: str, value: float, least: float, greatest: float, open_below: bool = False) -> None:
    """Raise `StatusError` unless the value is finite and from `least` (excluded if `open_below`) to `greatest`."""
    # An integer may be too large to be a float.
    is_finite = isinstance(value, int) or math.isfinite(value)
    if not is_finite or value < least or value > greatest or (open_below and value == least):
        bound = f"over {shown(least)}" if open_below else f"at least {shown(least)}"
        raise invalid(name, f"{name} must be {bound} and at most {shown(greatest)}")


def shown(number: float) -> str:
    """The number as people write it: 2147483647 and 0.5, not 2.14748e+09 and 5e-01."""
    if isinstance(number, int) or number.is_integer():
        return str(int(number))
    return f"{number:.10f}".rstrip("0") if abs(number) >= 1e-9 else f"{number:g}"


def is_one_of(value: object, values: Iterable[object]) -> bool:
    """Whether the value equals one of these in JSON: 1.0 equals 1, but true does not."""
    is_bool = isinstance(value, bool)
    return any(value == one and isinstance(one, bool) is is_bool for one in values)


def texts_or_tokens(name: str, given: str | list[Any]) -> list[str | list[int]]:
    """The prompts or texts of a field, each a text or its tokens. Raises `StatusError`."""
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(entry, int) for entry in given):
        return [given]
    if all(isinstance(entry, str) for entry in given) or all(isinstance(entry, list) for entry in given):
        return given
    raise invalid(name, f"{name} must be a text, a list of texts, a list of tokens or a list of lists of tokens")


def text_in(where: str, members: Mapping[str, Any], name: str) -> str:
    """A text in the object at `where`. Raises `StatusError` if it is missing or something else."""
    value = members.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", f"{where}.{name} must be a text")
    return value


def optional_text_in(where: str, members: Mapping[str, Any], name: str) -> str | None:
    """As `text_in`, for a text that may be missing or null."""
    return None if members.get(name) is None else text_in(where, members, name)


def json_of(name: str, text: str) -> Any:
    """The value of a field that is JSON text. Raises `StatusError`."""
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise invalid(name, f"{name} is not JSON: {error}") from error
    if nests_too_deeply(text.encode()):
        raise invalid(name, f"{name} is nested too deeply, more than {MAX_NESTING} levels")
    return value


def nests_too_deeply(raw: bytes) -> bool:
    """Whether valid JSON has more than `MAX_NESTING` levels of arrays and objects."""
    if raw.count(b"{") + raw.count(b"[") <= MAX_NESTING:
        return False
    # Without escaped quotes, each quote begins or ends a string.
    marks = raw.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, _NO_MARKS)
    brackets = b"".join(marks.split(b'"')[::2])
    return max(itertools.accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MAX_NESTING
