"""Write docs/reference/exclusions.md from the worker's table of what cannot be combined: `make docs`. A test holds the
page to it."""

from __future__ import annotations

from pathlib import Path

from headrace.worker.kv.exclusions import EXCLUSIONS, Other, Setting
from headrace.worker.kv.layers import LayerKind

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "exclusions.md"
_HEAD = """\
# What cannot be combined

<!-- Written by tests/exclusion_reference.py (make docs). Change EXCLUSIONS in worker/kv/exclusions.py instead. -->

Everything else about the KV cache works together: prefix cache, disk, other workers, handover, drafts, branches,
adapters, trimmed windows, recurrent states and eviction. A worker refuses to start with the combinations below, with
the reason, or warns that a flag has no effect.

| Flag | With | | Why |
|---|---|---|---|
"""


def page() -> str:
    """The whole page."""
    rows = [
        f"| {_name(row.setting)} | {_name(row.other)} | {'refused' if row.is_refused else 'no effect'} | {row.why} |\n"
        for row in EXCLUSIONS
    ]
    return _HEAD + "".join(rows)


def _name(other: Other) -> str:
    if isinstance(other, Setting):
        return f"`{other.name}`" if other.name.startswith("--") else other.name
    return f"{other.value} layers" if isinstance(other, LayerKind) else other.name


if __name__ == "__main__":
    PAGE.write_text(page())
