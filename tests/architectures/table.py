"""Write README's table of architectures from the families that are tested: `python -m tests.architectures.table`."""

from __future__ import annotations

import re
from pathlib import Path

from tests.architectures.families import FAMILIES

README = Path(__file__).resolve().parents[2] / "README.md"
BEGIN = "<!-- Written by python -m tests.architectures.table -->"
_TABLE = re.compile(re.escape(BEGIN) + r"\n(?:\|.*\n)+")


def table() -> str:
    """The table, from its first comment to its last line."""
    refused = {name: family for name, family in FAMILIES.items() if family.refused}
    families = [family for name, family in FAMILIES.items() if name not in refused]
    served = sorted({family.model_type for family in families if family.vision is None})
    multimodal = sorted({family.model_type for family in families if family.vision is not None})
    names = ", ".join(f"{name} ({family.refused})" for name, family in sorted(refused.items()))
    head = ["| | `model_type` in `config.json` |", "|---|---|"]
    formats = sorted({family.weights for family in FAMILIES.values()})
    rows = [
        f"| served | {', '.join(served)} |",
        f"| vision-language, served with images | {', '.join(multimodal)} |",
        f"| refused | {names} |",
        f"| formats of weights | {', '.join(formats)} |",
    ]
    return "\n".join([BEGIN, *head, *rows, ""])


def main() -> None:
    """Write the table to README.md."""
    README.write_text(_TABLE.sub(lambda _found: table(), README.read_text()))


if __name__ == "__main__":
    main()
