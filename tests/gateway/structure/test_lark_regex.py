"""Grammars in Lark without recursion become regular expressions of the same texts."""

from __future__ import annotations

import json
import re

import pytest
from llguidance import LLMatcher

from headrace.gateway.structure.lark_regex import regex_of_lark
from headrace.protos.status import Reason, StatusError
from tests.gateway.chat.test_tool_grammar import Bytes, LLTokenizer, TokenizerWrapper

PATCH = """
start: begin hunk+ end
begin: "*** Begin Patch" LF   // a comment
end: "*** End Patch" LF?

hunk: add | change   # another
add: "*** Add File: " name LF line+
change: "*** Update File: " name LF ("@@" | "@@ " /(.+)/) LF line~1..2
name: /(.+)/
line: "+" /(.*)/ LF -> added
    | "-" /(.*)/ LF
%import common.LF
"""
CASES = [
    (
        PATCH,
        [
            "*** Begin Patch\n*** Add File: a\n+x\n*** End Patch",
            '*** Begin Patch\n*** Update File: "é\\"\n@@ f()\n-\n+\n*** End Patch\n',
        ],
        ["*** Begin Patch\n*** End Patch", "*** Begin Patch\n*** Add File: \n+x\n*** End Patch"],
    ),
    (
        'start: term (SP "+" SP term)*\nterm: INT | "(" INT ")"\nSP: " "\n%import common.INT',
        ["1", "1 + (22)"],
        ["1+2", "", "((1))"],
    ),
    ('?start: A [b] "c"i\nA.2: "a".."c"{2,3}\n!b: "x"|\n', ["abC", "aaaxc", "abc"], ["ac", "abxxc"]),
    ("start: WORD+\n%import common (WORD, WS)\n%ignore WS\n", ["a b", "ab  "], [" a", "1"]),
    ('start: "a" "b"\n%ignore /[ ]/ | "_"\n', ["ab", "a_ b "], ["b"]),
    (r'start: /[^\/"]+/i "\x41\u00e9\n"', ["q\\Aé\n"], ["/Aé\n"]),
    ('start: "a" ~ 2\n', ["aa"], ["a"]),
    ('start: "."{2,} "b"{,2} "c"{3}', ["..ccc", "...bccc"], [".ccc", "aaccc"]),
]


@pytest.mark.parametrize(("grammar", "texts", "others"), CASES)
def test_the_expression_matches_the_texts_of_the_grammar(grammar: str, texts: list[str], others: list[str]) -> None:
    expression = regex_of_lark("f", grammar)
    schema = {
        "type": "object",
        "properties": {"input": {"type": "string", "pattern": f"^(?:{expression})$"}},
        "required": ["input"],
        "x-guidance": {"whitespace_flexible": False},
    }
    for text in [*texts, *others]:
        matcher = LLMatcher(LLTokenizer(TokenizerWrapper(Bytes([]))), f"start: %json {json.dumps(schema)}")
        assert not matcher.get_error()
        raw = list(json.dumps({"input": text}, ensure_ascii=False, separators=(",", ":")).encode())
        is_taken = matcher.try_consume_tokens(raw) == len(raw) and matcher.is_accepting()
        assert is_taken is (text in texts), text
        if "{," not in grammar:
            assert (re.fullmatch(expression, text) is not None) is is_taken


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('start: "(" start ")" | "x"', "its rule start is recursive"),
        ("start: %json {}", "line 1 has %json"),
        ('start: a\na[lazy]: "x"', "a has attributes"),
        ('%llguidance {}\nstart: "a"', "it has %llguidance"),
        ("start: A\n%import common.X (A)", "common has no X here"),
        ("start: A\n%import python.A", "it imports from another module than common"),
        ('start: ~"a"', "line 1 has ~"),
        (
            "start: a a a a\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(30)) + 'a: a0\na30: "xxxx"',
            "longer than",
        ),
    ],
)
def test_what_has_no_expression_is_refused_by_name(grammar: str, problem: str) -> None:
    with pytest.raises(StatusError, match=re.escape(problem)) as caught:
        regex_of_lark("tools[0].x", grammar)
    assert (caught.value.field, caught.value.reason) == ("tools[0].x", Reason.UNSUPPORTED)


@pytest.mark.parametrize(
    ("grammar", "problem"),
    [
        ('a: "x"', "there is no rule named start"),
        ("start: a", "there is no rule named a"),
        ('start: "a', "line 1 has an unexpected"),
        ('start: "a")', "line 1 has an unexpected"),
        ('start: ("a"', "lacks"),
        ('start "a"', "lacks a colon"),
        ('start: "a"\nstart: "b"', "start is defined twice"),
        ('start: "b".."a"', "a range"),
        (r'start: "\q"', "a literal"),
        ("x" * 40_000, "more than"),
        ("start: " + "(" * 5000 + '"a"' + ")" * 5000, "nested too deeply"),
    ],
)
def test_what_is_no_grammar_is_refused_with_its_line(grammar: str, problem: str) -> None:
    with pytest.raises(StatusError, match=re.escape(problem)) as caught:
        regex_of_lark("tools[0].x", grammar)
    assert (caught.value.field, caught.value.reason) == ("tools[0].x", Reason.INVALID_FIELD)
