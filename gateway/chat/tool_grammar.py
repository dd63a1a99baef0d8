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
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias, TypeVar

from headrace.gateway.chat.formats import ModelFormat
from headrace.gateway.chat.output_parsers import glm, harmony, mistral, phi4, pythonic
from headrace.gateway.chat.output_parsers.families import TOOL_FORMATS
from headrace.gateway.chat.output_parsers.gemma import GemmaCalls
from headrace.gateway.chat.output_parsers.json_tags import JsonTags, Layout
from headrace.gateway.chat.output_parsers.marked_json import MarkedJson
from headrace.gateway.chat.output_parsers.tagged_values import types_of
from headrace.gateway.chat.output_parsers.xml_calls import CDATA, CDATA_END, XmlCalls
from headrace.gateway.chat.tools import ToolUse
from headrace.gateway.checks import invalid, json_of, unsupported
from headrace.gateway.structure.fields import Structure
from headrace.gateway.structure.tags import between_slashes
from headrace.protos.inference_pb2 import Constraint
from headrace.protos.status import StatusError

# The spacing of the models' own examples. It is fixed, because small models would otherwise write only spaces.
_JSON_OPTIONS = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# The spacing of content without tools: docs/decisions/structured-output.md#compact-json.
_CONTENT_OPTIONS = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "lenient": False}

_T = TypeVar("_T")
_Answer: TypeAlias = Callable[["_Writer"], str]


