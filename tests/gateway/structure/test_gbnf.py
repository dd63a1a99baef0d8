"""Grammars in GBNF derive the same texts after they are translated, by the worker's compiler."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from headrace.gateway.structure.gbnf import GrammarError, is_gbnf
from headrace.gateway.structure.lark import lark_of

EOS = 256
JSON = r"""
# Objects, arrays and scalars, with white space where it is usual.
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") space
object ::= "{" space ( string ":" space value ("," space string ":" space value)* )? "}" space
array  ::= "[" space (
    value ("," space value)*   # on lines of its own
  )? "]" space
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\/bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" space
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9]{1,3})? space
space  ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = """
root  ::= (sum "=" space term "\\n")+
sum   ::= term ([-+*/] space term)*
term  ::= name | digits | "(" space sum ")" space
name ::= [a-z] [a-z0-9_]* space
digits ::= [0-9]+ space
space ::= [ \\t\\n]*
"""
CASES: dict[str, tuple[str, list[str], list[str]]] = {
    "texts": ('root ::= "yes" | "no" | "maybe\\n"', ["yes", "no", "maybe\n"], ["", "y", "yesno", "maybe"]),
    "a grammar of another server": (
        'root ::= city | description\ncity ::= "London" | "Paris"\ndescription ::= city " is " status\n'
        'status ::= "the capital of " country\ncountry ::= "England" | "France"',
        ["London", "Paris is the capital of France"],
        ["London is", "Rome"],
    ),
    "json": (
        JSON,
        ['{}', '{"a": [1, -2.5e3, {"b": null}], "c\\u00e9": "x\\"y/\\n"}', '{"a":[]}\n  ', "{ }"],
        ["[]", '{"a"}', '{"a": 01}', '{"a": "\x01"}', "{}  ", "{"],
    ),
    "a space that belongs to two rules": (
        SUMS,
        ["a=1\n", "a + (b2*3) = 4 \n\n", "x=y\nz=(1)\n"],
        ["a=1", "a+=1\n", "a=(1\n"],
    ),
    "letters in front of a word of letters": ('root ::= [a-z]* "end"', ["end", "endend", "bendend"], ["en", "endx"]),
    "the same, with a recursion beside it": (
        'root ::= [a-z]* "end" tail\ntail ::= "" | "(" tail ")"',
        ["end", "enqend", "endend(())"],
        ["end(", "en()"],
    ),
    "a text that begins another one": (
        'root ::= "<" root ">" | "ab" "c" root | "a" "bd" | "."',
        [".", "abd", "<abd>", "abc<.>", "abcabd"],
        ["ab", "abc", "<.", "a."],
    ),
    "left recursion": ('root ::= root "+" one | one\none ::= "1" | "(" root ")"', ["1", "1+(1+1)"], ["", "+1", "(1"]),
    "counts": (
        'root ::= [0-9]{3} "-" [a-f]{1,2} "x"{2,} "y"? nest{0,1}\nnest ::= "(" nest{1,2} ")" | "n"',
        ["123-axx", "123-abxxxxyn", "123-axx(n)", "123-axx(n(nn))"],
        ["12-axx", "123-ax", "123-abcxx", "123-axxnn", "123-axx(nnn)"],
    ),
    "classes": (
        'root ::= [^a-c\\]] [\\]\\\\^-] . [é-ü€]',
        ["d]xé", "é\\\n€", "^^^ö", "z-😀ü"],
        ["a]xé", "]]xé", "dbxé", "d]xe"],
    ),
    "escapes": ('root ::= "\\x41\\u00e9\\U0001F600\\t\\"" "\\\\"', ['Aé😀\t"\\'], ['Aé😀\t"']),
    "any character": ("root ::= .+ \"!\"", ["a!", "é\n!!"], ["!", "a"]),
    "nothing": ('root ::= a "x"\na ::= | "(" a ")"', ["x", "()x", "(())x"], ["", "(x"]),
    "lines": ('root ::=\n  "a"\n  | "b" more # either\nmore ::= "c"\n  "d"\n', ["a", "bcd"], ["b", "bc"]),
    "names": ('root ::= a-b_C.1\na-b_C.1 ::= "x"', ["x"], ["y"]),
    "indirect recursion": ('root ::= a\na ::= "x" b?\nb ::= "y" c\nc ::= a | "."', ["x", "xyx", "xyxy."], ["xy", "y"]),
}  # fmt: skip


