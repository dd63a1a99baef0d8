"""What a server does with each field of an API: the table from which checks and docs/reference/fields.md follow (pure).

The API's own provider and other servers take many fields. Each one that is known here is applied, taken as a hint, or
refused by name with what to use instead.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from headrace.gateway.checks import is_one_of, unsupported
from headrace.gateway.hints import ignored


@dataclass(frozen=True, slots=True)
class Applied:
    """The field has its effect."""

    values: str
    """In Markdown."""
    meaning: str = ""
    """In Markdown."""
    neutral: tuple[Any, ...] | None = None
    """Values besides null that ask for nothing, so that endpoints without the field take them. None: all have it."""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """Keywords of JSON Schema for the value, by which the OpenAPI document shows what the checks allow."""


@dataclass(frozen=True, slots=True)
class Hint:
    """The field is taken without effect, which the caller cannot notice in the answer."""

    why: str
    neutral: tuple[Any, ...] = ()
    """Values besides null that ask for nothing, so that they are not named."""


@dataclass(frozen=True, slots=True)
class Refused:
    """The field would change the answer, and this server cannot apply it."""

    instead: str
    """What to do, such as "use max_tokens"."""
    neutral: tuple[Any, ...] = ()
    """Values besides null that change nothing."""


Row: TypeAlias = Applied | Hint | Refused


class FieldTable:
    """The fields of a request's body at its top level, or inside of one object."""

    def __init__(
        self,
        api: str,
        bodies: Iterable[type[msgspec.Struct]],
        rows: Mapping[str, Row],
        members: Mapping[str, FieldTable] | None = None,
    ) -> None:
        """`bodies` are the types into which the body is decoded: their fields without a row are applied. A name with
        dots describes a field inside of another, for the documentation. `members` are the tables of objects inside."""
        self.api = api
        """The method and path, or another heading for the documentation."""
        self.rows = rows
        self._members = members or {}
        named = {field.encode_name for kind in bodies for field in msgspec.structs.fields(kind)} | rows.keys()
        self._applied = {name for name in named if name not in rows or isinstance(rows[name], Applied)}

    def check(self, body: bytes | msgspec.Raw, place: str = "") -> Mapping[str, msgspec.Raw]:
        """Note the hints of a valid body and of its members, fields that nobody knows among them. `place` is a prefix
        of names, such as "options.". Returns the values of its fields, which are parts of the body. Raises
        `StatusError` for a field that is refused."""
        found = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        for key in found.keys() - self._applied:
            raw = bytes(found[key])
            name = place + key
            if raw == b"null":
                continue
            row = self.rows.get(key)
            if row is None:
                ignored(name, f"{self.api} has no such field", is_known=False)
                continue
            assert not isinstance(row, Applied)
            try:
                value = msgspec.json.decode(raw)
            except (msgspec.DecodeError, UnicodeDecodeError):
                value = raw  # such as 1e999, which unknown fields may contain
            if is_one_of(value, row.neutral):
                continue
            if isinstance(row, Hint):
                ignored(name, row.why)
                continue
            hint = f"; it may only be {json.dumps(row.neutral[0])}" if row.neutral else ""
            raise unsupported(name, f"{name} is not supported{hint}; {row.instead}")
        for name, table in self._members.items():
            if name in found and bytes(found[name]) != b"null":
                table.check(found[name], f"{place}{name}.")
        return found
