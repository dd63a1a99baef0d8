"""Structural tags become grammars that allow free text, and hold what is between the tags."""

from __future__ import annotations

from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from headrace.gateway.structure.tags import lark_of_tags
from headrace.protos.status import Reason, StatusError

EOS = 256
CITY = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
NUMBER = {"type": "integer"}


class _Bytes:
    """A vocabulary of single bytes and an end of sequence."""

    def __init__(self) -> None:
        self.tokens = [bytes([i]) for i in range(256)] + [b"<eos>"]
        self.special_token_ids = [EOS]
        self.eos_token_id = EOS
        self.bos_token_id = None

    def __call__(self, raw: bytes) -> list[int]:
        return list(raw)


def accepts(value: dict[str, Any], text: str) -> bool:
    """Whether this may be a whole answer."""
    matcher = LLMatcher(LLTokenizer(TokenizerWrapper(_Bytes())), lark_of_tags(value, "response_format"))
    assert not matcher.get_error()
    assert not matcher.get_grammar_warnings()
    tokens = list(text.encode())
    return bool(matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting())


STRUCTURES = {
    "type": "structural_tag",
    "structures": [
        {"begin": "<function=weather>", "schema": CITY, "end": "</function>"},
        {"begin": "<function=count>", "schema": NUMBER, "end": "</function>"},
        {"begin": "[num/", "schema": NUMBER, "end": "]"},
    ],
    "triggers": ["<function=", "[num/"],
}


@pytest.mark.parametrize(
    ("text", "is_valid"),
    [
        ("", True),
        ("Only text, with < and [ and <func in it.", True),
        ('So: <function=weather>{"city":"Köln"}</function> and on', True),
        ("<function=count>3</function><function=count>4</function>[num/5] end", True),
        ('<function=weather>{"town":"Köln"}</function>', False),
        ("<function=weather>3</function>", False),
        ("<function=other>3</function>", False),
        ("<function=count>3", False),
        ("<function=count>3</function> <function=", False),
        ("[num/x]", False),
        ("[num/1] <function=count>2</function>", True),
    ],
)
def test_text_is_free_until_a_trigger(text: str, is_valid: bool) -> None:
    assert accepts(STRUCTURES, text) is is_valid


def format_of(**fields: Any) -> dict[str, Any]:
    return {"type": "structural_tag", "format": fields}


TAG = {"type": "tag", "begin": "<a>", "content": {"type": "json_schema", "json_schema": NUMBER}, "end": "</a>"}


@pytest.mark.parametrize(
    ("value", "valid", "wrong"),
    [
        (format_of(type="const_string", value="a/b\n"), ["a/b\n"], ["a/b", ""]),
        (format_of(type="regex", pattern="x/[0-9]+"), ["x/12"], ["x12"]),
        (format_of(type="any_text"), ["", "any\nthing"], []),
        (format_of(**TAG), ["<a>7</a>"], ["<a>x</a>", "7", "<a>7</a>!"]),
        (
            format_of(type="tag", begin="<t>", content={"type": "any_text"}, end="</t>"),
            ["<t>free < text</t>"],
            ["<t>open", "<t>a</t>b"],
        ),
        (
            format_of(
                type="sequence",
                elements=[
                    {"type": "tag", "begin": "<t>", "content": {"type": "any_text"}, "end": "</t>"},
                    {"type": "or", "elements": [TAG, {"type": "const_string", "value": "none"}]},
                ],
            ),
            ["<t>because</t><a>1</a>", "<t></t>none"],
            ["<t>x</t>", "<a>1</a>"],
        ),
        (
            format_of(type="triggered_tags", triggers=["<a"], tags=[TAG], at_least_one=True),
            ["well <a>1</a>", "<a>1</a><a>2</a> ok"],
            ["well", "<a>x</a>"],
        ),
        (
            format_of(type="triggered_tags", triggers=["<a"], tags=[TAG], at_least_one=True, stop_after_first=True),
            ["well <a>1</a>"],
            ["well", "<a>1</a> more"],
        ),
        (
            format_of(type="tags_with_separator", tags=[TAG], separator=", "),
            ["", "<a>1</a>", "<a>1</a>, <a>2</a>"],
            ["<a>1</a><a>2</a>", "<a>1</a>, "],
        ),
        (
            format_of(type="tags_with_separator", tags=[TAG], separator="", at_least_one=True, stop_after_first=True),
            ["<a>1</a>"],
            ["", "<a>1</a><a>2</a>"],
        ),
    ],
)
def test_each_part_of_a_format(value: dict[str, Any], valid: list[str], wrong: list[str]) -> None:
    assert [text for text in valid if not accepts(value, text)] == []
    assert [text for text in wrong if accepts(value, text)] == []


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ({"structures": [], "triggers": ["<"]}, "response_format.structures"),
        ({"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": []}, "response_format.triggers"),
        (
            {"structures": [{"begin": "<a>", "schema": {}, "end": ""}], "triggers": ["["]},
            "response_format.structures[0].begin",
        ),
        ({"structures": [{"begin": "<a>", "end": ""}], "triggers": ["<"]}, "response_format.structures[0]"),
        ({"format": {"type": "qwen_xml_parameter"}}, "response_format.format.type"),
        (
            {"format": {"type": "sequence", "elements": [{"type": "any_text"}, TAG]}},
            "response_format.format.elements[0]",
        ),
        ({"format": {"type": "tag", "begin": "<", "end": ">"}}, "response_format.format.content"),
        ({"format": {"type": "regex"}}, "response_format.format.pattern"),
        ({"format": "x"}, "response_format.format"),
    ],
)
def test_what_is_malformed_is_refused_by_name(value: dict[str, Any], field: str) -> None:
    with pytest.raises(StatusError) as caught:
        lark_of_tags({"type": "structural_tag", **value}, "response_format")
    assert caught.value.field == field
    assert caught.value.reason in (Reason.INVALID_FIELD, Reason.UNSUPPORTED)


def test_too_deep_a_format_is_refused() -> None:
    part: dict[str, Any] = {"type": "any_text"}
    for _ in range(20):
        part = {"type": "or", "elements": [part]}
    with pytest.raises(StatusError, match="levels"):
        lark_of_tags({"format": part}, "response_format")
