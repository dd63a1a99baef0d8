"""Translates grammars in GBNF to the dialect of Lark that workers take (pure).

    text -> rules (`gbnf`) -> Lark

GBNF has no tokens: any character may belong to any rule. Lark has a lexer, which takes the longest match. The
translation must derive the same texts, so it uses the first of three forms that is exact:

1. No rule is recursive: the grammar is one regular expression.
2. Parts without recursion are terminals, whole runs of them or each by itself, if `Lexing.is_exact`.
3. Every character is a terminal. This is exact for all grammars, and slow for large ones.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property

from headrace.gateway.structure.gbnf import (
    ROOT,
    SURROGATES,
    Alt,
    Chars,
    GrammarError,
    Node,
    Ref,
    Repeat,
    Seq,
    Term,
    rules_of,
)
from headrace.gateway.structure.lexing import Lexing, Shapes

MAX_CHARS = 16_384
# In larger grammars, every character is a terminal, because the time of the analysis grows faster than the grammar.
MAX_ANALYSED_CHARS = 4096
MAX_ANALYSED_RULES = 32


@functools.lru_cache(maxsize=16)
def lark_of(text: str) -> str:
    """Translate the grammar to the dialect of Lark that workers accept. Raises `GrammarError`."""
    if len(text) > MAX_CHARS:
        raise GrammarError(f"it has more than {MAX_CHARS} characters")
    try:
        grammar = _Grammar(rules_of(text))
        return grammar.lark(may_analyse=len(text) <= MAX_ANALYSED_CHARS)
    except RecursionError as error:
        raise GrammarError("its rules are nested too deeply") from error


class _Grammar:
    def __init__(self, rules: Mapping[str, Node]) -> None:
        if ROOT not in rules:
            raise GrammarError(f"there is no rule named {ROOT}")
        for name, node in rules.items():
            missing = next((ref for ref in _refs(node) if ref not in rules), None)
            if missing is not None:
                raise GrammarError(f"rule '{name}' uses '{missing}', which is no rule")
        self._rules = {name: rules[name] for name in _reachable(rules)}
        self._numbers = {name: i for i, name in enumerate(self._rules)}
        self._shapes = Shapes(self._rules)
        self._terms: dict[Node, Term] = {}

    def lark(self, *, may_analyse: bool) -> str:
        """The grammar in the first form that is exact."""
        if ROOT in self._regular:
            return self._written({ROOT: self._term(Ref(ROOT))})
        if may_analyse and len(self._rules) <= MAX_ANALYSED_RULES:
            recursive = {name: node for name, node in self._rules.items() if name not in self._regular}
            for takes_runs in (True, False):
                parts = {name: self._part(node, takes_runs) for name, node in recursive.items()}
                if Lexing(self._shapes, parts).is_exact():
                    return self._written(parts)
        return self._written({name: self._split(node) for name, node in self._rules.items()})

    def _term(self, node: Node) -> Term:
        return self._terms.setdefault(node, Term(node))

    @cached_property
    def _regular(self) -> frozenset[str]:
        """Rules from which no recursion can be reached."""
        regular: dict[str, bool] = {}
        uses = {name: frozenset(_refs(node)) for name, node in self._rules.items()}
        users: dict[str, list[str]] = {name: [] for name in uses}
        for name, used in uses.items():
            for one in used:
                users[one].append(name)
        num_open = {name: len(used) for name, used in uses.items()}
        ready = [name for name, number in num_open.items() if number == 0]
        while ready:
            name = ready.pop()
            regular[name] = True
            for user in users[name]:
                num_open[user] -= 1
                if num_open[user] == 0:
                    ready.append(user)
        return frozenset(regular)

    def _is_regular(self, node: Node) -> bool:
        return all(name in self._regular for name in _refs(node))

    def _part(self, node: Node, takes_runs: bool) -> Node:
        """The tree with its regular parts as terminals; with `takes_runs`, neighbouring parts become one."""
        if self._is_regular(node):
            return self._term(node)
        if isinstance(node, Seq):
            parts: list[Node] = []
            for is_regular, run in itertools.groupby(node.items, self._is_regular):
                items = tuple(run)
                joined = is_regular and takes_runs
                parts += [self._term(Seq(items))] if joined else [self._part(item, takes_runs) for item in items]
            return Seq(tuple(parts))
        if isinstance(node, Alt):
            return Alt(tuple(self._part(item, takes_runs) for item in node.items))
        if isinstance(node, Repeat):
            return Repeat(self._part(node.item, takes_runs), node.least, node.most)
        return node

    def _written(self, parts: Mapping[str, Node]) -> str:
        """Write the Lark rules for `parts` and the terminals that they need."""
        names = {name: "start" if name == ROOT else f"r{self._numbers[name]}" for name in parts}
        terminals: dict[Term, str] = {}
        lines = [f"{names[name]}: {_lark(part, names, terminals)}" for name, part in parts.items()]
        regular: dict[str, str] = {}
        lines += [f"{terminal}: {_lark(term.node, regular)}" for term, terminal in terminals.items()]
        num_written = 0
        while num_written < len(regular):
            for name, terminal in list(regular.items())[num_written:]:
                num_written += 1
                lines.append(f"{terminal}: {_lark(self._rules[name], regular)}")
        return "\n".join([*lines, ""])

    def _split(self, node: Node) -> Node:
        """The tree with every character as a terminal."""
        if isinstance(node, Chars):
            return self._term(node)
        if isinstance(node, Repeat):
            return Repeat(self._split(node.item), node.least, node.most)
        if isinstance(node, Seq | Alt):
            return type(node)(tuple(self._split(item) for item in node.items))
        return node


def _refs(node: Node) -> Iterator[str]:
    if isinstance(node, Ref):
        yield node.name
    elif isinstance(node, Repeat):
        yield from _refs(node.item)
    elif isinstance(node, Seq | Alt):
        for item in node.items:
            yield from _refs(item)


def _reachable(rules: Mapping[str, Node]) -> list[str]:
    found = [ROOT]
    pending = [ROOT]
    while pending:
        for name in _refs(rules[pending.pop()]):
            if name not in found:
                found.append(name)
                pending.append(name)
    return found


def _lark(part: Node, names: dict[str, str], terminals: dict[Term, str] | None = None) -> str:
    """An expression of Lark. Rules and terminals that it needs get names, unless they have them.

    Without `terminals` it is part of a terminal itself.
    """
    if isinstance(part, Term):
        assert terminals is not None
        return _char(part.node) if isinstance(part.node, Chars) else terminals.setdefault(part, f"T{len(terminals)}")
    if isinstance(part, Ref):
        return names.setdefault(part.name, f"R{len(names)}")
    if isinstance(part, Chars):
        return _char(part)
    if isinstance(part, Repeat):
        count = {(0, None): "*", (1, None): "+", (0, 1): "?"}.get((part.least, part.most))
        if count is None:
            count = f"{{{part.least},{'' if part.most is None else part.most}}}"
        return f"({_lark(part.item, names, terminals)}){count}"
    if not part.items:
        return '""'
    if isinstance(part, Alt):
        return "(" + " | ".join(_lark(item, names, terminals) for item in part.items) + ")"
    expressions = [_lark(item, names, terminals) for item in part.items]
    if terminals is None:
        expressions = list(_joined(expressions))
    return "(" + " ".join(expressions) + ")" if len(expressions) > 1 else expressions[0]


def _joined(expressions: Sequence[str]) -> Iterator[str]:
    """The expressions, with neighbouring characters as one text."""
    text = ""
    for one in expressions:
        if one.startswith('"') and one != '""':
            text += json.loads(one)
            continue
        if text:
            yield json.dumps(text, ensure_ascii=False)
        text = ""
        yield one
    if text:
        yield json.dumps(text, ensure_ascii=False)


@functools.lru_cache(maxsize=256)
def _char(chars: Chars) -> str:
    """A character as a text, a class as an expression."""
    (first, last), *others = chars.ranges
    if first == last and not others:
        return json.dumps(chr(first), ensure_ascii=first < 32 or first == 127)
    ranges = []
    for low, high in chars.ranges:
        # The ends of a range must be characters; code points between them need not be.
        low = SURROGATES[1] + 1 if SURROGATES[0] <= low <= SURROGATES[1] else low
        high = SURROGATES[0] - 1 if SURROGATES[0] <= high <= SURROGATES[1] else high
        ranges.append(rf"\x{{{low:x}}}" + (rf"-\x{{{high:x}}}" if high > low else ""))
    return f"/[{''.join(ranges)}]/"
