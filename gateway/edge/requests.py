"""Reads HTTP requests: the body, and the parameters in the query of the URL."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar
from urllib.parse import parse_qs

from headrace.gateway.checks import invalid
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import decode_body
from headrace.gateway.fields import FieldTable
from headrace.protos.status import Reason, StatusError

_MAX_PARAMETERS = 32
_T = TypeVar("_T")


async def request_of(exchange: Exchange, kind: type[_T], table: FieldTable) -> _T:
    """The request in the body, after `table` has checked its fields. The body itself is not kept: the answer may take
    long, and images are large. Raises `StatusError`."""
    body = await exchange.body()
    request = decode_body(body, kind)
    table.check(body)
    return request


def query_of(exchange: Exchange) -> dict[str, str]:
    """The last value of each parameter. Raises `StatusError` if there are too many."""
    return {name: given[-1] for name, given in _values(exchange).items()}


def texts_of(exchange: Exchange, name: str) -> list[str]:
    """All values of a parameter that is a list, given as NAME=A&NAME=B or NAME[]=A&NAME[]=B. Raises `StatusError` if
    there are too many."""
    values = _values(exchange)
    return [*values.get(name, ()), *values.get(f"{name}[]", ())]


def _values(exchange: Exchange) -> dict[str, list[str]]:
    try:
        return parse_qs(exchange.scope["query_string"].decode("latin-1"), max_num_fields=_MAX_PARAMETERS)
    except ValueError as error:
        raise StatusError(Reason.INVALID_FIELD, "the query has too many parameters") from error


def flag_of(query: Mapping[str, str], name: str) -> bool:
    """A parameter that is true or false; false by default. Raises `StatusError`."""
    text = query.get(name, "false")
    if text not in ("true", "false"):
        raise invalid(name, f"{name} must be true or false")
    return text == "true"


def number_of(query: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    """A parameter that is a number from `least` to `most`. Raises `StatusError`."""
    text = query.get(name)
    if text is None:
        return default
    digits = text.removeprefix("-")
    number = int(text) if digits.isascii() and digits.isdigit() and len(text) < 12 else None
    if number is None or not least <= number <= most:
        raise invalid(name, f"{name} must be a number from {least} to {most}")
    return number
