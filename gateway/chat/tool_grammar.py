"""Makes a grammar for the offered tools, in the format in which the model's family writes calls (pure).

If a call is required, the grammar allows only calls. With strict tools it also allows text, but only calls that match
their schemas.
Reasoning may come first where the model reasons.

The grammar is in llguidance's dialect of Lark (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md):
`%json` is a JSON schema, and `<[7]>` the token 7, for markup that is a special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from headrace.gateway.chat.formats import ModelFormat
from headrace.gateway.chat.output_parsers import deepseek, harmony, hermes, mistral, phi4
from headrace.gateway.chat.tools import ToolUse
from headrace.gateway.checks import invalid, json_of, unsupported
from headrace.gateway.hints import ignored
from headrace.gateway.structure.fields import Structure
from headrace.gateway.structure.relaxed import relaxed
from headrace.protos.inference_pb2 import Constraint

# The spacing of the models' own examples. It is fixed, because small models would otherwise write only spaces.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# The spacing of content without tools: docs/decisions/0007.
_CONTENT_OPTIONS = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "lenient": False}
# An escape of an expression, which stays unchanged; or characters that have a meaning between the slashes around an
# expression in Lark.
_DELIMITER = re.compile(r"\\.|/|\n", re.DOTALL)
_ESCAPED = {"/": r"\/", "\n": r"\n"}

_Answer: TypeAlias = Callable[["_Writer"], str]


def can_be_held(form: ModelFormat) -> bool:
    """Whether there is a grammar for calls of this format."""
    return form.output.tools is not None and form.output.tools.name in _ANSWERS


def tool_structure(
    form: ModelFormat, use: ToolUse, prompt_ending: str, inside_reasoning: bool, content: Structure | None = None
) -> Structure | None:
    """The grammar of an answer; None if the tools do not restrict it.

    `content` is the structure of an answer without calls. Raises `StatusError` if the request cannot be enforced
    for the model's family.
    """
    if not use.required and not use.strict and (content is None or not use.schemas):
        return content
    if use.required:
        field, content = "tool_choice", None
    else:
        field = "tools" if content is None else content.field
    name = "" if form.output.tools is None else form.output.tools.name
    answer = _ANSWERS.get(name)
    if answer is None:
        what = "tool_choice" if use.required else "strict in tools" if use.strict else f"{field} beside tools"
        message = f"{what} cannot be enforced for a model that writes calls like {name}, only like"
        raise unsupported(field, f"{message} {', '.join(sorted(_ANSWERS))}; leave it out")
    writer = _Writer(form, use, content)
    start = answer(writer)
    if name != "gpt-oss":
        start = f"{writer.reasoning(prompt_ending, inside_reasoning)}({start})"
    return Structure(Constraint(grammar=writer.text(start)), field, rules=writer.names_of_rules(content))


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, form: ModelFormat, use: ToolUse, content: Structure | None) -> None:
        self.form = form
        self.use = use
        self.names = list(use.schemas)
        self._suffixes: dict[str, int] = {}
        self._rules = [
            f"args_{i}: %json {json.dumps(_arguments_schema(schema))}" for i, schema in enumerate(use.schemas.values())
        ]
        self.content = None if content is None else "content"
        """Rule of an answer that is no call; None for any text."""
        if content is not None:
            self._rules.append(f"content: {_content(content)}")

    def text(self, start: str) -> str:
        """The grammar."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def names_of_rules(self, content: Structure | None) -> dict[str, str]:
        """What a caller calls the rules that hold JSON schemas."""
        tools = {f"{rule}_{i}": f"the tool {name}" for i, name in enumerate(self.names) for rule in ("args", "call")}
        return tools if content is None else {**tools, "content": content.field}

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

    def compact_call(self, key: str) -> str:
        """As `json_call`, but with the white space of content. With different white space, the compiler would decide
        between a call and content at the first brace."""
        for i, (name, schema) in enumerate(self.use.schemas.items()):
            # Below an $id, references would begin there and not at the root.
            arguments = {part: value for part, value in schema.items() if part not in ("$id", "id")}
            call = {
                "type": "object",
                "properties": {"name": {"const": name}, key: {"type": "object", **arguments}},
                "required": ["name", key],
                "additionalProperties": False,
                **{part: schema[part] for part in ("$defs", "definitions", "components") if part in schema},
                "x-guidance": _CONTENT_OPTIONS,
            }
            self._rules.append(f"call_{i}: %json {json.dumps(call)}")
        self._rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(self.names))))
        return "call"

    def several(self, call: str, separator: str) -> str:
        """Several calls in a row, or a single one."""
        return f"{call} ({literal(separator)} {call})*" if self.use.parallel else call

    def until(self, end: str) -> str:
        """Any text that ends with this markup, and the markup."""
        if self.has_token(end):
            self._rule(r"free_text: /(?s:.*)/")
            return f"free_text {self.markup(end)}"
        rule = f"until_{self._suffixes.setdefault(end, len(self._suffixes))}"
        self._rule(rf"{rule}[suffix={literal(end)}]: /(?s:.*)/")
        return rule

    def without(self, pattern: str) -> str:
        """Any text in which the pattern is not found, or the required form of content."""
        if self.content is not None:
            return self.content
        self._rule(f"TEXT: /(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/")
        return "TEXT"

    def text_or(self, opening: str, calls: str) -> str:
        """Calls that begin with this markup. Unless they are required, also text before them or instead of them."""
        if self.use.required:
            return f"{self.markup(opening)} {calls}"
        if self.content is not None:
            return f"{self.markup(opening)} {calls} | {self.content}"
        text = "free_text" if self.has_token(opening) else self.without(re.escape(opening))
        return f"{self.until(opening)} {calls} | {text}"

    def _rule(self, rule: str) -> None:
        if rule not in self._rules:
            self._rules.append(rule)

    def reasoning(self, prompt_ending: str, inside: bool) -> str:
        """Optional reasoning before the rest. If the prompt has opened the reasoning, its end is required."""
        reasoning = self.form.output.reasoning
        if reasoning is None or reasoning.tags is None:
            return ""
        opening, closing = reasoning.tags
        if inside:
            return f'{self.until(closing)} "\\n\\n" '
        if prompt_ending.rstrip().endswith(closing):
            return ""
        return f'({self.markup(opening)} {self.until(closing)} "\\n\\n")? '


