"""Write the tables of architectures from the families that are tested: `python -m tests.architectures.table`.

README.md has all types, docs/how-to/models.md has a row for each of the recent models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from headrace.cli.export.run import why_unservable
from tests.architectures.families import FAMILIES
from tests.architectures.image_processing import PROCESSING
from tests.architectures.recent import RECENT, Recent

_ROOT = Path(__file__).resolve().parents[2]
README = _ROOT / "README.md"
GUIDE = _ROOT / "docs/how-to/models.md"
BEGIN = "<!-- Written by python -m tests.architectures.table -->"
_TABLE = re.compile(re.escape(BEGIN) + r"\n(?:\|.*\n)+")


def table() -> str:
    """README's table, from its first comment to its last line."""
    refused = {name: family for name, family in FAMILIES.items() if family.refused}
    families = {name: family for name, family in FAMILIES.items() if name not in refused}
    served = sorted({family.model_type for family in families.values() if family.vision is None})
    multimodal = {name: family for name, family in families.items() if family.vision is not None}
    seeing = sorted({family.model_type for name, family in multimodal.items() if name in PROCESSING})
    blind = sorted({family.model_type for family in multimodal.values()} - set(seeing))
    names = ", ".join(f"{name} ({family.refused})" for name, family in sorted(refused.items()))
    head = ["| | `model_type` in `config.json` |", "|---|---|"]
    formats = sorted({family.weights for family in FAMILIES.values()})
    rows = [
        f"| served | {', '.join(served)} |",
        f"| vision-language, served with images | {', '.join(seeing)} |",
        f"| vision-language, served for text | {', '.join(blind)} |",
        f"| refused | {names} |",
        f"| formats of weights | {', '.join(formats)} |",
    ]
    return "\n".join([BEGIN, *head, *rows, ""])


def recent_table() -> str:
    """The guide's table, from its first comment to its last line."""
    head = ["| Models | `model_type` | Served |", "|---|---|---|"]
    rows = [f"| {row.models} | {', '.join(f'`{kind}`' for kind in types_of(row))} | {_served(row)} |" for row in RECENT]
    return "\n".join([BEGIN, *head, *rows, ""])


def types_of(row: Recent) -> list[str]:
    """The model types of a row, each once."""
    return list(dict.fromkeys([*(FAMILIES[name].model_type for name in row.families), *row.refused]))


def _served(row: Recent) -> str:
    """Whether the models of a row are served, and what is to be known of it."""
    if row.refused:
        (reason,) = {why_unservable({"model_type": kind}).partition(") ")[2] for kind in row.refused}
        return f"no: it {reason}"
    versions = dict.fromkeys(_versions(row))
    notes = [*(f"exported with `transformers` {version}" for version in versions), *filter(None, [row.note])]
    return "; ".join(["yes", *notes])


def _versions(row: Recent) -> Iterator[str]:
    """The versions of transformers that export the models, where it is another than usual."""
    for name in row.families:
        if version := FAMILIES[name].transformers:
            yield version.rpartition(".")[0]


TABLES: Mapping[Path, str] = {README: table(), GUIDE: recent_table()}


def main() -> None:
    """Write the tables."""
    for path, written in TABLES.items():
        path.write_text(_TABLE.sub(lambda _found, written=written: written, path.read_text()))


if __name__ == "__main__":
    main()
