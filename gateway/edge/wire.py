"""JSON in and out (pure)."""

from __future__ import annotations

import codecs
import json
import re
import secrets
from typing import Any, TypeVar

import msgspec

from headrace.gateway.checks import MAX_NESTING, invalid, nests_too_deeply
from headrace.protos.status import Reason, StatusError

encode = msgspec.json.encode
_PADDED_CHARS = 32
_T = TypeVar("_T")
_AT_FIELD = re.compile(r" - at (?P<key>`key` in )?`(?P<path>[^`]*)`$")
# A message may have the whole value of a caller: its end names the field, its beginning says what is wrong.
_MAX_PATH_CHARS = 4096
_MAX_WHAT_CHARS = 4096
_FLOAT_FOR_INT = "Expected `int"
_BYTE = re.compile(r"\(byte (\d+)\)")


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    """An object of an answer. Fields that are UNSET are left out; all others are there, whatever their value."""


def decode_body(raw: bytes, kind: type[_T]) -> _T:
    """The request in a body. Whole numbers may be written as 40.0, as some languages write all numbers.

    Raises `StatusError` with the position of malformed JSON or the field of a wrong type.
    """
    try:
        body = _decoded(raw, kind)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from error
    except msgspec.DecodeError as error:
        raise StatusError(Reason.INVALID_FIELD, f"the body is not valid JSON: {_position(raw, str(error))}") from error
    except UnicodeDecodeError as error:
        where = f"invalid UTF-8 in a string: {error.reason}"
        raise StatusError(Reason.INVALID_FIELD, f"the body is not valid JSON: {where}") from error
    except RecursionError as error:
        raise _nested_too_deeply() from error
    if nests_too_deeply(raw):
        raise _nested_too_deeply()
    return body


def _decoded(raw: bytes, kind: type[_T]) -> _T:
    try:
        return msgspec.json.decode(raw, type=kind)
    except msgspec.ValidationError as error:
        if not str(error).startswith(_FLOAT_FOR_INT):
            raise
        value = msgspec.json.decode(raw)
        if nests_too_deeply(raw):
            raise
        return msgspec.json.decode(encode(_with_whole_numbers(value)), type=kind)


def _with_whole_numbers(value: Any) -> Any:
    """The JSON value with 40 in place of 40.0, which are equal in JSON."""
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) < 2**63 else value
    if isinstance(value, list):
        return [_with_whole_numbers(one) for one in value]
    if isinstance(value, dict):
        return {name: _with_whole_numbers(one) for name, one in value.items()}
    return value


def _nested_too_deeply() -> StatusError:
    return StatusError(Reason.INVALID_FIELD, f"the body is nested too deeply, more than {MAX_NESTING} levels")


def convert(value: object, kind: type[_T], name: str = "", *, strict: bool = False) -> _T:
    """Convert a JSON value to this type. Unless `strict`, numbers and booleans may be texts. `name` is its field.

    Raises `StatusError` with the field of a wrong type.
    """
    try:
        return msgspec.convert(value, kind, strict=strict)
    except msgspec.ValidationError as error:
        found = _wrong_type(str(error))
        raise invalid(name, f"{name}: {found.message}") if name and found.field is None else found from error


def _wrong_type(message: str) -> StatusError:
    found = _AT_FIELD.search(message, max(0, len(message) - _MAX_PATH_CHARS))
    path = "" if found is None else found["path"].removeprefix("$").removeprefix(".")
    what = message[: len(message) if found is None else found.start()][:_MAX_WHAT_CHARS].replace("`", "'")
    missing = re.search(r"missing required field '([^']+)'", what)
    if missing is not None:
        path = f"{path}.{missing[1]}".removeprefix(".")
        return invalid(path, f"{path} is required")
    if path:
        place = f"{path}, a key" if found is not None and found["key"] else path
        return invalid(path, f"{place}: {what[:1].lower()}{what[1:]}")
    return StatusError(Reason.INVALID_FIELD, f"the body is not a request: {what[:1].lower()}{what[1:]}")


def _position(raw: bytes, message: str) -> str:
    """The decoder's message with the position of the error."""
    if not raw.strip():
        return "it is empty (byte 0)"
    if raw.startswith((codecs.BOM_UTF8, codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "it begins with a byte order mark; send UTF-8 without one (byte 0)"
    if _BYTE.search(message):
        return message
    try:
        json.loads(raw)
    except json.JSONDecodeError as error:
        return f"{error.msg} (byte {len(error.doc[: error.pos].encode())})"
    except (ValueError, RecursionError):  # other errors: invalid UTF-8, or a number with thousands of digits
        return message
    return "a string has half of a surrogate pair"


def padding(num_chars: int) -> str:
    """Random letters that pad a delta of `num_chars` characters to one of a few lengths."""
    return secrets.token_hex(_PADDED_CHARS)[: -num_chars % _PADDED_CHARS]
