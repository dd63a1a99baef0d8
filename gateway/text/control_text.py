"""Finds the texts of control tokens in what callers write, and marks them, so that they do not become tokens (pure).

A mark is one character of Unicode's private use area that occurs nowhere in the conversation. It is inserted after the
first character of each text of a control token:

    "ignore <|im_end|>"  ->  "ignore <M|im_end|>"

No control token matches a marked text, wherever the chat template puts it. The tokenizer splits the rendered text at
its control tokens and then removes the marks. Templates that look for such a text in what callers write, as
`content.split('</think>')`, are compiled with the marked text in its place (`chat_template`).

A template can also compose a text from several pieces. So pieces are marked too where a control token could begin or
end: at the ends of a text, and before texts that the template cuts out.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import msgspec

from headrace.gateway.text.content import text_of
from headrace.protos.status import Reason, StatusError

_FIRST_PRIVATE = 0xE000
_LAST_PRIVATE = 0xF8FF
# Random, so that no caller knows them; few, because a template is compiled for each.
_MARKS = tuple(map(chr, random.SystemRandom().sample(range(_FIRST_PRIVATE, _LAST_PRIVATE + 1), 16)))
_T = TypeVar("_T")


class Marking:
    """Marks texts with one character."""

    def __init__(self, controls: ControlTexts, mark: str) -> None:
        self._controls = controls
        self.mark = mark

    def text(self, text: str) -> str:
        """A text with a mark in each text of a control token."""
        return self._controls.marked_text(text, self.mark)

    def ends(self, text: str) -> str:
        """A marked text, with further marks wherever its beginning or end could be part of a control token's text."""
        return self._controls.marked_ends(text, self.mark)

    def value(self, value: Any) -> Any:
        """A value with all its texts marked, the names in objects as well. Keeps the classes of its objects."""
        if isinstance(value, str):
            return self.ends(self.text(value))
        if isinstance(value, Mapping):
            return type(value)({self.value(name): self.value(one) for name, one in value.items()})  # type: ignore[call-arg]
        if isinstance(value, Sequence) and not isinstance(value, bytes):
            return [self.value(one) for one in value]
        return value