def can_be_held(form: ModelFormat) -> bool:
    """Whether there is a grammar for calls of this format with any schema."""
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
    answers = _ANSWERS if use.required else {**_ANSWERS, **_OPTIONAL_ANSWERS}
    answer = answers.get(name)
    if answer is None:
        what = "tool_choice" if use.required else "strict in tools" if use.strict else f"{field} beside tools"
        message = f"{what} cannot be enforced for a model that writes calls like {name}, only like"
        raise unsupported(field, f"{message} {', '.join(sorted(answers))}; leave it out")
    writer = _Writer(form, use, content)
    start = answer(writer)
    if name != "gpt-oss":
        start = f"{writer.reasoning(prompt_ending, inside_reasoning)}({start})"
    return Structure(Constraint(grammar=writer.text(start)), field)


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, form: ModelFormat, use: ToolUse, content: Structure | None) -> None:
        self.form = form
        self.use = use
        self.names = list(use.schemas)
        self._suffixes: dict[str, int] = {}
        self._rules: list[str] = []
        longest_first = sorted(form.marker_ids, key=len, reverse=True)
        self._markers = re.compile(f"({'|'.join(map(re.escape, longest_first))})") if longest_first else None
        self.content = None if content is None else "content"
        """Rule of an answer that is no call; None for any text."""
        if content is not None:
            self._rules.append(f"content: {_content(content)}")

    def text(self, start: str) -> str:
        """The grammar."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def markup(self, text: str) -> str:
        """Markup, with the special tokens that are in it; empty for an empty one."""
        parts = self._markers.split(text) if self._markers is not None else [text]
        return " ".join(self._one(part) for part in parts if part)

    def _one(self, text: str) -> str:
        token_id = self.form.marker_ids.get(text)
        return literal(text) if token_id is None else f"<[{token_id}]>"

    def has_token(self, text: str) -> bool:
        """Whether a special token is in this markup. Free text then never contains the markup."""
        return self._markers is not None and self._markers.search(text) is not None

    def split(self, text: str) -> tuple[str, str]:
        """Markup with a special token: the text before the token, and the rest."""
        assert self._markers is not None
        found = self._markers.search(text)
        assert found is not None
        return text[: found.start()], text[found.start() :]

    def each(self, one: Callable[[str, str], str]) -> str:
        """Any one of the tools, by its name and the rule of its arguments."""
        for i, schema in enumerate(self.use.schemas.values()):
            self.rule(f"args_{i}: %json {json.dumps(_arguments_schema(schema))}")
        self._rules.append("call: " + " | ".join(one(name, f"args_{i}") for i, name in enumerate(self.names)))
        return "call"

    def json_call(self, key: str, name_key: str = "name", number_key: str = "") -> str:
        """Any one of the tools as an object: its number if that has a key, its name, and its arguments."""

        def one(name: str, args: str) -> str:
            head = f'"{name_key}": {json.dumps(name)}, "{key}": '
            if not number_key:
                return f'{literal("{" + head)} {args} "}}"'
            number = literal('{"' + number_key + '": "')
            return f'{number} /[0-9]{{1,4}}/ {literal(chr(34) + ", " + head)} {args} "}}"'

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
            text, rest = self.split(end)
            if not text:
                return f"{self.free_text()} {self.markup(end)}"
            rule = f"until_{self._suffixes.setdefault(end, len(self._suffixes))}"
            self.rule(rf"{rule}: /(?s:.*){_text_in_lark(text)}/")
            return f"{rule} {self.markup(rest)}"
        rule = f"until_{self._suffixes.setdefault(end, len(self._suffixes))}"
        self.rule(rf"{rule}[suffix={literal(end)}]: /(?s:.*)/")
        return rule

    def free_text(self) -> str:
        """Any text without special tokens."""
        self.rule(r"free_text: /(?s:.*)/")
        return "free_text"

    def without(self, pattern: str) -> str:
        """Any text in which the pattern is not found, or the required form of content."""
        if self.content is not None:
            return self.content
        self.rule(f"TEXT: /(?s:.*)/ & ~/(?s:.*){pattern}(?s:.*)/")
        return "TEXT"

    def text_or(self, opening: str, calls: str) -> str:
        """Calls that begin with this markup. Unless they are required, also text before them or instead of them."""
        if self.use.required:
            return f"{self.markup(opening)} {calls}"
        if self.content is not None:
            return f"{self.markup(opening)} {calls} | {self.answer(self.content)}"
        text = self.free_text() if self.has_token(opening) else self.without(re.escape(opening))
        return f"{self.until(opening)} {calls} | {self.answer(text)}"

    def answer(self, text: str) -> str:
        """An answer without a call, with the tokens that the model may write around it."""
        reasoning = self.form.output.reasoning
        for opening, closing in () if reasoning is None else reasoning.around_answer:
            if self.has_token(opening):
                text += f" | {self.markup(opening)} {text.split(' | ')[0]} {self.markup(closing)}"
        return text

    def rule(self, rule: str) -> None:
        """Add a rule, once."""
        if rule not in self._rules:
            self._rules.append(rule)

    def reasoning(self, prompt_ending: str, inside: bool) -> str:
        """Optional reasoning before the rest. If the prompt has opened the reasoning, its end is required."""
        reasoning = self.form.output.reasoning
        if reasoning is None or reasoning.tags is None:
            return ""
        opening, closing = reasoning.tags
        if inside:
            return f"{self.until(closing)} {_BREAK} "
        if prompt_ending.rstrip().endswith(closing):
            return ""
        return f"({self.markup(opening)} {self.until(closing)} {_BREAK})? "


# Between reasoning and answer. Families have none, one or two.
_BREAK = '("\\n" "\\n"?)?'


def _content(structure: Structure) -> str:
    """The rule for an answer with this structure. Raises `StatusError` for a grammar of the caller."""
    constraint = structure.constraint
    kind = constraint.WhichOneof("kind")
    if kind == "regex":
        return f"/{between_slashes(constraint.regex)}/"
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
    whole: dict[str, Any] = {"type": "object", **schema}
    if "properties" in whole and "patternProperties" not in whole:
        whole.setdefault("additionalProperties", False)
    return {**whole, "x-guidance": _JSON_OPTIONS}


def _json_tags(writer: _Writer, tags: JsonTags) -> str:
    call = writer.json_call(tags.arguments, tags.name, tags.number)
    opening, closing = writer.markup(tags.opening), writer.markup(tags.closing)
    match tags.layout:
        case Layout.LIST:
            calls = f'"[" {writer.several(call, ", ")} "]" {closing}'
        case Layout.LINES:
            calls = f'"\\n" ({call} "\\n"){"+" * writer.use.parallel} {closing}'
        case Layout.TAGS:
            call = f'"\\n" {call} "\\n" {closing}'
            calls = call + (f' ("\\n" {opening} {call})*' if writer.use.parallel else "")
    return writer.text_or(tags.opening, calls)


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


def _marked_json(writer: _Writer, form: MarkedJson) -> str:
    begin, end, separator = (writer.markup(tag) for tag in (form.call_begin, form.call_end, form.separator))
    is_fenced = writer.form.output.is_fenced and not form.prefix

    def fenced(name: str, args: str) -> str:
        head = literal(name + "\n```json\n")
        return f'{begin} "function" {separator} {head} {args} "\\n```" {end}'

    def bare(name: str, args: str) -> str:
        head = literal(name)
        if form.prefix:
            head = f"{literal(f'{form.prefix}{name}:')} /[0-9]{{1,4}}/"
        return f"{begin} {head} {separator} {args} {end}"

    call = writer.each(fenced if is_fenced else bare)
    calls = writer.several(call, "\n") if is_fenced else f"{call}{'+' * writer.use.parallel}"
    return writer.text_or(form.calls_begin, f"{calls} {writer.markup(form.calls_end)}")


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


# --- formats that write each argument by itself ---------------------------------------------------------------------


def _pythonic(writer: _Writer) -> str:
    """Calls in a list. The head of the first one is a single terminal, which free text cannot contain."""
    heads = "|".join(re.escape(name) for name in writer.names)
    text = writer.without(rf"\[\s*({heads})\(")
    first, following = (
        " | ".join(f"{literal(f'{before}{name}(')} {rule}" for name, rule in _python_calls(writer))
        for before in ("[", ", ")
    )
    calls = f'({first}) "]"'
    if writer.use.parallel:
        writer.rule(f"following: {following}")
        calls = f'({first}) following* "]"'
    answers = [calls, text]
    for opening, closing in pythonic.PYTHONIC.tags:
        if writer.has_token(opening):
            before = f"{text}? " if writer.content is None else ""
            answers.append(f"{before}{writer.markup(opening)} {calls} {writer.markup(closing)}")
    return " | ".join(answers)


def _olmo3(writer: _Writer) -> str:
    """Calls on lines of their own."""
    (opening, closing), *_ = pythonic.OLMO3.tags
    writer.rule("call: " + " | ".join(f"{literal(f'{name}(')} {rule}" for name, rule in _python_calls(writer)))
    calls = f'"\\n" (call "\\n"){"+" * writer.use.parallel} {writer.markup(closing)}'
    return writer.text_or(opening, calls)


def _python_calls(writer: _Writer) -> list[tuple[str, str]]:
    """Each tool, with the rule for its arguments and the closing parenthesis."""
    found = []
    for number, name in enumerate(writer.names):
        entries = []
        for i, (key, schema, is_required) in enumerate(_properties(writer, name)):
            if re.fullmatch(r"[\w.-]+", key) is None:
                raise _not_held(writer, name, f"'{key[:64]}' is no name of an argument")
            writer.rule(f"value_{number}_{i}: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}")
            entries.append((f"{key}=", f"value_{number}_{i}", is_required))
        found.append((name, _entries(writer, f"{number}", entries, ", ", ")")))
    return found


def _entries(writer: _Writer, number: str, entries: Sequence[tuple[str, str, bool]], comma: str, end: str) -> str:
    """The rule for entries, each a head, the rule of its value and whether it is required; with the `comma` between
    them and the `end` after them."""
    # From the last entry to the first one: each rule is that of an entry and all behind it, with and without a comma
    # in front.
    after = {True: literal(end), False: literal(end)}
    for i, (head, value, is_required) in reversed([*enumerate(entries)]):
        rules = {}
        for is_behind_another, before in ((False, ""), (True, comma)):
            body = f"{literal(before + head)} {value} {after[True]}"
            if not is_required:
                body += f" | {after[is_behind_another]}"
            rules[is_behind_another] = f"keys_{number}_{i}{'_more' * is_behind_another}"
            if i or not is_behind_another:
                writer.rule(f"{rules[is_behind_another]}: {body}")
        after = rules
    return after[False]


def _xml_calls(writer: _Writer, form: XmlCalls) -> str:
    quote = '"' * form.is_quoted
    # The tag that free text cannot contain is in front of the alternatives.
    opening = form.opening or form.call
    calls = []
    for number, name in enumerate(writer.names):
        head = f"{form.before}{form.call if form.opening else ''}{quote}{name}{quote}>{form.line}"
        parts = [writer.markup(head)]
        for i, (key, schema, is_required) in enumerate(_properties(writer, name)):
            _check_key(writer, name, key)
            parameter = _xml_parameter(writer, form, f"{number}_{i}", name, key, schema)
            parts.append(f"({parameter}){'?' * (not is_required)}")
        parts.append(writer.markup(form.call_end + form.after + form.line * bool(form.opening)))
        calls.append(" ".join(parts))
    writer.rule(f"call: {' | '.join(calls)}")
    start, closing = writer.markup(opening), writer.markup(form.closing)
    is_parallel = writer.use.parallel
    if not form.opening:
        answer = "call" + (f' ("\\n" {start} call)*' * is_parallel)
    elif form.holds_several:
        answer = f"{literal(form.line)} call{'+' * is_parallel} {closing}"
    else:
        one = f"{literal(form.line)} call {closing}"
        answer = one + (f' ("\\n" {start} {one})*' * is_parallel)
    if not form.may_be_bare:
        return writer.text_or(opening, answer)
    if writer.content is not None:
        return f"{start} {answer} | {writer.content}"
    # The parser reads a call without its first tag, too, so that free text has neither.
    if writer.has_token(opening):
        text = writer.without(form.call)
        return f"{text}? {start} {answer} | {text}"
    writer.rule(f"BEFORE: /(?s:.*){opening}/ & ~/(?s:.*){opening}(?s:.+)/ & ~/(?s:.*){form.call}(?s:.*)/")
    return f"BEFORE {answer} | {writer.without(f'({opening}|{form.call})')}"


def _xml_parameter(writer: _Writer, form: XmlCalls, number: str, name: str, key: str, schema: Mapping[str, Any]) -> str:
    """An argument, with its tags."""
    quote = '"' * form.is_quoted

    def value(attribute: str, number: str, schema: Mapping[str, Any]) -> str:
        head = writer.markup(f"{form.parameter}{quote}{key}{quote}{attribute}>{form.around}")
        end, around = form.parameter_end, {"before": form.around, "after": form.line}
        if not form.has_cdata or "string" not in (types_of(schema) or ("string",)):
            return f"{head} {_parameter(writer, number, name, schema, end, **around)}"
        raw = _parameter(writer, number, name, schema, end, **around, never=CDATA)
        in_cdata = _parameter(writer, f"{number}_cdata", name, schema, CDATA_END + end, **around, start=CDATA)
        return f"{head} ({raw} | {in_cdata})"

    kinds = types_of(schema)
    if not form.has_types:
        return value("", number, schema)
    if kinds and "string" not in kinds:
        return value(' string="false"', number, schema)
    texts = {"enum": [one for one in schema["enum"] if one is not None]} if isinstance(schema.get("enum"), list) else {}
    found = value(' string="true"', number, {**schema, **texts, **({"type": "string"} if texts else {})})
    if "null" in kinds or (texts and None in schema["enum"]):
        null = value(' string="false"', f"{number}_null", {"type": "null"})
        found += f" | {null}"
    return found


# Objects and lists in one another, beyond which values are JSON; schemas may refer to themselves.
_MAX_NESTED = 8


def _gemma(writer: _Writer, form: GemmaCalls) -> str:
    opening, closing = writer.markup(form.opening), writer.markup(form.closing)
    for number, name in enumerate(writer.names):
        entries = _gemma_entries(writer, form, f"{number}", name, _properties(writer, name))
        writer.rule(f"arguments_{number}: {entries}")
    calls = (f"{literal(f'call:{name}{{')} arguments_{number}" for number, name in enumerate(writer.names))
    writer.rule(f"call: {' | '.join(calls)}")
    one = f"call {closing}"
    return writer.text_or(form.opening, one + f" ({opening} {one})*" * writer.use.parallel)


def _gemma_entries(
    writer: _Writer,
    form: GemmaCalls,
    number: str,
    name: str,
    properties: Sequence[tuple[str, Mapping[str, Any], bool]],
) -> str:
    """The entries of an object and its end."""
    entries = []
    for i, (key, schema, is_required) in enumerate(properties):
        if re.fullmatch(r"[\w.-]+( [\w.-]+)*", key) is None:
            raise _not_held(writer, name, f"'{key[:64]}' is no name of an argument")
        entries.append((f"{key}:", _gemma_value(writer, form, f"{number}_{i}", name, schema), is_required))
    return _entries(writer, number, entries, ",", "}")


def _gemma_value(writer: _Writer, form: GemmaCalls, number: str, name: str, schema: Mapping[str, Any]) -> str:
    """A value in the model's own form; as JSON, which the parser reads, too, if the schema says more than types."""
    schema = _resolved(schema) if number.count("_") < _MAX_NESTED else schema
    own = schema.keys() - _NOTES - {"definitions", "components", "additionalProperties"}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, list) and own <= {"type", "enum", "const"}:
        if any(isinstance(one, dict | list) or (isinstance(one, str) and form.quote in one) for one in values):
            raise _not_held(writer, name, f"an enum with a list, an object or {form.quote}")
        quoted = (f"{form.quote}{one}{form.quote}" if isinstance(one, str) else json.dumps(one) for one in values)
        return f"({' | '.join(map(writer.markup, quoted))})"
    kinds = types_of(schema)
    if not kinds or "string" in kinds:
        text = f"{writer.markup(form.quote)} {_parameter(writer, number, name, schema, form.quote)}"
        return f'({text} | "null")' if "null" in kinds else f"({text})"
    is_deep = number.count("_") >= _MAX_NESTED
    if kinds == {"object"} and own <= {"type", "properties", "required"} and "properties" in schema and not is_deep:
        return f'"{{" ({_gemma_entries(writer, form, number, name, _properties_of(writer, name, schema))})'
    items = schema.get("items")
    if kinds == {"array"} and own <= {"type", "items"} and isinstance(items, dict) and items:
        shared = {part: schema[part] for part in _SHARED if part in schema}
        writer.rule(f"item_{number}: {_gemma_value(writer, form, f'{number}_i', name, {**items, **shared})}")
        return f'"[" (item_{number} ("," item_{number})*)? "]"'
    writer.rule(f"value_{number}: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}")
    return f"value_{number}"


