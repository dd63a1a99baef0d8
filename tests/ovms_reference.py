"""Write docs/reference/ovms.md from the tables of options of OpenVINO Model Server: `make docs`. A test holds the page
to them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace.cli.ovms.flags import FLAGS, GRAPH_FLAGS
from headrace.cli.ovms.graphs import CALCULATORS
from headrace.cli.ovms.options import (
    CACHE_EVICTION,
    CONFIGURATION,
    EMBEDDINGS,
    GRAPH_ENTRY,
    KV_CRUSH,
    MODEL_ENTRY,
    PLUGIN_CONFIG,
    RERANK,
    SPARSE_ATTENTION,
    TEXT_GENERATION,
    Option,
)
from headrace.common.parser_names import REASONING_ALIASES, TOOL_ALIASES

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "ovms.md"
_HEAD = """\
# Options of OpenVINO Model Server

<!-- Written by tests/ovms_reference.py (make docs). Change the tables in cli/ovms instead. -->

`headrace serve --config` and `headrace ovms` read the files and flags of OpenVINO Model Server (OVMS). [From OVMS to
headrace](../how-to/from-ovms.md) shows how. Each option is one of these:

- **applied**: it does what it does in OVMS.
- **named**: it has no effect, and answers do not depend on it. A line of the log says what to use instead.
- **refused**: answers would differ without it, or it needs what headrace does not have. The model is not served, and
  the error says what to do. The other models of a configuration are served.

An option that is in none of the tables is refused. Values that change nothing are not named, such as `NUM_STREAMS` 1.
"""


def page() -> str:
    """The whole page."""
    parts = [_HEAD, "\n## graph.pbtxt\n\nA graph has one node with one of these calculators.\n"]
    for calculator, options in zip(CALCULATORS, (TEXT_GENERATION, EMBEDDINGS, RERANK), strict=True):
        names = " and ".join(f"`{name}`" for name in calculator.names)
        parts.append(f"\n### {calculator.message}\n\nOptions of {names}.\n\n{_table(options)}")
    parts.append(f"\n### cache_eviction_config\n\n{_table(CACHE_EVICTION)}")
    parts.append(f"\n### kv_crush_config\n\n{_table(KV_CRUSH)}")
    parts.append(f"\n### sparse_attention_config\n\n{_table(SPARSE_ATTENTION)}")
    parts.append(f"\n### plugin_config\n\nA JSON object, in graphs as a text.\n\n{_table(PLUGIN_CONFIG)}")
    parts.append(f"\n## config.json\n\n{_table(CONFIGURATION)}")
    parts.append(f"\n### Entries of mediapipe_config_list\n\n{_table(GRAPH_ENTRY)}")
    own = [option for option in MODEL_ENTRY if option not in GRAPH_ENTRY]
    about = "The fields of graphs, and these. If there is a graph, it decides instead of them."
    parts.append(f"\n### Entries of model_config_list\n\n{about}\n\n{_table(own)}")
    parts.append("\n## Flags of ovms\n\n| Flag | | |\n|---|---|---|\n")
    parts += [_row(f"--{flag.name}", flag.fate.value, flag.what) for flag in FLAGS]
    parts.append(
        "\nThese flags are options of a graph, or properties of its `plugin_config`, of which the tables above tell.\n"
    )
    parts.append("\n| Flag | Option |\n|---|---|\n")
    parts += [f"| `--{flag.name}` | `{flag.option}` |\n" for flag in GRAPH_FLAGS]
    parts.append("\n## Names of parsers\n\n| `tool_parser` | headrace |\n|---|---|\n")
    parts += _names(TOOL_ALIASES.items())
    parts.append("\n| `reasoning_parser` | headrace |\n|---|---|\n")
    parts += _names(REASONING_ALIASES.items())
    parts.append("\nHeadrace's own names are valid too, and `none` and `auto`. Others are refused.\n")
    return "".join(parts)


def _table(options: Sequence[Option]) -> str:
    rows = (_row(option.name, option.fate.value, option.what, is_required=option.is_required) for option in options)
    return "| Option | | |\n|---|---|---|\n" + "".join(rows)


def _row(name: str, fate: str, what: str, *, is_required: bool = False) -> str:
    what = what.replace("|", r"\|") + ("; required" if is_required else "")
    return f"| `{name}` | {fate} | {what[:1].upper()}{what[1:]} |\n"


def _names(names: Iterable[tuple[str, str]]) -> list[str]:
    return [f"| `{other}` | `{own}` |\n" for other, own in names]


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
