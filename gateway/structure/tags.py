"""Structural tags: text in which some parts, each between a beginning and an end, have a form (pure).

    {"type": "structural_tag", "triggers": ["<function="],
     "structures": [{"begin": "<function=now>", "schema": {...}, "end": "</function>"}]}

Text is free until a trigger, with which the beginning of a tag must start; then the tag must be completed. The newer
form has a `format` of nested parts instead. Both become a grammar in llguidance's dialect of Lark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace.gateway.checks import invalid, unsupported

MAX_TAGS = 128
MAX_DEPTH = 16
_COMPACT = {"whitespace_flexible": False, "item_separator": ",", "key_separator": ":", "lenient": False}
# An escape of an expression, which stays unchanged; or characters that have a meaning between the slashes of Lark.
_DELIMITER = re.compile(r"\\.|/|\n", re.DOTALL)
_ESCAPED = {"/": r"\/", "\n": r"\n"}


def between_slashes(expression: str) -> str:
    """A regular expression as Lark writes it between slashes."""
    return _DELIMITER.sub(lambda found: _ESCAPED.get(found[0], found[0]), expression)


def lark_of_tags(value: Mapping[str, Any], field: str) -> str:
    """The grammar of a structural tag. Raises `StatusError` for one that is malformed or cannot be expressed."""
    writer = _Writer()
    if "format" in value:
        start = writer.part(value["format"], f"{field}.format", 0)
    else:
        start = writer.of_structures(value, field)
    return "\n".join([f"start: {start}", *writer.rules, ""])


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self) -> None:
        self.rules: list[str] = []
        self._num_tags = 0

    def of_structures(self, value: Mapping[str, Any], field: str) -> str:
        """The earlier form: `structures` and `triggers`."""
        tags = []
        for place, one in enumerate(_list_of(value, "structures", field)):
            where = f"{field}.structures[{place}]"
            if not isinstance(one, dict) or "schema" not in one:
                raise invalid(where, f"{where} must have begin, schema and end")
            tags.append({**one, "content": {"type": "json_schema", "json_schema": one["schema"]}})
        triggers = _texts_of(value, "triggers", field)
        return self._triggered(tags, triggers, f"{field}.structures", 0)

    def part(self, value: Any, field: str, depth: int) -> str:
        """Any part of a format, as an expression of rules."""
        if not isinstance(value, dict) or not isinstance(value.get("type"), str):
            raise invalid(field, f"{field} must be an object with a type")
        if depth > MAX_DEPTH:
            raise invalid(field, f"{field} is nested in more than {MAX_DEPTH} levels")
        write = self._PARTS.get(value["type"])
        if write is None:
            known = ", ".join(sorted(self._PARTS))
            raise unsupported(f"{field}.type", f"{field}.type '{value['type'][:32]}' is not supported, only {known}")
        return write(self, value, field, depth)

    def _const(self, value: Mapping[str, Any], field: str, depth: int) -> str:
        return _literal(_text_of(value, "value", field))

    def _json(self, value: Mapping[str, Any], field: str, depth: int) -> str:
        schema = value.get("json_schema", value.get("schema"))
        if schema is True:
            schema = {}
        if not isinstance(schema, dict) or "x-guidance" in schema:
            raise invalid(f"{field}.json_schema", f"{field}.json_schema must be a JSON schema, an object")
        return self._rule(f"%json {json.dumps({**schema, 'x-guidance': _COMPACT})}")

    def _regex(self, value: Mapping[str, Any], field: str, depth: int) -> str:
        pattern = _text_of(value, "pattern", field)
        return self._rule(f"/{between_slashes(pattern)}/")

    def _any_text(self, value: Mapping[str, Any], field: str, depth: int) -> str:
        return self._rule("/(?s:.*)/")

    def _sequence(self, value: Mapping[str, Any], field: str, depth: int) -> str:
        parts = _list_of(value, "elements", field)
        for place, one in enumerate(parts[:-1]):
            if isinstance(one, dict) and one.get("type") in ("any_text", "triggered_tags"):
                where = f"{field}.elements[{place}]"
                raise unsupported(where, f"{where}: free text has an end only inside of a tag, or as the last element")
        return " ".join(
            f"({self.part(one, f'{field}.elements[{place}]', depth + 1)})" for place, one in enumerate(parts)
        )

    def _or(self, value: Mapping[str, Any], field: str, depth: int) -> str:
        parts = _list_of(value, "elements", field)
        return " | ".join(
            f"({self.part(one, f'{field}.elements[{place}]', depth + 1)})" for place, one in enumerate(parts)
        )

    def _tag(self, value: Mapping[str, Any], field: str, depth: int) -> str:
        return self._after(value, _text_of(value, "begin", field), field, depth)

    def _triggers(self, value: Mapping[str, Any], field: str, depth: int) -> str:
        tags, triggers = _list_of(value, "tags", field), _texts_of(value, "triggers", field)
        return self._triggered(
            tags,
            triggers,
            f"{field}.tags",
            depth + 1,
            needs_one=value.get("at_least_one") is True,
            ends_after_one=value.get("stop_after_first") is True,
        )

    def _separated(self, value: Mapping[str, Any], field: str, depth: int) -> str:
        tags = _list_of(value, "tags", field)
        one = " | ".join(
            f"({self._tag(_object(tag, f'{field}.tags[{place}]'), f'{field}.tags[{place}]', depth + 1)})"
            for place, tag in enumerate(tags)
        )
        rule = self._rule(one)
        several = rule
        if value.get("stop_after_first") is not True:
            separator = _text_of(value, "separator", field, may_be_empty=True)
            several = f"{rule} ({_literal(separator)} {rule})*" if separator else f"{rule}+"
        return several if value.get("at_least_one") is True else f"({several})?"

    def _triggered(
        self,
        tags: Sequence[Any],
        triggers: Sequence[str],
        field: str,
        depth: int,
        *,
        needs_one: bool = False,
        ends_after_one: bool = False,
    ) -> str:
        """Free text with tags in it. Each begins with a trigger, which text does not contain."""
        self._num_tags += len(tags)
        if self._num_tags > MAX_TAGS:
            raise invalid(field, f"{field}: there are more than {MAX_TAGS} tags")
        behind: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for place, tag in enumerate(tags):
            where = f"{field}[{place}]"
            begin = _text_of(_object(tag, where), "begin", where)
            trigger = max((one for one in triggers if begin.startswith(one)), key=len, default=None)
            if trigger is None:
                raise invalid(f"{where}.begin", f"{where}.begin must start with one of the triggers")
            behind[trigger].append(f"({self._after(tag, begin[len(trigger) :], where, depth)})")
        parts = []
        for trigger, rests in behind.items():
            if rests:
                before = self._rule("/(?s:.*)/", f"[suffix={_literal(trigger)}]")
                parts.append(f"{before} ({' | '.join(rests)})")
        tagged = self._rule(" | ".join(parts))
        pattern = "|".join(re.escape(trigger) for trigger in triggers)
        free = self._rule(f"/(?s:.*)/ & ~/(?s:.*){between_slashes(f'({pattern})')}(?s:.*)/", is_terminal=True)
        if ends_after_one:
            return tagged if needs_one else f"{tagged} | {free}"
        return f"{tagged}{'+' if needs_one else '*'} {free}"

    def _after(self, tag: Mapping[str, Any], begin: str, field: str, depth: int) -> str:
        """A tag from this rest of its beginning on."""
        end = _text_of(tag, "end", field, may_be_empty=True)
        content = tag.get("content")
        head = f"{_literal(begin)} " if begin else ""
        if isinstance(content, dict) and content.get("type") == "any_text":
            if not end:
                raise invalid(f"{field}.end", f"{field}.end must not be empty behind any_text")
            return head + self._rule("/(?s:.*)/", f"[suffix={_literal(end)}]")
        found = self.part(content, f"{field}.content", depth + 1)
        return f"{head}({found}){' ' + _literal(end) if end else ''}"

    def _rule(self, body: str, attributes: str = "", *, is_terminal: bool = False) -> str:
        name = f"{'TEXT' if is_terminal else 'part'}_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    _PARTS: Mapping[str, Callable[[_Writer, Mapping[str, Any], str, int], str]] = {
        "const_string": _const,
        "json_schema": _json,
        "regex": _regex,
        "any_text": _any_text,
        "sequence": _sequence,
        "or": _or,
        "tag": _tag,
        "triggered_tags": _triggers,
        "tags_with_separator": _separated,
    }


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _object(value: Any, field: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise invalid(field, f"{field} must be an object with begin, content and end")
    return value


def _text_of(value: Mapping[str, Any], name: str, field: str, *, may_be_empty: bool = False) -> str:
    text = value.get(name)
    if not isinstance(text, str) or (not text and not may_be_empty):
        raise invalid(f"{field}.{name}", f"{field}.{name} must be a text{'' if may_be_empty else ', not an empty one'}")
    return text


def _list_of(value: Mapping[str, Any], name: str, field: str) -> list[Any]:
    found = value.get(name)
    if not isinstance(found, list) or not 1 <= len(found) <= MAX_TAGS:
        raise invalid(f"{field}.{name}", f"{field}.{name} must be a list of 1 to {MAX_TAGS}")
    return found


def _texts_of(value: Mapping[str, Any], name: str, field: str) -> list[str]:
    found = _list_of(value, name, field)
    if not all(isinstance(text, str) and text for text in found):
        raise invalid(f"{field}.{name}", f"{field}.{name} must be texts, none of them empty")
    return list(dict.fromkeys(found))