def _resolved(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema that a schema refers to, if it is nothing but a reference to one of the tool's definitions."""
    shared = {part: schema[part] for part in _SHARED if part in schema}
    found = re.fullmatch(r"#/(\$defs|definitions)/([^/~%]+)", str(schema.get("$ref")))
    if found is None or schema.keys() - _NOTES - {"$ref", "definitions", "components"}:
        return schema
    target = shared.get(found[1], {}).get(found[2])
    return {**target, **shared} if isinstance(target, dict) else schema


def _glm(writer: _Writer) -> str:
    key_tag, key_end, value_tag = (writer.markup(tag) for tag in (glm.KEY, glm.KEY_END, glm.VALUE))
    calls = []
    for number, name in enumerate(writer.names):
        parts = [literal(name)]
        for i, (key, schema, is_required) in enumerate(_properties(writer, name)):
            _check_key(writer, name, key)
            value = _parameter(writer, f"{number}_{i}", name, schema, glm.VALUE_END)
            pair = f"{_LINE} {key_tag} {literal(key)} {key_end} {_LINE} {value_tag} {value}"
            parts.append(pair if is_required else f"({pair})?")
        calls.append(" ".join([*parts, _LINE]))
    writer.rule(f"call: {' | '.join(calls)}")
    opening, closing = (writer.markup(tag) for tag in (glm.OPENING, glm.CLOSING))
    more = f" ({_LINE} {opening} call {closing})*" if writer.use.parallel else ""
    return writer.text_or(glm.OPENING, f"call {closing}{more}")


# GLM 4.5 breaks lines between the tags of a call, and later models do not.
_LINE = '"\\n"?'


def _check_key(writer: _Writer, name: str, key: str) -> None:
    if re.search(r"[<>\n]|^\s|\s$", key):
        raise _not_held(writer, name, f"'{key[:64]}' is no name of a parameter")


# Members of a schema that do not restrict a value.
_NOTES = frozenset({"description", "title", "default", "examples", "deprecated", "$comment", "$schema", "$id", "$defs"})


def _parameter(
    writer: _Writer,
    number: str,
    name: str,
    schema: Mapping[str, Any],
    tag: str,
    *,
    before: str = "",
    after: str = "",
    start: str = "",
    never: str = "",
) -> str:
    """A value before its end tag, and the tag with the texts `before` and `after` it. Strings are raw, other values
    JSON. Strings follow the text `start`; free ones do not begin with `never`."""
    kinds = types_of(schema)
    own = schema.keys() - _NOTES - {"definitions", "components"}
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    is_token = writer.has_token(tag)
    # What ends the value: a token behind it, or a text that is part of its terminal.
    text_end, token_end = f"{before}{tag}{after}", ""
    if is_token:
        text, rest = writer.split(tag)
        text_end, token_end = f"{before}{text}", f" {writer.markup(rest + after)}"
    if kinds and "string" not in kinds:
        writer.rule(f"value_{number}: %json {json.dumps({**schema, 'x-guidance': _JSON_OPTIONS})}")
        end = f" {literal(text_end)}" if text_end else ""
        return f"value_{number}{end}{token_end}"
    if values is not None and own <= {"type", "enum", "const"}:
        if not all(isinstance(value, str) or value is None for value in values):
            raise _not_held(writer, name, "texts and other values in one enum")
        shown = ["null" if value is None else value for value in values]
        if any(tag in value for value in shown):
            raise _not_held(writer, name, f"{tag} in an enum")
        return "(" + " | ".join(literal(start + value + text_end) for value in shown) + ")" + token_end
    begin, end, inner = (_text_in_lark(text) for text in (start, text_end, tag))
    ends = "" if is_token else rf"{inner}(?s:.*)"
    parts = [rf"/{begin}(?s:.*){end}/", rf"~/(?s:.*){ends}{inner}(?s:.*)/"]
    least = 0
    if kinds <= {"string"}:
        if extra := own - {"type", "pattern", "minLength", "maxLength"}:
            raise _not_held(writer, name, f"{min(extra)} of a text")
        least, most = schema.get("minLength", 0), schema.get("maxLength", "")
        if least or most != "":
            parts.append(rf"/{begin}(?s:.{{{least},{most}}}){end}/")
        if "pattern" in schema:
            parts.append(rf"/{begin}{between_slashes(_whole_pattern(writer, name, str(schema['pattern'])))}{end}/")
    elif not _may_be_any_text(schema, own):
        raise _not_held(writer, name, "a restricted text beside other types")
    if never:
        parts.append(rf"~/{_text_in_lark(never)}(?s:.*)/")
    terminal = f"VALUE_{number.upper()}"
    writer.rule(f"{terminal}: {' & '.join(parts)}")
    # A terminal is never empty.
    may_be_empty = is_token and not text_end and not least and "pattern" not in schema
    return f"{terminal}{'?' if may_be_empty else ''}{token_end}"


def _may_be_any_text(schema: Mapping[str, Any], own: Set[str]) -> bool:
    """Whether one of the alternatives of a schema is any text."""
    if own == {"type"}:
        return True
    if own not in ({"anyOf"}, {"oneOf"}):
        return False
    options = [one for one in schema[next(iter(own))] if isinstance(one, dict)]
    return any(one.get("type") == "string" and one.keys() - _NOTES == {"type"} for one in options)


def _whole_pattern(writer: _Writer, name: str, pattern: str) -> str:
    """An expression of a schema, which may match anywhere in a text, as one for the whole text."""
    found = re.fullmatch(r"\^(\(\?:.*\)|[^|]*)\$", pattern, re.DOTALL)
    if found is not None and not found[1].endswith("\\"):
        return f"(?:{found[1]})"
    if re.search(r"[|^$]", pattern):
        raise _not_held(writer, name, f"the pattern '{pattern[:64]}'")
    return rf"(?s:.*)(?:{pattern})(?s:.*)"


_SHARED = ("$defs", "definitions", "components")


def _text_in_lark(text: str) -> str:
    """A text as an expression that Lark writes between slashes."""
    return re.escape(text).replace("\\\n", r"\n").replace("/", r"\/")


def _properties(writer: _Writer, name: str) -> list[tuple[str, Mapping[str, Any], bool]]:
    """Name, schema and whether it is required, of each argument of a tool."""
    return _properties_of(writer, name, writer.use.schemas[name])


def _properties_of(writer: _Writer, name: str, schema: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], bool]]:
    """As `_properties`, for the schema of an object."""
    known = {"type", "properties", "required", "additionalProperties", "definitions", "components", "strict"}
    if extra := schema.keys() - known - _NOTES:
        raise _not_held(writer, name, f"{min(extra)} of its arguments")
    properties, required = schema.get("properties", {}), schema.get("required", ())
    if not isinstance(properties, dict) or not isinstance(required, list | tuple):
        raise _not_held(writer, name, "its properties")
    if extra := {str(key) for key in required} - properties.keys():
        raise _not_held(writer, name, f"the required argument '{min(extra)[:64]}', which is not among its properties")
    shared = {part: schema[part] for part in _SHARED if part in schema}
    return [
        (key, {**(one if isinstance(one, dict) else {}), **shared}, key in required) for key, one in properties.items()
    ]


