"""Reads grammars in GBNF, the notation of llama.cpp and XGrammar (pure).

text -> rules, each a tree of Chars, Seq, Alt, Repeat and Ref
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

ROOT = "root"
MAX_RULES = 1000
MAX_DEPTH = 64
MAX_REPEATS = 10_000
LAST_CHAR = 0x10FFFF
SURROGATES = (0xD800, 0xDFFF)


class GrammarError(ValueError):
    """The grammar is not GBNF, or cannot be expressed. The text has the reason and the line."""


# --- trees ------------------------------------------------------------------------------------------------------------

Ranges: TypeAlias = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Chars:
    """One character in any of these ranges of code points, which are sorted and disjoint."""

    ranges: Ranges


@dataclass(frozen=True)
class Seq:
    """A sequence; it may be empty."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Alt:
    """Any one of them."""

    items: tuple[Node, ...]


@dataclass(frozen=True)
class Repeat:
    """A repetition; `most` is None if there is no maximum."""

    item: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the rule of this name."""

    name: str


@dataclass(frozen=True, eq=False, slots=True)
class Term:
    """A terminal that stands for a tree without recursion. Equal trees have the same terminal. Terminals occur only in
    trees that are being written as Lark."""

    node: Node


Node: TypeAlias = "Chars | Seq | Alt | Repeat | Ref | Term"


# --- reading ----------------------------------------------------------------------------------------------------------

_HEAD = re.compile(r"([A-Za-z_][A-Za-z0-9_.-]*)\s*::=")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_SPACE = re.compile(r"(?:\s+|#[^\n]*)+")
_COUNT = re.compile(r"\{\s*+(\d*+)\s*+(,?)\s*+(\d*+)\s*+\}")
_ESCAPES = {"n": 10, "t": 9, "r": 13, **{char: ord(char) for char in "\\\"'[]-/^."}}
_HEX_DIGITS = {"x": 2, "u": 4, "U": 8}
_LINE_HEAD = re.compile(r"^[ \t]*[A-Za-z_][A-Za-z0-9_.-]*\s*::=", re.MULTILINE)


def is_gbnf(text: str) -> bool:
    """Whether a text has rules as GBNF writes them, `name ::= ...`, which Lark does not."""
    return _LINE_HEAD.search(text) is not None


def rules_of(text: str) -> dict[str, Node]:
    """The trees of a grammar's rules by name. Raises `GrammarError`."""
    return _Reader(text).rules()


