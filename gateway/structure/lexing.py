"""Decides whether a longest-match lexer splits every text in the same way as a grammar of characters. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.gateway.structure.gbnf import ROOT, Alt, Chars, Node, Ranges, Ref, Repeat, Seq, Term, union

# --- what regular trees match -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Shape:
    """Properties of the texts that a regular tree matches. The sets may contain too much, never too little."""

    nullable: bool
    first: Ranges
    """Characters that texts begin with."""
    inner: Ranges
    """Characters at later places."""
    more: Ranges
    """Characters that can follow a complete text in a longer one."""


_NOTHING = _Shape(True, (), (), ())


def _then(one: _Shape, two: _Shape) -> _Shape:
    first = union([*one.first, *(two.first if one.nullable else ())])
    inner = union([*one.inner, *two.first, *two.inner])
    more = union([*two.more, *([*two.first, *one.more] if two.nullable else ())])
    if _meet(one.more, two.first):  # the end of the first part is ambiguous
        more = inner
    return _Shape(one.nullable and two.nullable, first, inner, more)


def _either(one: _Shape, two: _Shape) -> _Shape:
    first = union([*one.first, *two.first])
    inner = union([*one.inner, *two.inner])
    more = union([*one.more, *two.more, *(two.first if one.nullable else ()), *(one.first if two.nullable else ())])
    return _Shape(one.nullable or two.nullable, first, inner, inner if _meet(one.first, two.first) else more)


def _again(one: _Shape, least: int, most: int | None) -> _Shape:
    if most == 0:
        return _NOTHING
    nullable = one.nullable or least == 0
    if most == 1:
        return _Shape(nullable, one.first, one.inner, union([*one.more, *(one.first if nullable else ())]))
    inner = union([*one.inner, *one.first])
    more = inner if _meet(one.more, one.first) else one.more
    if nullable or least != most:
        more = union([*more, *one.first])
    return _Shape(nullable, one.first, inner, more)


class Shapes:
    """Computes the shapes of regular trees with these rules."""

    def __init__(self, rules: Mapping[str, Node]) -> None:
        self._rules = rules
        self._known: dict[str, _Shape] = {}

    def of(self, node: Node) -> _Shape:
        """The automaton of a regular tree."""
        if isinstance(node, Chars):
            return _Shape(False, node.ranges, (), ())
        if isinstance(node, Ref):
            if node.name not in self._known:
                self._known[node.name] = self.of(self._rules[node.name])
            return self._known[node.name]
        if isinstance(node, Repeat):
            return _again(self.of(node.item), node.least, node.most)
        assert isinstance(node, Seq | Alt)
        shapes = [self.of(item) for item in node.items]
        found = _NOTHING if isinstance(node, Seq) else shapes.pop(0)
        for one in shapes:
            found = _then(found, one) if isinstance(node, Seq) else _either(found, one)
        return found


def _meet(one: Ranges, other: Ranges) -> bool:
    """Whether some character is in both."""
    i = j = 0
    while i < len(one) and j < len(other):
        if one[i][0] <= other[j][1] and other[j][0] <= one[i][1]:
            return True
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return False


# --- what follows what ------------------------------------------------------------------------------------------------


class Lexing:
    """Which terminals may follow one another, to decide whether a lexer splits every text as the grammar does."""

    def __init__(self, shapes: Shapes, parts: Mapping[str, Node]) -> None:
        self._parts = parts
        self._firsts: dict[str, frozenset[Term]] = dict.fromkeys(parts, frozenset())
        self._nullable: dict[str, bool] = dict.fromkeys(parts, False)
        self._behind: dict[str, frozenset[Term]] = dict.fromkeys(parts, frozenset())
        self._follow: dict[Term, frozenset[Term]] = {}
        self._shape_of = shapes.of
        while self._grew():
            pass
        while self._followed():
            pass

    def is_exact(self) -> bool:
        """Whether no terminal can match characters that may belong to the next one."""
        places = {self._firsts[ROOT], *self._follow.values()}
        shapes = {term: self._shape_of(term.node) for term in self._follow}
        next_chars = {
            term: union([one for after in follow for one in shapes[after].first])
            for term, follow in self._follow.items()
        }
        if any(_meet(shape.more, next_chars[term]) for term, shape in shapes.items()):
            return False
        pairs = {(one, other) for place in places for one in place for other in place if one is not other}
        return not any(
            _meet(shapes[one].first, shapes[other].first) and _meet(shapes[other].inner, next_chars[one])
            for one, other in pairs
        )

    def _grew(self) -> bool:
        before = dict(self._firsts), dict(self._nullable)
        for name, part in self._parts.items():
            self._firsts[name], self._nullable[name] = self._first(part)
        return before != (self._firsts, self._nullable)

    def _first(self, part: Node) -> tuple[frozenset[Term], bool]:
        if isinstance(part, Term):
            return frozenset((part,)), self._shape_of(part.node).nullable
        if isinstance(part, Ref):
            return self._firsts[part.name], self._nullable[part.name]
        if isinstance(part, Repeat):
            firsts, nullable = self._first(part.item)
            return firsts, nullable or part.least == 0
        assert isinstance(part, Seq | Alt)
        found: frozenset[Term] = frozenset()
        nullables = []
        for item in part.items:
            firsts, nullable = self._first(item)
            found |= firsts
            nullables.append(nullable)
            if isinstance(part, Seq) and not nullable:
                break
        return found, all(nullables) if isinstance(part, Seq) else any(nullables)

    def _followed(self) -> bool:
        before = dict(self._behind), dict(self._follow)
        for name, part in self._parts.items():
            self._walk(part, self._behind[name])
        return before != (self._behind, self._follow)

    def _walk(self, part: Node, behind: frozenset[Term]) -> None:
        if isinstance(part, Term):
            self._follow[part] = self._follow.get(part, frozenset()) | behind
        elif isinstance(part, Ref):
            self._behind[part.name] |= behind
        elif isinstance(part, Repeat):
            again = self._first(part.item)[0] if part.most != 1 else frozenset[Term]()
            self._walk(part.item, behind | again)
        elif isinstance(part, Alt):
            for item in part.items:
                self._walk(item, behind)
        elif isinstance(part, Seq):
            for item in reversed(part.items):
                self._walk(item, behind)
                firsts, nullable = self._first(item)
                behind = firsts | behind if nullable else firsts