def _not_held(writer: _Writer, name: str, what: str) -> StatusError:
    """The error for a schema that cannot be enforced in this format."""
    tools = writer.form.output.tools
    parser = "" if tools is None else tools.name
    message = f"strict in tools cannot be enforced for '{name}' by a model that writes calls like {parser}: {what}"
    return unsupported("tools", f"{message}; leave strict out")


def _described(kind: type[_T], answer: Callable[[_Writer, _T], str]) -> dict[str, _Answer]:
    """The families with a description of this kind."""

    def of(description: _T) -> _Answer:
        return lambda writer: answer(writer, description)

    return {name: of(one.steps) for name, one in TOOL_FORMATS.items() if isinstance(one.steps, kind)}


_ANSWERS: Mapping[str, _Answer] = {
    "gpt-oss": _gpt_oss,
    "llama3": _llama3,
    "mistral": _mistral,
    "phi4": _phi4,
    **_described(JsonTags, _json_tags),
    **_described(MarkedJson, _marked_json),
}
"""With any schema."""
_OPTIONAL_ANSWERS: Mapping[str, _Answer] = {
    "glm": _glm,
    "olmo3": _olmo3,
    "pythonic": _pythonic,
    **_described(XmlCalls, _xml_calls),
    **_described(GemmaCalls, _gemma),
}
"""With arguments of which each has a schema of its own. Required calls are in the format `hermes`."""
