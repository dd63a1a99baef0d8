"""A grammar under which an answer can only be calls of the offered tools, as the model's family writes them (pure).

It is in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md): `%json` is a
JSON schema, and `<[7]>` the token 7, for markup that is a special token. Reasoning may come first where the model
reasons.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from headrace.gateway.formats import ModelFormat
from headrace.gateway.openai_types import unsupported
from headrace.gateway.output_parsers import deepseek, harmony, hermes, mistral, phi4
from headrace.gateway.structure import Structure
from headrace.gateway.tools import ToolUse
from headrace.protos.inference_pb2 import Constraint

# As the models' own examples are spaced; without freedom, or small models write nothing but spaces.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

_Calls: TypeAlias = Callable[["_Writer"], str]


def tool_structure(form: ModelFormat, use: ToolUse, prompt_ending: str, inside_reasoning: bool) -> Structure | None:
    """What holds an answer to the tools; None if it need not call any.

    Raises `StatusError` if the tool choice cannot be enforced for the model's family.
    """
    if not use.required:
        return None
    name = "" if form.output.tools is None else form.output.tools.name
    calls = _CALLS.get(name)
    if calls is None:
        kinds = ", ".join(sorted(_CALLS))
        message = f"tool_choice cannot be enforced for a model that writes calls like {name}; it can for {kinds}"
        raise unsupported("tool_choice", message)
    writer = _Writer(form, use)
    start = calls(writer)
    if name != "gpt-oss":
        start = writer.reasoning(prompt_ending, inside_reasoning) + start
    return Structure(Constraint(grammar=writer.text(start)), "tool_choice")


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, form: ModelFormat, use: ToolUse) -> None:
        self.form = form
        self.use = use
        self.names = list(use.schemas)
        self._rules = [
            f"args_{i}: %json {json.dumps(_arguments_schema(schema))}" for i, schema in enumerate(use.schemas.values())
        ]

    def text(self, start: str) -> str:
        """The grammar."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def markup(self, text: str) -> str:
        """Markup: as its special token, if it has one."""
        token_id = self.form.marker_ids.get(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def has_token(self, text: str) -> bool:
        """Whether this markup is a special token."""
        return text in self.form.marker_ids

    def each(self, one: Callable[[str, str], str]) -> str:
        """Any one of the tools, by its name and the rule of its arguments."""
        self._rules.append("call: " + " | ".join(one(name, f"args_{i}") for i, name in enumerate(self.names)))
        return "call"

    def json_call(self, key: str) -> str:
        """Any one of the tools as an object, with its arguments under this key."""

        def one(name: str, args: str) -> str:
            head = f'{{"name": {json.dumps(name)}, "{key}": '
            return f'{literal(head)} {args} "}}"'

        return self.each(one)

    def several(self, call: str, separator: str) -> str:
        """Calls one behind the other, or a single one."""
        return f"{call} ({literal(separator)} {call})*" if self.use.parallel else call

    def until(self, end: str) -> str:
        """Any text that ends with this markup, and the markup."""
        if self.has_token(end):
            self._rules.append(r"free_text: /(?s:.*)/")
            return f"free_text {self.markup(end)}"
        self._rules.append(rf"free_text[suffix={literal(end)}]: /(?s:.*)/")
        return "free_text"

    def reasoning(self, prompt_ending: str, inside: bool) -> str:
        """Reasoning in front of what follows: where the prompt opened it, to its end; else if the model likes."""
        reasoning = self.form.output.reasoning
        if reasoning is None or reasoning.tags is None:
            return ""
        opening, closing = reasoning.tags
        if inside:
            return f'{self.until(closing)} "\\n\\n" '
        if prompt_ending.rstrip().endswith(closing):
            return ""
        return f'({self.markup(opening)} {self.until(closing)} "\\n\\n")? '


def literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _arguments_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, for the compiler. Properties that the tool does not name are left out."""
    whole: dict[str, Any] = {"type": "object", **schema}
    if "properties" in whole and "patternProperties" not in whole:
        whole.setdefault("additionalProperties", False)
    return {**whole, "x-guidance": _JSON_OPTIONS}


def _hermes(writer: _Writer) -> str:
    opening, closing = (writer.markup(tag) for tag in (hermes.OPENING, hermes.CLOSING))
    call = f'{opening} "\\n" {writer.json_call("arguments")} "\\n" {closing}'
    return writer.several(f"({call})", "\n")


def _llama3(writer: _Writer) -> str:
    return writer.several(writer.json_call("parameters"), "; ")


def _phi4(writer: _Writer) -> str:
    calls = writer.several(writer.json_call("arguments"), ", ")
    if writer.has_token(phi4.OPENING):
        return f'{writer.markup(phi4.OPENING)} "[" {calls} "]" {writer.markup(phi4.CLOSING)}'
    return f'{literal(phi4.WORD + "[")} {calls} "]"'


def _mistral(writer: _Writer) -> str:
    opening = writer.markup(mistral.OPENING)
    if not writer.has_token(mistral.ARGUMENTS):
        return f'{opening} " [" {writer.several(writer.json_call("arguments"), ", ")} "]"'
    arguments = writer.markup(mistral.ARGUMENTS)
    call = writer.each(lambda name, args: f"{opening} {literal(name)} {arguments} {args}")
    return f"{call}+" if writer.use.parallel else call


def _deepseek(writer: _Writer) -> str:
    begin, end, separator = (writer.markup(tag) for tag in (deepseek.CALL_BEGIN, deepseek.CALL_END, deepseek.SEPARATOR))
    if writer.form.output.is_fenced:
        call = writer.each(
            lambda name, args: (
                f'{begin} "function" {separator} {literal(name + chr(10) + "```json" + chr(10))} {args} "\\n```" {end}'
            )
        )
        calls = writer.several(call, "\n")
    else:
        call = writer.each(lambda name, args: f"{begin} {literal(name)} {separator} {args} {end}")
        calls = f"{call}+" if writer.use.parallel else call
    return f"{writer.markup(deepseek.CALLS_BEGIN)} {calls} {writer.markup(deepseek.CALLS_END)}"


def _gpt_oss(writer: _Writer) -> str:
    """One call, behind reasoning or not: its message is the last."""
    channel, message, start, constrain = (
        writer.markup(tag) for tag in (harmony.CHANNEL, harmony.MESSAGE, harmony.START, harmony.CONSTRAIN)
    )
    analysis = f'{channel} "analysis" {message} {writer.until(harmony.END)} {start} "assistant"'
    call = writer.each(
        lambda name, args: (
            f'{channel} {literal(f"commentary to=functions.{name} ")} {constrain} "json" {message} {args}'
        )
    )
    return f"({analysis})? {call}"


_CALLS: Mapping[str, _Calls] = {
    "deepseek": _deepseek,
    "gpt-oss": _gpt_oss,
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "phi4": _phi4,
}
