"""Parsers of all formats of tool calls and reasoning, for any split of the text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.gateway.chat.output_parsers.families import REASONING_FORMATS, TOOL_FORMATS, OutputFormat, OutputParser
from headrace.gateway.chat.output_parsers.output import ArgumentsDelta, CallDelta, ContentDelta, Delta, ReasoningDelta
from tests.gateway.chat.written_calls import call

TOOLS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "options": {"type": "object"},
            "exact": {"type": "boolean"},
            "unit": {"enum": ["C", "F"]},
            "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
    },
    "now": {"type": "object", "properties": {}},
}


@dataclass
class Answer:
    """The answer as a client sees it."""

    content: str
    reasoning: str
    calls: list[tuple[str, str]]


def add_up(deltas: list[Delta]) -> Answer:
    """Join deltas to an answer by the rules of the protocol: calls in order, each followed by its arguments."""
    answer = Answer("", "", [])
    for delta in deltas:
        match delta:
            case ContentDelta(text):
                answer.content += text
            case ReasoningDelta(text):
                answer.reasoning += text
            case CallDelta(index, name):
                assert index == len(answer.calls)
                answer.calls.append((name, ""))
            case ArgumentsDelta(index, text):
                assert index == len(answer.calls) - 1
                assert text
                name, before = answer.calls[index]
                answer.calls[index] = name, before + text
    return answer


def parser_of(family: str, reasoning: str = "none", inside: bool = False, tools: Any = TOOLS) -> OutputParser:
    form = OutputFormat(TOOL_FORMATS.get(family), REASONING_FORMATS.get(reasoning))
    return OutputParser(form, tools, inside_reasoning=inside)


def parse(text: str, family: str, cuts: list[int] | None = None, **options: Any) -> Answer:
    parser = parser_of(family, **options)
    deltas: list[Delta] = []
    ends = sorted({min(cut, len(text)) for cut in cuts or ()} | {len(text)})
    start = 0
    for end in ends:
        deltas += parser.push(text[start:end])
        start = end
    return add_up(deltas + parser.finish())


def args_of(answer: Answer) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in answer.calls]


NESTED = {"city": 'Köln "am" \\Rhein\n😀', "options": {"a": [1, -2.5e3, {"b": None}], "c": True}, "days": 3}
ONE, TWO = {"city": "Paris"}, {"city": "Rome", "days": 2}


FAMILIES = sorted(TOOL_FORMATS)
# Where text in front of a call may stand.
BEFORE = {
    "pythonic": "Let me look.\n",
    "gpt-oss": "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant",
}
cut_positions = st.lists(st.integers(0, 400), max_size=30)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_is_read_and_is_no_content(family: str) -> None:
    answer = parse(call(family, ("get_weather", ONE)), family)
    assert args_of(answer) == [("get_weather", ONE)]
    assert answer.content == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_two_calls_are_read_in_order(family: str) -> None:
    answer = parse(call(family, ("get_weather", ONE), ("get_weather", TWO)), family)
    assert args_of(answer) == [("get_weather", ONE), ("get_weather", TWO)]
    assert answer.content == ""


@pytest.mark.parametrize("family", FAMILIES)
def test_text_in_front_of_a_call_is_content(family: str) -> None:
    text = BEFORE.get(family, "Let me look.\n") + call(family, ("get_weather", ONE))
    answer = parse(text, family)
    assert args_of(answer) == [("get_weather", ONE)]
    assert answer.content == "Let me look."


@pytest.mark.parametrize("family", FAMILIES)
def test_nested_arguments_and_any_character_survive(family: str) -> None:
    assert args_of(parse(call(family, ("get_weather", NESTED)), family)) == [("get_weather", NESTED)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_without_arguments_has_an_empty_object(family: str) -> None:
    assert parse(call(family, ("now", {})), family).calls == [("now", "{}")]


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=25, deadline=None)
@given(cuts=cut_positions, before=st.booleans(), end=st.integers(0, 400))
def test_no_cut_changes_what_is_read(family: str, cuts: list[int], before: bool, end: int) -> None:
    text = call(family, ("get_weather", NESTED), ("now", {}), ("get_weather", TWO))
    text = (BEFORE.get(family, "Let me look.\n") if before else "") + text
    text = text[: max(0, len(text) - end)] if end > 50 else text
    assert parse(text, family, cuts) == parse(text, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_arguments_arrive_while_they_are_written_and_always_begin_valid_json(family: str) -> None:
    text = call(family, ("get_weather", NESTED), ("get_weather", TWO))
    parser = parser_of(family)
    steps = [delta for char in text for delta in parser.push(char)] + parser.finish()
    fragments = [delta for delta in steps if isinstance(delta, ArgumentsDelta)]
    assert len(fragments) >= 5
    whole = add_up(steps).calls
    for index, (_, arguments) in enumerate(whole):
        mine = [delta.text for delta in fragments if delta.index == index]
        assert "".join(mine) == arguments
        json.loads(arguments)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_call_that_is_cut_off_has_the_beginning_of_its_arguments(family: str) -> None:
    text = call(family, ("get_weather", NESTED))
    whole = parse(text, family).calls[0][1]
    shown = 0
    for end in range(len(text)):
        answer = parse(text[:end], family)
        if not answer.calls:
            continue
        shown += 1
        assert answer.content == ""
        assert answer.calls[0][0] == "get_weather"
        assert whole.startswith(answer.calls[0][1])
    assert shown > 20


LOOK_ALIKES: dict[str, list[str]] = {
    "hermes": ["<tool_call>", "<tool_call> is a tag", "<tool_call>{1}</tool_call>", '<tool_call>{"name": 3}', "a < b"],
    "llama3": [
        '{"answer": 42}',
        '{"name": "unknown", "parameters": {}}',
        "{}",
        "[1, 2]",
        '{"name": "now", "age": 3}',
        "<|python_tag|>print(1)",
    ],
    "pythonic": [
        "[1, 2, 3]",
        "[unknown(a=1)]",
        "[now]",
        "[get_weather('Paris')]",
        "[get_weather(city=x)]",
        "[",
        "a[0]",
    ],
    "phi4": ["functools[0]", "functools", 'functools[{"name": ""}]', "functools [1]"],
    "qwen3-coder": ["<tool_call>", "<function", "<function=\n>", "<tool_call>\n<fun>"],
    "glm": [
        "<tool_call>",
        "<tool_call> is a tag",
        "<tool_call>now",
        "<tool_call>now<arg_value>",
        "<tool_call></tool_call>",
    ],
    "mistral": ["[TOOL_CALLS]", "[TOOL_CALLS] none", "[TOOL_CALLS][1]", "[TOOL"],
    "deepseek": ["<｜tool▁call▁begin｜>", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>g h", "<｜tool"],
    "gpt-oss": ["a < b", "<b>", "to be"],
    "granite": ["<|tool_call|>", "<|tool_call|> none", "<|tool_call|>[1]", "<|tool", '[{"name": "now"}]'],
    "nemotron": ["<TOOLCALL>", "<TOOLCALL> is a tag", "<TOOLCALL>[1]</TOOLCALL>", "<TOOL", '[{"name": "now"}]'],
    "jamba": ["<tool_calls>", "<tool_calls> is a tag", "<tool_calls>[1]</tool_calls>", '<tool_calls>[{"name": 3}]'],
    "minimax-m1": ["<tool_calls>", "<tool_calls> is a tag", "<tool_calls>\n1\n</tool_calls>", "<tool_call>"],
    "cohere": ["<|START_ACTION|>", "<|START_ACTION|> none", '<|START_ACTION|>[{"tool_call_id": "0"}]', "<|START"],
    "olmo3": [
        "<function_calls>",
        "<function_calls>\nunknown(a=1)\n</function_calls>",
        "<function_calls>now</function_calls>",
        "<function_calls>get_weather(city=x)",
        "[now()]",
        "now()",
    ],
    "gemma4": [
        "<|tool_call>",
        "<|tool_call>call:",
        "<|tool_call>call:now",
        "<|tool_call>call:now[1]",
        "<|tool_call>{}<tool_call|>",
        "call:now{}",
    ],
    "functiongemma": ["<start_function_call>", "<start_function_call>call:now()", "<start", "call:now{}"],
    "seed-oss": ["<seed:tool_call>", "<function", "<function=\n>", "<seed:tool_call>\n<fun>"],
    "minimax-m2": [
        "<minimax:tool_call>",
        "<minimax:tool_call> is a tag",
        '<invoke name="now"></invoke>',
        "<minimax:tool_call>\n<invoke now>",
        '<minimax:tool_call>\n<invoke name="',
    ],
    "deepseek-v3.2": [
        "<｜DSML｜function_calls>",
        "<｜DSML｜function_calls>\n</｜DSML｜function_calls>",
        '<｜DSML｜invoke name="now"></｜DSML｜invoke>',
        '<｜DSML｜tool_calls><｜DSML｜invoke name="now"></｜DSML｜invoke></｜DSML｜tool_calls>',
    ],
    "deepseek-v4": [
        "<｜DSML｜tool_calls>",
        "<｜DSML｜tool_calls> none",
        '<｜DSML｜invoke name="now"></｜DSML｜invoke>',
    ],
    "step3": [
        "<｜tool_calls_begin｜>",
        "<｜tool_calls_begin｜><｜tool_calls_end｜>",
        "<｜tool_call_begin｜>function<｜tool_sep｜>",
        '<steptml:invoke name="now"></steptml:invoke>',
    ],
    "minicpm5": ["<function", '<function name="unknown"></function>', "<function name=now></function>", "<function>"],
    "kimi-k2": [
        "<|tool_calls_section_begin|>",
        "<|tool_call_begin|>functions.now:0",
        "<|tool_call_begin|>functions.now:0<|tool_call_argument_begin|>none",
        "<|tool_call_begin|>0<|tool_call_argument_begin|>{}",
        "<|tool_calls",
    ],
}


@pytest.mark.parametrize(("family", "text"), [(f, text) for f, texts in LOOK_ALIKES.items() for text in texts])
@pytest.mark.parametrize("around", ["{}", "Look:\n{}\nThat is all. "])
def test_text_that_only_looks_like_a_call_is_content_to_the_letter(family: str, text: str, around: str) -> None:
    if family == "gpt-oss":
        around = "<|channel|>final<|message|>" + around
    whole = around.format(text)
    answer = parse(whole, family)
    assert answer.calls == []
    assert answer.content == whole.removeprefix("<|channel|>final<|message|>")
    assert parse(whole, family, list(range(len(whole)))) == answer


@pytest.mark.parametrize("family", [f for f in FAMILIES if f != "gpt-oss"])
def test_a_call_behind_a_look_alike_is_still_read(family: str) -> None:
    look_alike = LOOK_ALIKES[family][1]
    answer = parse(f"{look_alike}\n{call(family, ('get_weather', ONE))}", family)
    assert args_of(answer) == [("get_weather", ONE)]
    assert answer.content == look_alike


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mixture_of_markup_is_read_alike_under_every_cut(family: str, data: st.DataObject) -> None:
    markup = [*TOOL_FORMATS[family].markers, *LOOK_ALIKES[family], call(family, ("now", {})), "\n", " ", '"', "{", "}"]
    markup += ["]", "[", "\\ud83d", "\\", "é", "😀", '"name"', ":", ",", "now", "1", "tru", "```json", "<think>"]
    text = "".join(data.draw(st.lists(st.sampled_from(markup), max_size=12)))
    cuts = data.draw(cut_positions)
    reasoning = data.draw(st.sampled_from(["none", "think"]))
    assert parse(text, family, cuts, reasoning=reasoning) == parse(text, family, reasoning=reasoning)


@settings(max_examples=100, deadline=None)
@given(text=st.text("ab \n<[{(", max_size=40), family=st.sampled_from([f for f in FAMILIES if f != "gpt-oss"]))
def test_text_without_calls_is_never_changed(text: str, family: str) -> None:
    assert parse(text, family) == Answer(text, "", [])


IN_JSON = ["hermes", "llama3", "phi4", "mistral", "deepseek", "gpt-oss", "granite", "nemotron", "jamba", "minimax-m1"]
IN_JSON += ["cohere", "kimi-k2"]
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(
    arguments=st.dictionaries(st.text(max_size=5), json_values, max_size=4),
    ascii_only=st.booleans(),
    indent=st.sampled_from([None, 1]),
    cuts=cut_positions,
    family=st.sampled_from(IN_JSON),
)
def test_any_json_arguments_arrive_as_they_are(
    arguments: dict[str, Any], ascii_only: bool, indent: int | None, cuts: list[int], family: str
) -> None:
    dumped = json.dumps(arguments, ensure_ascii=ascii_only, indent=indent)
    text = call(family, ("now", {})).replace("{}", dumped, 1)
    (name, found), *others = args_of(parse(text, family, cuts))
    assert (name, others) == ("now", [])
    assert found == arguments


# --- what is peculiar to a family -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ('{"a": 1,}', {"a": 1}),
        ('{"a": [1, 2, ], "b": {"c": 3 , }}', {"a": [1, 2], "b": {"c": 3}}),
        ('{"a": True, "b": None, "c": False}', {"a": True, "b": None, "c": False}),
        ('{"a": "line\nbreak\ttab"}', {"a": "line\nbreak\ttab"}),
        ('{"a": "\\d+ it\\\'s \\u00e9 \\ud83d\\ude00"}', {"a": "\\d+ it's é 😀"}),
        ('{"a": "\\ud83d!", "b": "\\ude00"}', {"a": "�!", "b": "�"}),
        ('{"a": "\\u12"}', {"a": "\\u12"}),
        ('{ "a" : { } , "b" : [ ] }', {"a": {}, "b": []}),
    ],
)
def test_slips_in_json_with_one_reading_are_mended(written: str, meant: Any) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    answer = parse(text, "hermes")
    assert args_of(answer) == [("f", meant)]
    assert parse(text, "hermes", list(range(len(text)))) == answer


@pytest.mark.parametrize(
    "written", ['{"a": nope}', '{"a": 01}', "{a: 1}", '{"a" 1}', '{"a": 1 "b": 2}', '{"a": ]', "{]"]
)
def test_arguments_end_where_they_stop_being_json(written: str) -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {written}}}</tool_call>'
    answer = parse(text, "hermes")
    ((name, arguments),) = answer.calls
    assert name == "f"
    assert written.startswith(arguments.rstrip())
    assert answer.content  # what follows is not swallowed
    assert parse(text, "hermes", list(range(len(text)))) == answer


@pytest.mark.parametrize(
    "written",
    [
        '{"arguments": {"a": 1}, "name": "f"}',
        '{"name": "f", "arguments": "{\\"a\\": 1}"}',
        '{"id": "x", "type": "function", "name": "f", "arguments": {"a": 1}}',
        '{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}',
        '{"function": "f", "parameters": {"a": 1}}',
        '{"name": "f", "thought": ["why"], "arguments": {"a": 1}}',
        '{"name": "f", "arguments": {"a": 1}, "extra": 0}',
        '{"name": "f", "arguments": {"a": 1}',
        '{"name": "f", "arguments": {"a": 1}}}',
        '[{"name": "f", "arguments": {"a": 1}}]',
    ],
)
def test_calls_in_json_are_read_in_every_shape_that_models_write(written: str) -> None:
    answer = parse(f"<tool_call>{written}</tool_call>", "hermes")
    assert args_of(answer) == [("f", {"a": 1})]
    assert answer.content == ""


def test_arguments_in_front_of_a_name_are_bounded() -> None:
    text = f'<tool_call>{{"arguments": {{"a": "{"x" * 70000}"}}, "name": "f"}}</tool_call>'
    assert parse(text, "hermes").calls == []


def test_depth_is_bounded() -> None:
    text = f'<tool_call>{{"name": "f", "arguments": {{"a": {"[" * 500}'
    answer = parse(text, "hermes")
    assert len(answer.calls[0][1]) < 300


def test_llama3_reads_a_bare_call_of_an_offered_tool_anywhere_on_a_line_of_its_own() -> None:
    bare = '{"name": "get_weather", "parameters": {"city": "Paris"}}'
    assert args_of(parse(bare, "llama3")) == [("get_weather", ONE)]
    answer = parse(f"I will look.\n\n{bare}\n{bare}; {bare}", "llama3")
    assert args_of(answer) == [("get_weather", ONE)] * 3
    assert answer.content == "I will look."
    assert parse(f"As in {bare}", "llama3").calls == []


def test_pythonic_reads_calls_within_tags() -> None:
    for opening, closing in (("<|python_start|>", "<|python_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>")):
        answer = parse(f"Well. {opening}[get_weather(city='Paris')]{closing} Done.", "pythonic")
        assert args_of(answer) == [("get_weather", ONE)]
        assert answer.content == "Well.  Done."


def test_lfm2_may_write_calls_as_json_or_break_lines_in_texts() -> None:
    in_json = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
    for inner in (f"[{in_json}]", in_json, f"[{in_json}, now()]"):
        answer = parse(f"<|tool_call_start|>{inner}<|tool_call_end|>", "pythonic")
        assert args_of(answer)[0] == ("get_weather", ONE)
        assert answer.content == ""
    text = "[get_weather(city='a\nb \\\n\\'c\\'\x00')]"
    assert args_of(parse(text, "pythonic")) == [("get_weather", {"city": "a\nb \\\n'c'\x00"})]


def test_minicpm3_writes_a_block_of_code() -> None:
    text = "<|tool_call_start|>\n```python\nget_weather(city='Paris')\nnow()\n```\n<|tool_call_end|>\nWait."
    answer = parse(text, "pythonic")
    assert answer == Answer("Wait.", "", [("get_weather", '{"city": "Paris"}'), ("now", "{}")])
    assert parse(text, "pythonic", list(range(len(text)))) == answer


def test_kimi_may_leave_the_name_out_where_there_is_one_tool() -> None:
    text = "<|tool_call_begin|>functions.0 <|tool_call_argument_begin|>{}<|tool_call_end|>"
    assert parse(text.replace("functions.0", "0"), "kimi-k2", tools={"now": {}}).calls == [("now", "{}")]
    text = "<|tool_call_begin|>get_weather <|tool_call_argument_begin|> {}<|tool_call_end|>"
    assert parse(text, "kimi-k2").calls == [("get_weather", "{}")]


def test_several_calls_in_one_pair_of_tags_are_read() -> None:
    one = '{"name": "now", "arguments": {}}'
    for family in ("hermes", "nemotron", "minimax-m1", "jamba"):
        opening, closing = TOOL_FORMATS[family].markers
        for inner in (f"{one}\n{one}", f"[{one}]\n[{one}]", f"[{one}, {one}]"):
            answer = parse(f"a {opening}{inner}{closing} b", family)
            assert answer == Answer("a  b", "", [("now", "{}")] * 2)


def test_gemma_values_without_quotes_or_with_those_of_json() -> None:
    text = (
        '<|tool_call>call:get_weather{ city: New York , days:<|"|>7<|"|>, "exact": True, note:null, '
        '<|"|>options<|"|>: {"a": [1, "x"], b: y}, unit: "C",}<tool_call|>'
    )
    expected = {"city": "New York", "days": 7, "exact": True, "note": None, "options": {"a": [1, "x"], "b": "y"}}
    answer = parse(text, "gemma4")
    assert args_of(answer) == [("get_weather", {**expected, "unit": "C"})]
    assert parse(text, "gemma4", list(range(len(text)))) == answer


@pytest.mark.parametrize(
    "broken", ["{city", "{city:", "{city:}", "{city:,}", '{city:<|"|>a', "{city:[}", "{:1}", "{a b"]
)
def test_malformed_arguments_of_gemma_keep_what_was_shown(broken: str) -> None:
    text = f"<|tool_call>call:get_weather{broken}<tool_call|>"
    answer = parse(text, "gemma4")
    assert [name for name, _ in answer.calls] == ["get_weather"]
    assert parse(text, "gemma4", list(range(len(text)))) == answer
    deep = parse(f"<|tool_call>call:now{'{a:' * 500}", "gemma4")
    assert len(deep.calls[0][1]) < 1000


def test_dsml_tells_types_by_its_attribute() -> None:
    tag = "｜DSML｜"
    text = (
        f'<{tag}function_calls>\n<{tag}invoke name="get_weather">\n<{tag}parameter name="city" string="false">1'
        f'</{tag}parameter>\n<{tag}parameter name="days" string="true">2</{tag}parameter>\n'
        f'<{tag}parameter name="exact">true</{tag}parameter>\n</{tag}invoke>\n</{tag}function_calls>'
    )
    assert args_of(parse(text, "deepseek-v3.2")) == [("get_weather", {"city": 1, "days": "2", "exact": True})]


def test_tags_with_names_in_other_quotes_and_cdata_are_read() -> None:
    text = "<function name='get_weather'><param name='city'><![CDATA[a</param>\nb]]></param></function>"
    assert args_of(parse(text, "minicpm5")) == [("get_weather", {"city": "a</param>\nb"})]
    assert parse(text, "minicpm5", tools={"now": {}}).content == text


def test_a_broken_call_among_others_does_not_hide_them() -> None:
    text = call("minimax-m2", ("now", {}), ("get_weather", ONE), ("now", {}))
    broken = text.replace('<parameter name="city">', "<parameter>")
    answer = parse(broken, "minimax-m2")
    assert answer.calls[:2] == [("now", "{}"), ("get_weather", "")]
    assert parse(broken, "minimax-m2", list(range(len(broken)))) == answer


def test_pythonic_literals_become_json() -> None:
    text = """[get_weather(city='It\\'s, (ok) [1]', days=-2, options={'a': (1, 2.5), "b": None}, exact=true,)]"""
    expected = {"city": "It's, (ok) [1]", "days": -2, "options": {"a": [1, 2.5], "b": None}, "exact": True}
    assert args_of(parse(text, "pythonic")) == [("get_weather", expected)]
    text = '[get_weather(city="""a "quoted" text""")]'
    assert args_of(parse(text, "pythonic")) == [("get_weather", {"city": 'a "quoted" text'})]


def test_pythonic_literals_are_bounded_apart_from_their_texts() -> None:
    most = 32 * 1024
    longest = [1] * (most // 3)
    city = "x" * (4 * most)
    answer = parse(f"[get_weather(city={city!r}, options={longest})]", "pythonic")
    assert args_of(answer) == [("get_weather", {"city": city, "options": longest})]
    for huge in (str([1] * most), str(["a"] * (most // 4)), "-" * 2 * most + "1"):
        assert parse(f"[get_weather(city={huge})]", "pythonic").calls == []


def test_phi4_reads_calls_within_tags() -> None:
    one = '{"name": "now", "arguments": {}}'
    assert parse(f"<|tool_call|>{one}<|/tool_call|>", "phi4").calls == [("now", "{}")]
    assert parse(f"<|tool_call|>[{one}, {one}]<|/tool_call|>", "phi4").calls == [("now", "{}")] * 2


def test_mistral_reads_calls_by_name() -> None:
    text = '[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{}'
    assert parse(text, "mistral").calls == [("get_weather", '{"city": "Paris"}'), ("now", "{}")]


def test_deepseek_reads_calls_without_blocks_of_code() -> None:
    text = (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
        '{"city": "Paris"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
    )
    answer = parse(text, "deepseek")
    assert args_of(answer) == [("get_weather", ONE)]
    assert answer.content == ""


def test_qwen3_coder_types_values_by_the_schema() -> None:
    written = {"city": "12", "days": "7", "exact": "True", "unit": "C", "note": "null", "other": "3", "options": "[1"}
    text = "<tool_call>\n<function=get_weather>\n"
    text += "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    answer = parse(text + "</function>\n</tool_call>", "qwen3-coder")
    expected = {"city": "12", "days": 7, "exact": True, "unit": "C", "note": None, "other": "3", "options": "[1"}
    assert args_of(answer) == [("get_weather", expected)]


def test_qwen3_coder_leaves_no_half_of_a_surrogate_pair() -> None:
    text = "<function=get_weather><parameter=options>[\"\\ud800\", '\\udc00']</parameter></function>"
    for written in (text, text.replace("'", '"')):
        assert args_of(parse(written, "qwen3-coder")) == [("get_weather", {"options": ["\ufffd", "\ufffd"]})]


def test_qwen3_coder_keeps_all_line_breaks_of_a_value_but_the_outer_two() -> None:
    text = "<function=get_weather><parameter=city>\n\na\n</param\n\n</parameter></function>"
    assert args_of(parse(text, "qwen3-coder")) == [("get_weather", {"city": "\na\n</param\n"})]


def test_glm_writes_calls_with_and_without_line_breaks() -> None:
    text = (
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
        "<arg_value>2</arg_value></tool_call><tool_call>now</tool_call>\n<tool_call>now\n</tool_call>"
    )
    answer = parse(text, "glm")
    assert args_of(answer) == [("get_weather", {"city": "Paris", "days": 2}), ("now", {}), ("now", {})]
    assert answer.content == ""


def test_glm_types_values_by_the_schema_and_keeps_texts_as_they_are() -> None:
    written = {"city": " 12\n", "days": "7", "exact": "True", "unit": "C", "note": "null", "options": '{"a": [1]}'}
    pairs = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in written.items())
    answer = parse(f"<tool_call>get_weather\n{pairs}</tool_call>", "glm")
    expected = {"city": " 12\n", "days": 7, "exact": True, "unit": "C", "note": None, "options": {"a": [1]}}
    assert args_of(answer) == [("get_weather", expected)]


@pytest.mark.parametrize(
    "rest",
    ["", "<arg_key>", "<arg_key>days</arg_key>", "<arg_key>days</arg_key>7</tool_call>", "</arg_value></tool_call>"],
)
def test_a_malformed_call_of_glm_keeps_what_was_shown_and_the_next_call_is_read(rest: str) -> None:
    broken = f"<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>{rest}"
    answer = parse(broken + call("glm", ("now", {})), "glm")
    assert answer.calls[0] == ("get_weather", '{"city": "Rome"')
    assert answer.calls[1:] == [("now", "{}")]


def test_harmony_tells_channels_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>Need the weather.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>One moment.<|end|>"
        "<|start|>assistant<|channel|>analysis<|message|>Call it.<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>'
    )
    answer = parse(text, "gpt-oss", reasoning="gpt-oss")
    assert answer == Answer("One moment.", "Need the weather.\nCall it.", [("get_weather", '{"city": "Paris"}')])
    assert parse(text, "gpt-oss", list(range(len(text)))) == answer
    assert parse("<|channel|>final<|message|>Paris.", "gpt-oss").content == "Paris."
    assert parse("Paris.", "gpt-oss").content == "Paris."
    assert parse("<|channel|>fin", "gpt-oss").content == ""


# --- reasoning ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], list(range(200))])
def test_reasoning_in_front_of_the_answer_is_told_apart(cuts: list[int]) -> None:
    text = "<think>\nIt is\n\nParis.\n</think>\n\nParis. "
    assert parse(text, "none", cuts, reasoning="think") == Answer("Paris.", "It is\n\nParis.", [])
    assert parse(text, "none", cuts) == Answer(text, "", [])


def test_reasoning_that_the_prompt_opened_needs_no_tag() -> None:
    assert parse("It is.</think>Paris.", "none", reasoning="think", inside=True) == Answer("Paris.", "It is.", [])
    assert parse("<think>It is.</think>Paris.", "none", reasoning="think", inside=True).reasoning == "It is."
    assert parse("It is. ", "none", reasoning="think", inside=True) == Answer("", "It is.", [])
    assert parse("It is.</think>Paris.", "none", reasoning="think") == Answer("It is.</think>Paris.", "", [])


def test_an_answer_without_reasoning_is_left_as_it_is() -> None:
    for text in ("\n Paris \n", "<thin", "", " ", "<b>"):
        assert parse(text, "none", reasoning="think") == Answer(text, "", [])


def test_empty_reasoning_is_none() -> None:
    assert parse("<think>\n\n</think>\n\nParis.", "none", reasoning="think") == Answer("Paris.", "", [])


def test_calls_behind_reasoning_are_read_and_those_within_are_not() -> None:
    inner = call("hermes", ("now", {}))
    text = f"<think>Perhaps {inner}?</think>\n\n{call('hermes', ('get_weather', ONE))}"
    answer = parse(text, "hermes", reasoning="think")
    assert answer.reasoning == f"Perhaps {inner}?"
    assert args_of(answer) == [("get_weather", ONE)]
    assert answer.content == ""


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        ("gemma4", "<|channel>thought\nHm.<channel|>Yes.", "Yes."),
        ("gemma4", "<|channel>thought\n<channel|>Yes.", "Yes."),
        ("cohere", "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes."),
        ("cohere", "<|START_THINKING|>Hm.<|END_THINKING|>\n<|START_TEXT|> Yes. <|END_TEXT|>\n", "Yes."),
        ("cohere", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "Yes."),
        ("cohere", "<|START_RESPONSE|>Yes.", "Yes."),
        ("cohere", "Yes.<|END_RESPONSE|> ", "Yes.<|END_RESPONSE|> "),
        ("seed-oss", "<seed:think>Hm.</seed:think>Yes.", "Yes."),
        ("granite", "Here is my thought process: Hm. Here is my response: Yes.", "Yes."),
        ("granite", "Here's my thought process:\nHm.\nHere's my response:\nYes.", "Yes."),
        ("granite", "Here is my cat.", "Here is my cat."),
        ("minicpm3", "<|thought_start|>\nHm.\n<|thought_end|>\nYes.", "Yes."),
        ("kimi", "◁think▷Hm.◁/think▷Yes.", "Yes."),
        ("think-answer", "<think>Hm.</think>\n<response>\nYes.\n</response>\n", "Yes."),
        ("think-answer", "<think>Hm.</think>\n<answer>\nYes.</answer> No.", "Yes.</answer> No."),
        ("think-answer", "<think>Hm.</think>\nIn <response>a</response>", "In <response>a</response>"),
        ("think-answer", "<think>Hm.</think><response>a</response>b</response>", "a</response>b"),
        ("think-answer", "<think>Hm.</think><respons", "<respons"),
        ("think-answer", "<think>Hm.</think><response>a</respon", "a</respon"),
        ("think-open", "<think>Hm.</think>Yes.", "Yes."),
    ],
)
def test_reasoning_and_answer_are_told_apart_in_every_format(name: str, text: str, content: str) -> None:
    answer = parse(text, "none", reasoning=name)
    assert answer.content == content
    assert answer.reasoning == ("Hm." if "Hm." in text else "")
    assert parse(text, "none", list(range(len(text))), reasoning=name) == answer
    for tools in ("hermes", "cohere"):
        with_call = text + call(tools, ("now", {}))
        answer = parse(with_call, tools, reasoning=name)
        assert answer.calls == [("now", "{}")]
        assert answer.content == content.strip()
        assert parse(with_call, tools, list(range(len(with_call))), reasoning=name) == answer


@pytest.mark.parametrize("name", [name for name, one in REASONING_FORMATS.items() if one.tags])
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_any_mixture_of_reasoning_is_read_alike_under_every_cut(name: str, data: st.DataObject) -> None:
    form = REASONING_FORMATS[name]
    tags = [tag for pair in (form.tags, *form.spellings, *form.around_answer) if pair for tag in pair]
    pieces = [*tags, *(tag[:-1] for tag in tags), call("hermes", ("now", {})), " ", "\n", "Hm.", "<", "é"]
    text = "".join(data.draw(st.lists(st.sampled_from(pieces), max_size=8)))
    options: dict[str, Any] = {"reasoning": name, "inside": data.draw(st.booleans())}
    assert parse(text, "hermes", data.draw(cut_positions), **options) == parse(text, "hermes", **options)


def test_brackets_are_tags_too() -> None:
    assert parse("[THINK]Hm.[/THINK]Yes.", "none", reasoning="mistral") == Answer("Yes.", "Hm.", [])


@pytest.mark.parametrize("cuts", [[], list(range(200))])
def test_the_place_of_reasoning_is_known_to_the_character(cuts: list[int]) -> None:
    text = " <think>\nabc\n</think>x"
    parser = parser_of("none", "think")
    parse_with(parser, text, cuts)
    ((begin, end),) = parser.reasoning_spans
    assert text[begin:end] == "\nabc\n"
    text = "<|channel|>analysis<|message|>abc<|end|><|start|>assistant<|channel|>final<|message|>x"
    parser = parser_of("gpt-oss", "gpt-oss")
    parse_with(parser, text, cuts)
    ((begin, end),) = parser.reasoning_spans
    assert text[begin:end] == "abc"


def parse_with(parser: OutputParser, text: str, cuts: list[int]) -> None:
    for piece in [text] if not cuts else list(text):
        parser.push(piece)
    parser.finish()


def test_without_tools_nothing_is_a_call() -> None:
    text = call("hermes", ("now", {}))
    assert parse(text, "hermes", tools={}) == Answer(text, "", [])
    text = call("gpt-oss", ("now", {}))
    assert parse(text, "gpt-oss", tools={}) == Answer("{}", "", [])