def _content(structure: Structure) -> str:
    """The rule of an answer that must be as a structure says. Raises `StatusError` for a grammar of the caller's."""
    constraint = structure.constraint
    kind = constraint.WhichOneof("kind")
    if kind == "regex":
        return "/" + _DELIMITER.sub(lambda found: _ESCAPED.get(found[0], found[0]), constraint.regex) + "/"
    if kind == "choice":
        return " | ".join(literal(text) for text in constraint.choice.texts)
    if kind == "grammar":
        field = structure.field
        raise unsupported(field, f"{field} cannot be combined with tools, unless with tool_choice none or required")
    schema = json_of(structure.field, constraint.json_schema) if kind == "json_schema" else {"type": "object"}
    if not isinstance(schema, dict) or "x-guidance" in schema:
        raise invalid(structure.field, f"{structure.field}: a JSON schema is an object without x-guidance")
    return f"%json {json.dumps({**schema, 'x-guidance': _CONTENT_OPTIONS})}"


def literal(text: str) -> str:
    """A text as Lark writes it."""
    return json.dumps(text, ensure_ascii=False)


def _arguments_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of a tool's arguments, for the compiler. Properties that the tool does not name are left out."""
    if (found := relaxed(schema)) is not None:
        for keyword in found.dropped:
            ignored(f"tools:{keyword}", "no grammar can express it, so calls may violate it")
        schema = found.schema
    whole: dict[str, Any] = {"type": "object", **schema}
    if "properties" in whole and "patternProperties" not in whole:
        whole.setdefault("additionalProperties", False)
    return {**whole, "x-guidance": _JSON_OPTIONS}


