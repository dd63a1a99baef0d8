"""Which format a model writes, and how conversations with tools reach templates of every manner."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.common.parser_names import (
    REASONING_ALIASES,
    REASONING_FORMAT_NAMES,
    TOOL_ALIASES,
    TOOL_FORMAT_NAMES,
    reasoning_parser_named,
    tool_parser_named,
)
from headrace.gateway.chat.choice import Choice
from headrace.gateway.chat.conversation import conversation_of
from headrace.gateway.chat.formats import Formats, parse_parsers
from headrace.gateway.chat.output import reading_of
from headrace.gateway.chat.output_parsers.families import REASONING_FORMATS, TOOL_FORMATS, detect
from headrace.gateway.chat.prompts import MAX_INLINE_CHARS, Conversation
from headrace.gateway.chat.request import Chat, ChatMessage
from headrace.gateway.chat.sampling import Sampling
from headrace.gateway.chat.tools import ToolUse, tool_use_of
from headrace.gateway.edge.wire import decode_body
from headrace.gateway.hints import Hints, hints_var
from headrace.gateway.openai.types import ChatRequest
from headrace.gateway.text.chat_template import ChatTemplate
from headrace.protos.host_pb2 import ServingRules
from headrace.protos.inference_pb2 import FINISH_REASON_STOP, GenerateResponse
from headrace.protos.status import Reason, StatusError

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ('within <tool_call></tool_call>: {"name": ..., "arguments": ...}', "hermes", None),
        ("<tool_call> ... content.split('</think>')", "hermes", "think"),
        ("<tool_call>\n<function=example_function_name>", "qwen3-coder", None),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3", None),
        ("<|python_tag|>", "llama3", None),
        ("[func_name1(params_name1=params_value1), func_name2()]", "pythonic", None),
        ("<|python_start|> and <|python_end|>", "pythonic", None),
        ("<|tool_call_start|>", "pythonic", None),
        ("functools[...]", "phi4", None),
        ("'<|tool|>' + message['tools'] + '<|/tool|>'", "phi4", None),
        ("[TOOL_CALLS] [", "mistral", None),
        ("[AVAILABLE_TOOLS] [THINK]", "mistral", "mistral"),
        ("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜> </think>", "deepseek", "think"),
        ("<|start|>assistant<|channel|>final<|message|>", "gpt-oss", "gpt-oss"),
        ("<tool_call>name\n<arg_key>k</arg_key> </think>", "glm", "think"),
        ("<|im_start|>", None, None),
        ("<{{ '｜DSML｜' }}function_calls> </think>", "deepseek-v3.2", "think"),
        ("<｜DSML｜tool_calls>", "deepseek-v4", None),
        ("<|tool_calls_section_begin|><|tool_call_begin|> <think></think>", "kimi-k2", "think"),
        ("<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=", "step3", None),
        ("'<|tool_call>call:' + function['name'] '<|channel>thought'", "gemma4", "gemma4"),
        ("<start_function_call>call:", "functiongemma", None),
        ("<|START_THINKING|><|END_THINKING|><|START_ACTION|>[", "cohere", "cohere"),
        ("<|start_of_role|>available_tools<|end_of_role|> respond with <|tool_call|>", "granite", None),
        ("<|start_of_role|>available_tools<|end_of_role|> Here is my thought process:", "granite", "granite"),
        ("<|start_of_role|> <tools></tools> <tool_call>", "hermes", None),
        ("between <think></think> and your response between <response></response>", None, "think-answer"),
        ("'</think>' '<answer>' <tool_calls>[", "jamba", "think-answer"),
        ("<AVAILABLE_TOOLS> <TOOLCALL>[ </think>", "nemotron", "think"),
        ("'<seed:tool_call>' <function=f> '<seed:think>' '</seed:think>'", "seed-oss", "seed-oss"),
        ("<minimax:tool_call> <invoke name= </think>", "minimax-m2", "think"),
        ('<function name="function-name"><param name="param-name">', "minicpm5", None),
        ("<function_calls>\nget_weather(city='New York')", "olmo3", None),
        ("<|thought_start|> <|tool_call_start|>\n```python\n", "pythonic", "minicpm3"),
        ("List of tools: <|tool_list_start|>", "pythonic", None),
        ("system tool_setting=tools <tool_calls>", "minimax-m1", None),
        ("]<]minimax[>[<tool_call>", None, None),
        ("◁think▷ ◁/think▷", None, "kimi"),
    ],
)
def test_templates_tell_the_format(template: str, tools: str | None, reasoning: str | None) -> None:
    found = detect(template)
    assert (found.tools.name if found.tools else None) == tools
    assert (found.reasoning.name if found.reasoning else None) == reasoning


def test_what_the_operator_says_goes_before_the_template() -> None:
    found = detect("<tool_call> </think>", "mistral", "none")
    assert found.tools is not None
    assert (found.tools.name, found.reasoning) == ("mistral", None)
    assert detect("<tool_call>", "none").tools is None


@pytest.mark.parametrize("name", [one.name for one in TOOL_FORMATS.values() if one.token])
def test_a_special_token_tells_the_format_where_the_template_shows_none(name: str) -> None:
    token = TOOL_FORMATS[name].token
    for template, expected in (("{{ tools }}", name), ("{{ messages }}", "hermes")):
        found = Formats().of(fake_model("m", template, {1: token.encode()})).output.tools
        assert found is not None
        assert found.name == expected
    found = Formats().of(fake_model("m", "{{ tools }}<tool_call>", {1: token.encode()})).output.tools
    assert found is not None
    assert found.name == "hermes"


def fake_model(name: str, template: str, special: dict[int, bytes]) -> Any:
    table = [bytes([i]) for i in range(100)]
    for token_id, raw in special.items():
        table[token_id] = raw
    tokenizer = SimpleNamespace(token_bytes=table, special_ids=frozenset(special) | {500})
    text = SimpleNamespace(template=ChatTemplate({"default": template}, {}), tokenizer=tokenizer)
    return SimpleNamespace(name=name, text=text, card=SimpleNamespace(tokenizer_sha256="0"), rules=ServingRules())


def test_parsers_may_be_said_for_one_model_and_for_all_others() -> None:
    said = parse_parsers(["phi4", "a=b=devstral"], tool_parser_named)
    formats = Formats(said)
    names = [formats.of(fake_model(name, "<tool_call>", {})).output.tools for name in ("a=b", "c")]
    assert [one.name for one in names if one] == ["mistral", "phi4"]
    with pytest.raises(ValueError, match="'x' is no parser; there are auto, none"):
        parse_parsers(["m=x"], tool_parser_named)


def test_names_of_formats_are_those_that_the_parsers_have() -> None:
    assert tuple(TOOL_FORMATS) == TOOL_FORMAT_NAMES
    assert tuple(REASONING_FORMATS) == REASONING_FORMAT_NAMES


@pytest.mark.parametrize("name", TOOL_ALIASES)
def test_names_of_other_servers_mean_a_format_of_calls(name: str) -> None:
    found = detect("", tool_parser_named(name)).tools
    assert found is not None
    assert found.name == TOOL_ALIASES[name]


@pytest.mark.parametrize("name", REASONING_ALIASES)
def test_names_of_other_servers_mean_a_format_of_reasoning(name: str) -> None:
    found = detect("", "auto", reasoning_parser_named(name)).reasoning
    assert found is not None
    assert found.name == REASONING_ALIASES[name]


def test_an_unknown_name_is_refused_with_the_valid_ones() -> None:
    with pytest.raises(ValueError, match=r"'onyx' is no parser; there are auto, none, gpt-oss, .* qwen3coder$"):
        tool_parser_named("onyx")
    with pytest.raises(ValueError, match=r"'hermes3' is no parser; there are auto, none, gpt-oss, mistral, gemma4, "):
        reasoning_parser_named("hermes3")


def test_what_the_host_says_of_a_model_goes_before_the_flags() -> None:
    formats, model = Formats({"": "phi4"}, {"": "none"}), fake_model("m", "<tool_call> [THINK]", {})
    output = formats.of(model).output
    assert (output.tools and output.tools.name, output.reasoning) == ("phi4", None)
    model.rules = ServingRules(tool_parser="hermes", reasoning_parser="think")
    output = formats.of(model).output
    assert (output.tools and output.tools.name, output.reasoning and output.reasoning.name) == ("hermes", "think")
    model.rules = ServingRules(tool_parser="none", reasoning_parser="auto")
    output = formats.of(model).output
    assert (output.tools, output.reasoning and output.reasoning.name) == (None, "mistral")
    assert formats.plain(model) is None


def test_markup_of_special_tokens_is_text_to_the_parser_alone() -> None:
    model = fake_model("m", "{{ tools }}<|python_tag|>", {1: b"<|python_tag|>", 2: b"<|eot|>"})
    form = Formats().of(model)
    assert form.marker_ids == {"<|python_tag|>": 1}
    with_tools = reading_of(form, ToolUse(schemas={"f": {}}), "", False)
    assert with_tools.shown_ids == {1}
    assert reading_of(form, ToolUse(), "", False).shown_ids == frozenset()
    message = GenerateResponse(token_ids=[1, *b"!", 2])
    message.finish.reason = FINISH_REASON_STOP
    message.finish.stop_token_id = 2
    tokenizer = model.text.tokenizer
    choice = Choice(tokenizer.token_bytes, tokenizer.special_ids, Sampling(), with_tools.shown_ids)
    assert choice.push(message).text == "<|python_tag|>!"


def test_an_open_format_takes_answers_to_begin_with_reasoning_unless_the_prompt_ends_it() -> None:
    form = Formats({}, {"": "think-open"}).of(fake_model("m", "", {}))
    assert [
        reading_of(form, ToolUse(), ending, False).inside_reasoning for ending in ("x", "<think>\n", "</think>\n\n")
    ] == [
        True,
        True,
        False,
    ]


# --- conversations --------------------------------------------------------------------------------------------------


def render(template: str, **fields: Any) -> str:
    request = decode_body(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode(), ChatRequest)
    compiled = ChatTemplate({"default": template}, {})
    talk = conversation_of(request, compiled, tool_use_of(request).listed)
    return compiled.render(talk.messages, variables=talk.variables, tools=talk.tools).text


CALLED = {
    "role": "assistant",
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a":{"b":"é"}}'}}],
}


@pytest.mark.parametrize(
    "expression",
    [
        "call.function.arguments | tojson",
        "'' + call.function.arguments",
        "call.function.arguments + ''",
        "call.function.arguments ~ ''",
        "call.function.arguments",
    ],
)
def test_arguments_are_an_object_and_its_text_to_templates_that_want_text(expression: str) -> None:
    template = "{% for call in messages[0].tool_calls %}{{ " + expression + " }}{% endfor %}"
    assert render(template, messages=[CALLED]) == '{"a": {"b": "é"}}'
    assert render("{{ messages[0].tool_calls[0].function.arguments.a.b }}", messages=[CALLED]) == "é"
    assert render("{{ messages[0].tool_calls[0].function.arguments is mapping }}", messages=[CALLED]) == "True"


def test_more_tools_are_taken_than_a_provider_takes() -> None:
    tools = [{"type": "function", "function": {"name": f"f{i}"}} for i in range(1000)]
    assert len(tool_use_of(Chat(messages=[], tools=tools)).schemas) == 1000


def test_no_content_is_none_to_templates_that_ask() -> None:
    template = "{{ messages[0].tool_calls | length }}{% if messages[0]['content'] is not none %}text{% endif %}"
    assert render(template, messages=[CALLED]) == "1"
    assert render("{{ messages[0].tool_calls | length }}{{ messages[0].content }}|", messages=[CALLED]) == "1|"


def test_tools_go_into_the_system_message_where_the_template_looks_there() -> None:
    template = "{% for m in messages %}{{ m.role }}:{% if 'tools' in m %}{{ m.tools }}{% endif %};{% endfor %}"
    functions = json.dumps([TOOL["function"]])
    assert render(template, tools=[TOOL]) == f"system:{functions};user:;"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert render(template, tools=[TOOL], messages=messages) == f"system:{functions};user:;"


@pytest.mark.parametrize("reasons", [False, True])
@pytest.mark.parametrize("effort", ["none", "low", "max"])
def test_an_effort_is_refused_only_where_it_would_change_something(reasons: bool, effort: str) -> None:
    request = ChatRequest(messages=[ChatMessage(role="user", content="hi")], reasoning_effort=effort)
    compiled = ChatTemplate({"default": "{{ messages[0].content }}"}, {})
    hints = Hints()
    hints_var.set(hints)
    if reasons and effort == "none":
        with pytest.raises(StatusError) as caught:
            conversation_of(request, compiled, reasons=True)
        assert (caught.value.reason, caught.value.field) == (Reason.UNSUPPORTED, "reasoning_effort")
        return
    assert conversation_of(request, compiled, reasons=reasons).variables == {}
    assert [value for _, value in hints.headers()] == ([] if effort == "none" else [b"reasoning_effort"])


def test_verbosity_reaches_templates_that_know_it() -> None:
    assert render("{{ verbosity }}", verbosity="low") == "low"
    assert render("{{ messages[0].content }}", verbosity="high") == "hi"


def test_reasoning_goes_back_under_the_name_that_the_template_knows() -> None:
    said = {"role": "assistant", "content": "x", "reasoning_content": "why"}
    assert render("{{ messages[0].reasoning_content }}", messages=[said]) == "why"
    assert render("{% if messages[0].thinking %}{{ messages[0].thinking }}{% endif %}", messages=[said]) == "why"


@pytest.mark.parametrize(
    ("template", "effort", "expected"),
    [
        ("{{ reasoning_effort }}", "high", "high"),
        ("{{ enable_thinking }}", "none", "False"),
        ("{{ enable_thinking }}", "low", "True"),
        ("{{ thinking }}", "none", "False"),
    ],
)
def test_the_effort_reaches_the_template_as_it_knows_it(template: str, effort: str, expected: str) -> None:
    assert render(template, reasoning_effort=effort) == expected


def test_what_the_caller_tells_the_template_goes_before_the_effort() -> None:
    found = render("{{ enable_thinking }}", reasoning_effort="low", chat_template_kwargs={"enable_thinking": False})
    assert found == "False"


@pytest.mark.parametrize(
    "conversation",
    [
        Conversation([{"role": "assistant", "content": "", "reasoning_content": "x" * MAX_INLINE_CHARS}]),
        Conversation([{"role": "tool", "content": "", "tool_call_id": "x" * MAX_INLINE_CHARS}]),
        Conversation([{"role": "user", "content": "x"}], variables={"date_string": "x" * MAX_INLINE_CHARS}),
    ],
)
def test_no_part_of_a_long_conversation_is_tokenized_in_the_event_loop(conversation: Conversation) -> None:
    assert conversation.num_chars > MAX_INLINE_CHARS