class _Reader:
    """Reads rules from a text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._pos = 0
        self._depth = 0

    def rules(self) -> dict[str, Node]:
        """All rules by name."""
        found: dict[str, Node] = {}
        self._skip()
        while self._pos < len(self._text):
            head = _HEAD.match(self._text, self._pos)
            if head is None:
                self._fail("a rule like name ::= ... is expected")
            name = head[1]
            if name in found:
                self._fail(f"there are two rules named '{name}'")
            if len(found) == MAX_RULES:
                self._fail(f"there are more than {MAX_RULES} rules")
            self._pos = head.end()
            found[name] = self._alternatives()
            if self._pos < len(self._text) and _HEAD.match(self._text, self._pos) is None:
                self._fail(f"unexpected '{self._text[self._pos]}'")
        return found

    def _fail(self, what: str) -> NoReturn:
        line = self._text.count("\n", 0, self._pos) + 1
        raise GrammarError(f"line {line}: {what}")

    def _skip(self) -> None:
        found = _SPACE.match(self._text, self._pos)
        if found is not None:
            self._pos = found.end()

    def _alternatives(self) -> Node:
        found = [self._sequence()]
        while self._text.startswith("|", self._pos):
            self._pos += 1
            found.append(self._sequence())
        return found[0] if len(found) == 1 else Alt(tuple(found))

    def _sequence(self) -> Node:
        items: list[Node] = []
        self._skip()
        while self._pos < len(self._text) and self._text[self._pos] not in "|)":
            if _HEAD.match(self._text, self._pos) is not None:
                break
            items.append(self._repeated(self._element()))
            self._skip()
        return items[0] if len(items) == 1 else Seq(tuple(items))

    def _element(self) -> Node:
        char = self._text[self._pos]
        if char == '"':
            return self._literal()
        if char == "[":
            return self._char_class()
        if char == "(":
            return self._group()
        if char == ".":
            self._pos += 1
            return Chars(((0, LAST_CHAR),))
        name = _NAME.match(self._text, self._pos)
        if name is not None:
            self._pos = name.end()
            if self._text.startswith("(", self._pos):
                self._fail(f"functions such as {name[0]}(...) are not supported")
            return Ref(name[0])
        if char in "<!":
            return self._fail("references to tokens are not supported; write their text")
        return self._fail(f"unexpected '{char}'")

    def _group(self) -> Node:
        if self._text.startswith("(=", self._pos):
            self._fail("look-ahead (=...) is not supported")
        self._depth += 1
        if self._depth > MAX_DEPTH:
            self._fail(f"groups are nested more than {MAX_DEPTH} deep")
        self._pos += 1
        inside = self._alternatives()
        if not self._text.startswith(")", self._pos):
            self._fail("')' is missing")
        self._pos += 1
        self._depth -= 1
        return inside

    def _literal(self) -> Node:
        self._pos += 1
        chars: list[Node] = []
        while self._next("a text is not closed by '\"'") != '"':
            code = self._char()
            chars.append(Chars(((code, code),)))
        self._pos += 1
        return chars[0] if len(chars) == 1 else Seq(tuple(chars))

    def _char_class(self) -> Node:
        self._pos += 1
        is_negated = self._text.startswith("^", self._pos)
        self._pos += is_negated
        ranges: list[tuple[int, int]] = []
        while self._next("a class is not closed by ']'") != "]":
            first = last = self._char()
            if self._text.startswith("-", self._pos) and not self._text.startswith("-]", self._pos):
                self._pos += 1
                self._next("a class is not closed by ']'")
                last = self._char()
            if last < first:
                self._fail("a range of characters ends before it begins")
            ranges.append((first, last))
        self._pos += 1
        found = union(ranges)
        if is_negated:
            found = _without(found)
        if not found:
            self._fail("a class has no characters")
        return Chars(found)

    def _next(self, otherwise: str) -> str:
        if self._pos >= len(self._text):
            self._fail(otherwise)
        return self._text[self._pos]

    def _char(self) -> int:
        """The code point of the next character or escape."""
        char = self._text[self._pos]
        self._pos += 1
        if char != "\\":
            return ord(char)
        kind = self._next("an escape is not complete")
        self._pos += 1
        if kind in _HEX_DIGITS:
            digits = self._text[self._pos : self._pos + _HEX_DIGITS[kind]]
            if len(digits) < _HEX_DIGITS[kind] or re.fullmatch("[0-9a-fA-F]+", digits) is None:
                self._fail(f"\\{kind} needs {_HEX_DIGITS[kind]} hexadecimal digits")
            self._pos += len(digits)
            code = int(digits, 16)
            if code > LAST_CHAR or SURROGATES[0] <= code <= SURROGATES[1]:
                self._fail(f"\\{kind}{digits} is no character")
            return code
        if kind not in _ESCAPES:
            self._fail(f"\\{kind} is no escape")
        return _ESCAPES[kind]

    def _repeated(self, item: Node) -> Node:
        """The element with its repetition operators."""
        while True:
            char = self._text[self._pos : self._pos + 1]
            if char in ("*", "+", "?"):
                self._pos += 1
                item = Repeat(item, int(char == "+"), 1 if char == "?" else None)
            elif char == "{":
                item = self._counted(item)
            else:
                return item

    def _counted(self, item: Node) -> Node:
        found = _COUNT.match(self._text, self._pos)
        if found is None or not (found[1] or found[3]):
            self._fail("a repetition must be like {2}, {2,} or {2,5}")
        # More digits than this always exceed the maximum.
        least, greatest = (int((found[group] or "0").lstrip("0")[:9] or 0) for group in (1, 3))
        most = (greatest if found[3] else None) if found[2] else least
        if max(least, most or 0) > MAX_REPEATS:
            self._fail(f"a repetition counts to at most {MAX_REPEATS}")
        if most is not None and most < least:
            self._fail("a repetition's greatest count is less than its least")
        self._pos = found.end()
        return Repeat(item, least, most)


# --- sets of characters -----------------------------------------------------------------------------------------------


def union(ranges: Sequence[tuple[int, int]]) -> Ranges:
    """The same characters in ranges that are sorted and disjoint."""
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = (found[-1][0], max(found[-1][1], last))
        else:
            found.append((first, last))
    return tuple(found)


def _without(ranges: Ranges) -> Ranges:
    """All characters except these."""
    found = []
    start = 0
    for first, last in ranges:
        if start < first:
            found.append((start, first - 1))
        start = last + 1
    return (*found, (start, LAST_CHAR)) if start <= LAST_CHAR else tuple(found)
