"""Write docs/reference/formats.md from the gateway's formats of tool calls and reasoning: `make docs`. A test holds the
page to them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.common.parser_names import REASONING_ALIASES, TOOL_ALIASES
from headrace.gateway.chat.formats import ModelFormat
from headrace.gateway.chat.output_parsers.families import REASONING_FORMATS, TOOL_FORMATS, OutputFormat, Sign
from headrace.gateway.chat.tool_grammar import can_be_held

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "formats.md"
_HEAD = """\
# Formats of tool calls and reasoning

<!-- Written by tests/format_reference.py (make docs). Change gateway/chat/output_parsers/families.py instead. -->

The gateway recognises the format of a model by its chat template: the first row applies of which the template contains
a sign. If a template takes tools but has no sign of any, a special token of the model's vocabulary decides.
`--tool-parser` and `--reasoning-parser` override this for all models (`hermes`) or for one (`my-model=hermes`). `none`
turns parsing off. [Tools and reasoning](http-api.md#tools-and-reasoning) says what becomes of calls.

A format with a grammar can enforce required calls. With "strict tools only", a grammar enforces calls of `strict` tools
whose arguments have schemas of their own, and required calls are in the format `hermes`.

## Tool calls

| `--tool-parser` | Models | A call | Sign in the template | Special token | Grammar | Names of other servers |
|---|---|---|---|---|---|---|
"""
_REASONING = """
## Reasoning

| `--reasoning-parser` | Models | Reasoning | Around the answer | Sign in the template | Names of other servers |
|---|---|---|---|---|---|
"""
_END = """
Where the prompt already ends with the opening tag, the answer begins with reasoning. `think-open` takes every answer
to begin with reasoning unless the prompt ends it, as the parser `deepseek_r1` of other servers does; it is never
recognised by itself. Tags around the answer are taken off.
"""


def page() -> str:
    """The whole page."""
    rows = []
    for one in TOOL_FORMATS.values():
        grammar = "yes" if can_be_held(ModelFormat(OutputFormat(one), {})) else "strict tools only"
        names = _names(one.name, TOOL_ALIASES)
        token = _code(one.token) if one.token else ""
        rows.append(_row(f"`{one.name}`", one.models, one.shape, _signs(one.signs), token, grammar, names))
    rows.append(_REASONING)
    for form in REASONING_FORMATS.values():
        tags = "the analysis channel"
        if form.tags is not None:
            tags = ", ".join(
                f"{_code(opening)} ... {_code(closing)}" for opening, closing in (form.tags, *form.spellings)
            )
        around = ", ".join(f"{_code(opening)} ... {_code(closing)}" for opening, closing in form.around_answer)
        names = _names(form.name, REASONING_ALIASES)
        rows.append(_row(f"`{form.name}`", form.models, tags, around, _signs(form.signs), names))
    return _HEAD + "".join(rows) + _END


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |\n"


def _code(text: str) -> str:
    return f"`{text}`"


def _signs(signs: tuple[Sign, ...]) -> str:
    return ", ".join(_code(one) if isinstance(one, str) else " with ".join(map(_code, one)) for one in signs)


def _names(own: str, aliases: Mapping[str, str]) -> str:
    return ", ".join(_code(name) for name, meant in aliases.items() if meant == own)


if __name__ == "__main__":
    PAGE.write_text(page())