def _hermes(writer: _Writer) -> str:
    opening, closing = (writer.markup(tag) for tag in (hermes.OPENING, hermes.CLOSING))
    call = f'"\\n" {writer.json_call("arguments")} "\\n" {closing}'
    more = f' ("\\n" {opening} {call})*' if writer.use.parallel else ""
    return writer.text_or(hermes.OPENING, call + more)


def _llama3(writer: _Writer) -> str:
    call = writer.json_call("parameters") if writer.content is None else writer.compact_call("parameters")
    calls = writer.several(call, "; ")
    if writer.use.required:
        return calls
    names = "|".join(re.escape(name) for name in writer.names)
    text = writer.without(rf'"name"\s*:\s*"({names})"')
    return f"{calls} | {text}"


def _phi4(writer: _Writer) -> str:
    calls = writer.several(writer.json_call("arguments"), ", ")
    if writer.has_token(phi4.OPENING):
        return writer.text_or(phi4.OPENING, f'"[" {calls} "]" {writer.markup(phi4.CLOSING)}')
    return writer.text_or(phi4.WORD + "[", f'{calls} "]"')


def _mistral(writer: _Writer) -> str:
    opening = mistral.OPENING
    if not writer.has_token(mistral.ARGUMENTS):
        return writer.text_or(opening, f'" [" {writer.several(writer.json_call("arguments"), ", ")} "]"')
    arguments = writer.markup(mistral.ARGUMENTS)
    call = writer.each(lambda name, args: f"{literal(name)} {arguments} {args}")
    return writer.text_or(opening, f"{call} ({writer.markup(opening)} {call})*" if writer.use.parallel else call)


def _deepseek(writer: _Writer) -> str:
    begin, end, separator = (writer.markup(tag) for tag in (deepseek.CALL_BEGIN, deepseek.CALL_END, deepseek.SEPARATOR))

    def fenced(name: str, args: str) -> str:
        head = literal(name + "\n```json\n")
        return f'{begin} "function" {separator} {head} {args} "\\n```" {end}'

    def bare(name: str, args: str) -> str:
        return f"{begin} {literal(name)} {separator} {args} {end}"

    call = writer.each(fenced if writer.form.output.is_fenced else bare)
    calls = writer.several(call, "\n") if writer.form.output.is_fenced else f"{call}{'+' * writer.use.parallel}"
    return writer.text_or(deepseek.CALLS_BEGIN, f"{calls} {writer.markup(deepseek.CALLS_END)}")


def _gpt_oss(writer: _Writer) -> str:
    """The grammar of one call as the last message, optionally after reasoning; or of the final message if a call is
    optional."""
    channel, message, start, constrain = (
        writer.markup(tag) for tag in (harmony.CHANNEL, harmony.MESSAGE, harmony.START, harmony.CONSTRAIN)
    )
    before = f'{channel} "analysis" {message} {writer.until(harmony.END)} {start} "assistant"'
    if not writer.use.required:
        before += f' | {channel} "commentary" {message} {writer.until(harmony.END)} {start} "assistant"'

    def one(name: str, args: str) -> str:
        return f'{channel} {literal(f"commentary to=functions.{name} ")} {constrain} "json" {message} {args}'

    call = writer.each(one)
    if writer.use.required:
        return f"({before})? {call}"
    is_free = writer.content is None and writer.has_token(harmony.CHANNEL)
    text = "free_text" if is_free else writer.without(re.escape(harmony.CHANNEL))
    return f'({before})* ({call} | {channel} "final" {message} {text})'


_ANSWERS: Mapping[str, _Answer] = {
    "deepseek": _deepseek,
    "gpt-oss": _gpt_oss,
    "hermes": _hermes,
    "llama3": _llama3,
    "mistral": _mistral,
    "phi4": _phi4,
}
