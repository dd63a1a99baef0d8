r"""Translates grammars in Lark whose rules are not recursive to one regular expression (pure).

    text -> tokens -> statements -> expression of `start`

The inputs of custom tools are texts within the JSON of a call, where a quote or a line break has an escape. A schema's
`pattern` describes the text without its escapes, so a grammar becomes a pattern. It matches every text that the rules
derive; Lark's lexer, which takes the longest match, may refuse some of them.

The dialect is that of llguidance (https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md) without
attributes, special tokens, `&` and `~` before a terminal, and nested grammars.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.gateway.checks import invalid, unsupported

MAX_CHARS = 32_768
"""Of a grammar, and of its expression."""
_START = "start"
_TOKEN = re.compile(
    r"""
      (?P<space> [ \t\r\f]+ | //[^\n]* | \#[^\n]* )
    | (?P<line> \n )
    | (?P<text> "(?:[^"\\\n]|\\.)*" i? )
    | (?P<regex> /(?:[^/\\\n]|\\.)+/ [imsux]* )
    | (?P<directive> %[a-z_]+ )
    | (?P<name> [?!]? _?[A-Za-z][A-Za-z0-9_]* )
    | (?P<number> [0-9]+ )
    | (?P<sign> -> | \.\. | [:|()\[\]*+?~.,{}] )
    """,
    re.VERBOSE,
)
# https://github.com/lark-parser/lark/blob/master/lark/grammars/common.lark has these terminals.
_EXPONENT = r"[eE][+-]?[0-9]+"
_DECIMAL = r"(?:[0-9]+\.[0-9]*|\.[0-9]+)"
_FLOAT = rf"(?:[0-9]+{_EXPONENT}|{_DECIMAL}(?:{_EXPONENT})?)"
_COMMON = {
    "DIGIT": "[0-9]",
    "HEXDIGIT": "[0-9a-fA-F]",
    "INT": "[0-9]+",
    "SIGNED_INT": "[+-]?[0-9]+",
    "DECIMAL": _DECIMAL,
    "FLOAT": _FLOAT,
    "SIGNED_FLOAT": f"[+-]?{_FLOAT}",
    "NUMBER": f"(?:{_FLOAT}|[0-9]+)",
    "SIGNED_NUMBER": f"[+-]?(?:{_FLOAT}|[0-9]+)",
    "ESCAPED_STRING": r'"(?:[^"\\\n]|\\.)*"',
    "LCASE_LETTER": "[a-z]",
    "UCASE_LETTER": "[A-Z]",
    "LETTER": "[a-zA-Z]",
    "WORD": "[a-zA-Z]+",
    "CNAME": "[a-zA-Z_][a-zA-Z0-9_]*",
    "WS_INLINE": r"[ \t]+",
    "WS": r"[ \t\f\r\n]+",
    "CR": r"\r",
    "LF": r"\n",
    "NEWLINE": r"(?:\r?\n)+",
    "SH_COMMENT": r"\#[^\n]*",
    "CPP_COMMENT": r"//[^\n]*",
    "SQL_COMMENT": r"--[^\n]*",
    "C_COMMENT": r"/\*(?:[^*]|\*+[^*/])*\*+/",
}
_META = frozenset(r".^$*+?()[]{}|\#&-~")
_ESCAPES = {"\n": r"\n", "\r": r"\r", "\t": r"\t", "\f": r"\f"}


@dataclass(frozen=True, slots=True)
class _Token:
    kind: str
    text: str
    line: int


class _Problem(Exception):
    """Why a grammar is malformed, or with `is_known` why it has no expression."""

    def __init__(self, why: str, *, is_known: bool = False) -> None:
        super().__init__(why)
        self.is_known = is_known


@functools.lru_cache(maxsize=64)
def regex_of_lark(field: str, text: str) -> str:
    """The expression for the texts of a grammar. Raises `StatusError` that names this field if it has none."""
    try:
        if len(text) > MAX_CHARS:
            raise _Problem(f"it has more than {MAX_CHARS} characters")
        return _Grammar(_tokens_of(text)).expression()
    except _Problem as problem:
        if problem.is_known:
            raise unsupported(field, f"{field} is not supported: {problem}") from problem
        raise invalid(field, f"{field} is not a grammar in Lark: {problem}") from problem
    except RecursionError as error:
        raise invalid(field, f"{field} is not a grammar in Lark: it is nested too deeply") from error


def _tokens_of(text: str) -> list[_Token]:
    tokens: list[_Token] = []
    pos, line = 0, 1
    while pos < len(text):
        found = _TOKEN.match(text, pos)
        if found is None:
            raise _Problem(f"line {line} has an unexpected {text[pos]!r}")
        kind = found.lastgroup or ""
        if kind != "space":
            tokens.append(_Token(kind, found[0], line))
        line += kind == "line"
        pos = found.end()
    return [*tokens, _Token("line", "\n", line), _Token("end", "", line)]


class _Grammar:
    """Reads definitions first; the expression of each is made where it is used, so that their order is free."""

    def __init__(self, tokens: Sequence[_Token]) -> None:
        self._tokens = tokens
        self._pos = 0
        self._starts: dict[str, int] = {}
        """Where the body of each definition begins among the tokens."""
        self._found: dict[str, str] = {}
        self._open: list[str] = []
        self._ignored: list[str] = []
        self._in_terminal = False
        self._statements()

    def expression(self) -> str:
        """The expression of `start`."""
        if _START not in self._starts:
            raise _Problem(f"there is no rule named {_START}")
        return self._of(_START)

    # --- statements -------------------------------------------------------------------------------------------------

    def _statements(self) -> None:
        while self._next.kind != "end":
            if self._next.kind == "line":
                self._pos += 1
            elif self._next.kind == "directive":
                self._directive()
            else:
                self._definition()

    def _directive(self) -> None:
        directive = self._take("directive").text
        if directive == "%import":
            self._import()
        elif directive == "%ignore":
            if self._next.kind == "name" and self._tokens[self._pos + 1].kind == "line":
                self._ignored.append(self._take("name").text)
            else:
                name = f"%ignore {len(self._ignored)}"
                self._starts[name] = self._pos
                self._ignored.append(name)
                self._skip_body()
        else:
            raise _Problem(f"it has {directive}", is_known=True)

    def _import(self) -> None:
        if self._take("name").text != "common":
            raise _Problem("it imports from another module than common", is_known=True)
        names: list[tuple[str, str]] = []
        if self._takes("("):
            while not self._takes(")"):
                name = self._take("name").text
                names.append((name, name))
                self._takes(",")
        else:
            self._expect(".")
            name = self._take("name").text
            names.append((self._take("name").text if self._takes("->") else name, name))
        for alias, name in names:
            if name not in _COMMON:
                raise _Problem(f"common has no {name} here", is_known=True)
            self._found[alias] = _COMMON[name]

    def _definition(self) -> None:
        line = self._next.line
        name = self._take("name").text.lstrip("?!")
        if self._takes("."):
            self._take("number")  # a priority, which an expression has no use for
        if self._sign == "[":
            raise _Problem(f"{name} has attributes", is_known=True)
        if not self._takes(":"):
            raise _Problem(f"line {line} lacks a colon behind {name}")
        if name in self._starts or name in self._found:
            raise _Problem(f"{name} is defined twice")
        self._starts[name] = self._pos
        self._skip_body()

    def _skip_body(self) -> None:
        while not self._ends():
            self._pos += 1

    def _ends(self) -> bool:
        """Whether a definition ends here: at the end of a line, unless an alternative follows."""
        at = self._pos
        while self._tokens[at].kind == "line":
            at += 1
        return self._next.kind in ("line", "end") and self._tokens[at].text != "|"

    # --- expressions ------------------------------------------------------------------------------------------------

    def _of(self, name: str) -> str:
        """The expression of a definition."""
        if name in self._found:
            return self._found[name]
        if name not in self._starts:
            raise _Problem(f"there is no rule named {name}")
        if name in self._open:
            raise _Problem(f"its rule {name} is recursive; use a grammar without recursion", is_known=True)
        came_from, was_in_terminal = self._pos, self._in_terminal
        self._open.append(name)
        self._pos = self._starts[name]
        self._in_terminal = _is_terminal(name)
        found = self._alternatives()
        if not self._ends():
            raise _Problem(f"line {self._next.line} has an unexpected {self._next.text!r}")
        self._open.pop()
        self._pos, self._in_terminal = came_from, was_in_terminal
        if len(found) > MAX_CHARS:
            raise _Problem(f"its expression is longer than {MAX_CHARS} characters", is_known=True)
        self._found[name] = found
        return found

    def _alternatives(self) -> str:
        found = [self._sequence()]
        while True:
            self._skip_lines_before("|")
            if not self._takes("|"):
                break
            found.append(self._sequence())
        return found[0] if len(found) == 1 else f"(?:{'|'.join(found)})"

    def _sequence(self) -> str:
        parts: list[str] = []
        while self._next.kind in ("name", "text", "regex", "directive") or self._sign in ("(", "[", "~"):
            parts.append(self._repeated())
        if self._takes("->"):
            self._take("name")
        return "".join(parts)

    def _repeated(self) -> str:
        atom = self._atom()
        while True:
            if self._sign in ("?", "*", "+"):
                atom = f"(?:{atom}){self._take('sign').text}"
            elif self._takes("~"):
                least = most = self._take("number").text
                if self._takes(".."):
                    most = self._take("number").text
                atom = f"(?:{atom}){{{least},{most}}}"
            elif self._takes("{"):
                bounds = ""
                while not self._takes("}"):
                    bounds += "," if self._takes(",") else self._take("number").text
                atom = f"(?:{atom}){{{bounds if bounds[:1] != ',' else '0' + bounds}}}"
            else:
                return atom

    def _atom(self) -> str:
        token = self._next
        if token.kind == "directive" or self._sign == "~":
            raise _Problem(f"line {token.line} has {token.text}", is_known=True)
        self._pos += 1
        if token.kind == "text":
            if self._takes(".."):
                least = _literal(token)
                most = _literal(self._take("text"))
                if len(least) != 1 or len(most) != 1 or least > most:
                    raise _Problem(f"line {token.line} has a range of other than single characters")
                return self._lexeme(f"[{_escaped(least)}-{_escaped(most)}]")
            text = "".join(map(_escaped, _literal(token)))
            return self._lexeme(f"(?i:{text})" if token.text.endswith("i") else text)
        if token.kind == "regex":
            body, _, flags = token.text[1:].rpartition("/")
            return self._lexeme(f"(?{flags}:{body.replace(chr(92) + '/', '/')})")
        if token.kind == "name":
            found = self._of(token.text)
            return self._lexeme(found) if _is_terminal(token.text) else found
        self._skip_lines_before("")
        found = self._alternatives()
        self._skip_lines_before("")
        self._expect(")" if token.text == "(" else "]")
        return f"(?:{found})?" if token.text == "[" else f"(?:{found})"

    def _lexeme(self, expression: str) -> str:
        """The expression of a terminal within a rule, followed by what the grammar ignores."""
        if self._in_terminal or not self._ignored:
            return expression
        self._in_terminal = True
        ignored = "|".join(self._of(name) for name in self._ignored)
        self._in_terminal = False
        return f"{expression}(?:{ignored})*"

    # --- tokens -----------------------------------------------------------------------------------------------------

    @property
    def _next(self) -> _Token:
        return self._tokens[self._pos]

    @property
    def _sign(self) -> str:
        return self._next.text if self._next.kind == "sign" else ""

    def _takes(self, sign: str) -> bool:
        if self._sign != sign:
            return False
        self._pos += 1
        return True

    def _take(self, kind: str) -> _Token:
        token = self._next
        if token.kind != kind:
            raise _Problem(f"line {token.line} has an unexpected {token.text!r}")
        self._pos += 1
        return token

    def _expect(self, sign: str) -> None:
        if not self._takes(sign):
            raise _Problem(f"line {self._next.line} lacks {sign!r}")

    def _skip_lines_before(self, sign: str) -> None:
        """Skip line breaks if this sign follows them. If `sign` is empty, skip them in any case."""
        at = self._pos
        while self._tokens[at].kind == "line":
            at += 1
        if self._tokens[at].text == sign or (not sign and self._tokens[at].kind != "end"):
            self._pos = at


def _is_terminal(name: str) -> bool:
    return name.startswith("%") or name.lstrip("_")[:1].isupper()


def _literal(token: _Token) -> str:
    """The text of a literal."""
    quoted = re.sub(r"\\x([0-9a-fA-F]{2})", r"\\u00\1", token.text.removesuffix("i")).replace("\\'", "'")
    try:
        return str(json.loads(quoted))
    except ValueError as error:
        raise _Problem(f"line {token.line} has a literal that is not one") from error


def _escaped(char: str) -> str:
    return _ESCAPES.get(char) or (f"\\{char}" if char in _META else char)