class Bytes:
    """A vocabulary of single bytes and an end of sequence."""

    def __init__(self) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [b"<eos>"]
        self.special_token_ids = [EOS]
        self.eos_token_id = EOS
        self.bos_token_id = None

    def __call__(self, raw: bytes) -> list[int]:
        return list(raw)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return LLTokenizer(TokenizerWrapper(Bytes()))


def derives(tokenizer: Any, grammar: str, text: str) -> bool:
    matcher = LLMatcher(tokenizer, grammar)
    assert not matcher.get_error()
    assert not matcher.get_grammar_warnings()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


@pytest.mark.parametrize("name", CASES)
def test_the_same_texts_are_derived(tokenizer: Any, name: str) -> None:
    grammar, within, without = CASES[name]
    assert is_gbnf(grammar)
    lark = lark_of(grammar)
    assert [text for text in within if not derives(tokenizer, lark, text)] == []
    assert [text for text in without if derives(tokenizer, lark, text)] == []


def test_what_is_not_recursive_is_one_terminal() -> None:
    assert lark_of('root ::= a | "-" a\na ::= [0-9]+').startswith("start: T0\n")


def test_runs_of_a_recursive_grammar_are_terminals_where_that_is_exact() -> None:
    json_rules = [line for line in lark_of(JSON).splitlines() if line.startswith("r")]
    assert len(json_rules) == 3  # objects, arrays and values; the rest are terminals
    sums = lark_of(SUMS)
    assert not [line for line in sums.splitlines() if line.startswith("T") and not line.endswith("]/")]


@pytest.mark.parametrize(
    ("grammar", "complaint"),
    [
        ("", "there is no rule named root"),
        ('start ::= "a"', "there is no rule named root"),
        ("root ::= a", "rule 'root' uses 'a', which is no rule"),
        ('root ::= "a"\nroot ::= "b"', "line 2: there are two rules named 'root'"),
        ('root ::= "a', "line 1: a text is not closed"),
        ("root ::= [a", "line 1: a class is not closed"),
        ("root ::= []", "line 1: a class has no characters"),
        ("root ::= [z-a]", "line 1: a range of characters ends before it begins"),
        ('root ::= ("a"', "line 1: ')' is missing"),
        ('root ::= "a")', "line 1: unexpected ')'"),
        ('root ::= "\\q"', r"line 1: \q is no escape"),
        ('root ::= "\\u12"', r"line 1: \u needs 4 hexadecimal digits"),
        ('root ::= "\\ud800"', r"line 1: \ud800 is no character"),
        ('root ::= "a"{3,2}', "line 1: a repetition's greatest count is less than its least"),
        ('root ::= "a"{}', "line 1: a repetition must be like"),
        ('root ::= "a"{' + " " * 16_000, "line 1: a repetition must be like"),
        ('root ::= "a"{' + "0" * 16_000, "line 1: a repetition must be like"),
        (f'root ::= "a"{{{"9" * 5000}}}', "line 1: a repetition counts to at most 10000"),
        (f'root ::= "a"{{1,{"9" * 5000}}}', "line 1: a repetition counts to at most 10000"),
        ("\n\nroot ::= <think> .", "line 3: references to tokens are not supported"),
        ('root ::= (= "a") "b"', "line 1: look-ahead"),
        ('root ::= TagDispatch(("a", b))', "line 1: functions such as TagDispatch(...) are not supported"),
        ("root ::= 'a'", "line 1: unexpected '''"),
        ("root ::= " + "(" * 100 + '"a"' + ")" * 100, "groups are nested more than"),
        ("root ::= " + "a " * 40_000, "more than 16384 characters"),
    ],
)
def test_what_cannot_be_expressed_is_refused_with_the_reason(grammar: str, complaint: str) -> None:
    with pytest.raises(GrammarError) as caught:
        lark_of(grammar)
    assert complaint in str(caught.value)


def test_long_chains_of_rules_are_translated_or_refused() -> None:
    chain = "root ::= r0\n" + "".join(f"r{i} ::= r{i + 1} | r{i}\n" for i in range(400)) + 'r400 ::= "x"\n'
    with_all_characters = lark_of(chain)
    assert with_all_characters.count("\n") > 400
    regular = "root ::= r0\n" + "".join(f'r{i} ::= "{i}" r{i + 1}\n' for i in range(400)) + 'r400 ::= "x"\n'
    assert lark_of(regular).startswith("start: T0")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("root ::= x", True),
        ("  a-b\t::= x", True),
        ('start: "::="', False),
        ('start: a\na: "x ::= y"', False),
        ("start: /root ::=/", False),
    ],
)
def test_gbnf_is_told_from_lark(text: str, expected: bool) -> None:
    assert is_gbnf(text) is expected