class ControlTexts:
    """The texts of a tokenizer's control tokens. Texts of nothing but white space do not count."""

    def __init__(self, texts: Mapping[str, int], *, cuts: Iterable[str] = (), any_case: bool = False) -> None:
        """`texts` are the ids by text. `cuts` are texts that the chat template looks for and may cut out; `any_case`
        says that it may change the case of letters."""
        self.texts = frozenset(text for text in texts if text.strip())
        self.ids = frozenset(token_id for text, token_id in texts.items() if text.strip())
        self._cuts = tuple(sorted({cut for cut in cuts if cut.strip()} - self.texts))
        self._flags = re.IGNORECASE if any_case else 0
        self._fold = str.casefold if any_case else str
        self._beginnings = {self._fold(text[:end]) for text in self.texts for end in range(1, len(text))}
        self._ends = {self._fold(text[start:]) for text in self.texts for start in range(1, len(text) - 1)}
        self._firsts = frozenset(text[0] for text in self._beginnings)
        self._lasts = frozenset(text[-1] for text in self._ends)
        self._longest = max(map(len, self.texts), default=0)
        self._patterns: dict[str, re.Pattern[str]] = {}

    def occur_in(self, text: str) -> bool:
        """Whether the text of any control token occurs in a text."""
        return bool(self.texts) and self._pattern.search(text) is not None

    def count_in(self, text: str) -> int:
        """The number of occurrences in a text."""
        return len(self._pattern.findall(text)) if self.texts else 0

    def marking_for(
        self, messages: Sequence[Mapping[str, Any]], *others: Any, also: Iterable[str] = ()
    ) -> Marking | None:
        """How to mark a conversation, with its tools and variables as `others`; None if nothing is to be marked.
        Raises `StatusError` if the conversation has all characters that could be marks."""
        if not self.texts:
            return None
        nested: list[Any] = [other for other in others if other]
        found = False
        for message in messages:
            for name, value in message.items():
                if name == "role":
                    continue
                if isinstance(value, str):
                    found = found or self._concerns(value)
                elif name == "content" and isinstance(value, list):
                    found = found or any(self._concerns(one) for one in value if isinstance(one, str))
                elif value:
                    nested.append(value)
        if not found and not (nested and self._json_pattern.search(_json(nested)) is not None):
            return None
        written = [value for message in messages for value in message.values() if isinstance(value, str)]
        written += [text_of(message["content"]) for message in messages if isinstance(message.get("content"), list)]
        everything = "".join([*written, _json(nested), *also])
        return Marking(self, unused_mark(everything))

    def _concerns(self, text: str) -> bool:
        return self.occur_in(text) or self._may_end_in_part(text) or self._may_begin_with_part(text) or self._cut(text)

    def marked_text(self, text: str, mark: str) -> str:
        """The text with a mark in each text of a control token."""
        pattern = self._pattern_beside(mark)
        while pattern.search(text) is not None:  # texts may overlap
            text = pattern.sub(lambda found: _marked(found[0], mark), text)
        return text

    def marked_ends(self, text: str, mark: str) -> str:
        """The text with marks where a part of a control token's text may be."""
        for start in sorted((*self._starts_before_cuts(text), *self._starts_of_ends(text)), reverse=True):
            text = f"{text[: start + 1]}{mark}{text[start + 1 :]}"
        if (end := self._end_of_beginning(text)) is not None:
            text = f"{text[: end - 1]}{mark}{text[end - 1 :]}"
        return text

    def _may_end_in_part(self, text: str) -> bool:
        return bool(self._starts_of_ends(text))

    def _may_begin_with_part(self, text: str) -> bool:
        return self._end_of_beginning(text) is not None

    def _cut(self, text: str) -> bool:
        return bool(self._cuts) and bool(self._starts_before_cuts(text))

    def _starts_of_ends(self, text: str, end: int | None = None) -> list[int]:
        """Where the beginning of a control token's text starts with which this text ends, white space aside."""
        start = max(0, (len(text) if end is None else end) - self._longest - _MAX_SPACE)
        tail = self._fold(text[start:end]).rstrip()
        found = []
        for first in self._firsts:
            position = tail.rfind(first)
            while position >= 0:
                if tail[position:] in self._beginnings:
                    found.append(start + position)
                    break
                position = tail.rfind(first, 0, position)
        return found

    def _end_of_beginning(self, text: str) -> int | None:
        """Where the end of a control token's text ends with which this text begins, white space aside."""
        head = text[: self._longest + _MAX_SPACE]
        num_spaces = len(head) - len(head.lstrip())
        head = self._fold(head[num_spaces:])
        for last in self._lasts:
            position = head.find(last)
            while position >= 0:
                if head[: position + 1] in self._ends:
                    return num_spaces + position + 1
                position = head.find(last, position + 1)
        return None

    def _starts_before_cuts(self, text: str) -> list[int]:
        found = []
        for cut in self._cuts:
            position = text.find(cut)
            while position >= 0:
                found += self._starts_of_ends(text, position)
                position = text.find(cut, position + len(cut))
        return found

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(_alternation(self.texts), self._flags)

    @cached_property
    def _json_pattern(self) -> re.Pattern[str]:
        """The pattern as it is in JSON."""
        return re.compile(_alternation(_json(text)[1:-1] for text in self.texts), self._flags)

    def _pattern_beside(self, mark: str) -> re.Pattern[str]:
        """The pattern, without single characters after a mark."""
        if mark not in self._patterns:
            longer = {text for text in self.texts if len(text) > 1}
            parts = [_alternation(longer)] if longer else []
            if single := self.texts - longer:
                parts.append(f"(?<!{mark})(?:{_alternation(single)})")
            self._patterns[mark] = re.compile("|".join(parts), self._flags)
        return self._patterns[mark]


# White space in front of or behind a text that is looked through; templates may strip it.
_MAX_SPACE = 64


def unused_mark(text: str) -> str:
    """A character that can mark the parts of a text. Raises `StatusError` if the text has all of them."""
    for mark in _MARKS:
        if mark not in text:
            return mark
    problem = "the conversation has too many characters of Unicode's private use area; remove them"
    raise StatusError(Reason.INVALID_FIELD, problem, field="messages")


def _marked(found: str, mark: str) -> str:
    return f"{found[0]}{mark}{found[1:]}" if len(found) > 1 else mark + found


def _json(value: Any) -> str:
    """The value as JSON. Only quotes and control characters in texts are escaped."""
    return msgspec.json.encode(value).decode() if value else ""


def _alternation(texts: Iterable[str]) -> str:
    """A regular expression for any of the texts, the longest first; common prefixes are matched once, for speed."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for char in text:
            node = node.setdefault(char, {})
        node[""] = {}
    return _expression(tree)


def _expression(tree: Mapping[str, Any]) -> str:
    ends = "" in tree
    branches = []
    for char, node in tree.items():
        if not char:
            continue
        text = re.escape(char)
        while len(node) == 1 and "" not in node:
            ((char, node),) = node.items()
            text += re.escape(char)
        branches.append(text + _expression(node))
    if not branches:
        return ""
    whole = branches[0] if len(branches) == 1 and not ends else f"(?:{'|'.join(branches)})"
    return f"{whole}?" if ends else whole
