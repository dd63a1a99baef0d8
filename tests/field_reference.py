"""Write docs/reference/fields.md from the tables of fields: `make docs`. A test holds the page to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from headrace.gateway.fields import Applied, FieldTable, Hint, Row
from headrace.gateway.protocols import PROTOCOLS

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "fields.md"
TABLES: Sequence[FieldTable] = [table for protocol in PROTOCOLS.values() for table in protocol.fields]
_HEAD = """\
# Fields of requests

<!-- Written by tests/field_reference.py (make docs). Change the tables of the gateway's protocols instead. -->

A field is

- **applied**: it has its effect.
- a **hint**: it is taken without effect, because its absence cannot be noticed in the answer. The response's header
  `x-headrace-ignored` names it, and the gateway logs it once. Fields that are in no table are hints, too.
- **refused** with a 400 that names it, because the answer would be another one. Null, and the values in brackets, ask
  for nothing and are taken.
"""


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_section(table) for table in TABLES)


def _section(table: FieldTable) -> str:
    rows = sorted(table.rows.items(), key=lambda item: not isinstance(item[1], Applied))
    lines = "\n".join(_line(name, row) for name, row in rows)
    return f"\n## {table.api}\n\n| Field | | Values | Meaning or reason |\n|---|---|---|---|\n{lines}\n"


def _line(name: str, row: Row) -> str:
    if isinstance(row, Applied):
        cells = ("applied", row.values, row.meaning)
    else:
        neutral = ", ".join(f"`{json.dumps(value)}`" for value in row.neutral)
        is_hint = isinstance(row, Hint)
        text = row.why if isinstance(row, Hint) else row.instead
        values = "any" if is_hint else f"({neutral})" if neutral else ""
        cells = ("hint" if is_hint else "refused", values, text[:1].upper() + text[1:])
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in (f"`{name}`", *cells)) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
