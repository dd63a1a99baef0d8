"""Earlier turns are taken as they come: of answers that were cut off, of other servers, of clients of older APIs."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.gateway.chat.conversation import conversation_of
from headrace.gateway.chat.request import Chat, ChatMessage
from headrace.gateway.hints import Hints, hints_var
from headrace.gateway.text.chat_template import ChatTemplate

# Templates read the arguments of calls in these ways.
AS_JSON = "{{ call.arguments | tojson }}"
AS_TEXT = "{{ call.arguments }}"
AS_TEXT_IF_IT_IS_ONE = "{{ call.arguments if call.arguments is string else call.arguments | tojson }}"
ITEM_BY_ITEM = "{% for name, value in call.arguments | items %}{{ name }}={{ value }};{% endfor %}"
ADDED = "{{ '' + call.arguments }}"
WITHOUT_TOOLS = "{{ message.content }}"
USER: dict[str, Any] = {"role": "user", "content": "hi"}


def template_of(calls: str = AS_JSON) -> ChatTemplate:
    source = (
        "{% for message in messages %}<{{ message.role }}"
        "{% for name in ['name', 'tool_call_id', 'reasoning_content'] %}{% if message[name] %} {{ message[name] }}"
        "{% endif %}{% endfor %}>{{ message.content }}"
        "{% for outer in message.tool_calls or [] %}{% set call = outer.function %}[{{ outer.id }} {{ call.name }}("
        + calls
        + ")]{% endfor %}{% endfor %}"
    )
    return ChatTemplate({"default": source}, {})


def render(*messages: dict[str, Any], template: ChatTemplate | None = None) -> tuple[str, set[str]]:
    """The text of these turns, and the names of what it lacks."""
    template = template or template_of()
    hints = Hints()
    token = hints_var.set(hints)
    try:
        talk = conversation_of(Chat(messages=[ChatMessage(**one) for one in messages]), template)
    finally:
        hints_var.reset(token)
    named = {name for _, value in hints.headers() for name in value.decode().split(", ")}
    return template.render(talk.messages).text, named


def called(arguments: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": arguments}}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


CUT = '{"path": "/srv/a'


@pytest.mark.parametrize(
    "arguments", [CUT, "{", "not JSON", "[1, 2]", "7", '"x"', "{}}", '{"a": 1e999999}', "\ud800", 500 * "["]
)
def test_arguments_that_are_no_object_are_shown_as_they_were_written(arguments: str) -> None:
    for form in (AS_JSON, AS_TEXT, AS_TEXT_IF_IT_IS_ONE, ADDED):
        assert render(USER, called(arguments), template=template_of(form)) == (
            f"<user>hi<assistant>[c1 read({arguments})]",
            set(),
        )
    by_item, _ = render(USER, called(arguments), template=template_of(ITEM_BY_ITEM))
    assert by_item == f"<user>hi<assistant>[c1 read(arguments={arguments};)]"


def test_a_template_without_tools_shows_cut_arguments_too() -> None:
    template = ChatTemplate({"default": "{% for message in messages %}{{ message.content }}{% endfor %}"}, {})
    text, _ = render(USER, called(CUT), template=template)
    assert text == 'hi<tool_call>\n{"name": "read", "arguments": ' + CUT + "}\n</tool_call>"
    text, _ = render(USER, called('{"a": "é"}'), template=template)
    assert text == 'hi<tool_call>\n{"name": "read", "arguments": {"a": "é"}}\n</tool_call>'


@pytest.mark.parametrize("arguments", ["", " ", "null", None, "{}", {}])
def test_no_arguments_are_an_empty_object(arguments: Any) -> None:
    assert render(called(arguments))[0] == "<assistant>[c1 read({})]"


@pytest.mark.parametrize("arguments", [[1], 7, True, "[1]"])
def test_arguments_of_another_type_are_their_json(arguments: Any) -> None:
    text = (
        arguments
        if isinstance(arguments, str)
        else {True: "true", 7: "7"}.get(arguments)
        if not isinstance(arguments, list)
        else "[1]"
    )
    assert render(called(arguments))[0] == f"<assistant>[c1 read({text})]"


@pytest.mark.parametrize("role", ["user", "assistant", "system", "tool"])
@pytest.mark.parametrize("content", [None, "", [], [{"type": "text", "text": None}], [{"type": "text"}]])
def test_no_content_is_an_empty_text(role: str, content: Any) -> None:
    assert render({"role": role, "content": content}) == (f"<{role}>", set())
    assert render({"role": role}) == (f"<{role}>", set())


def test_refusals_are_what_the_assistant_said() -> None:
    assert render({"role": "assistant", "content": None, "refusal": "No."})[0] == "<assistant>No."
    assert render({"role": "assistant", "content": "Yes.", "refusal": None})[0] == "<assistant>Yes."
    parts = [{"type": "text", "text": "Sorry."}, {"type": "refusal", "refusal": "No."}]
    assert render({"role": "assistant", "content": parts})[0] == "<assistant>Sorry.\nNo."


def test_parts_that_the_assistant_cannot_read_of_itself_are_named() -> None:
    parts = [{"type": "output_text", "text": "a"}, {"type": "audio_tokens", "x": 1}, {"type": "text", "text": "b"}]
    text, named = render({"role": "assistant", "content": parts, "audio": {"id": "a1"}})
    assert text == "<assistant>a\nb"
    assert named == {"messages.content.audio_tokens", "messages.audio"}


def test_an_image_in_the_result_of_a_tool_is_a_note() -> None:
    parts = [
        {"type": "text", "text": "a"},
        {"type": "image_url", "image_url": {"url": "data:"}},
        {"type": "input_file"},
    ]
    text, named = render({"role": "tool", "tool_call_id": "c1", "content": parts})
    notes = [f"[{what}: omitted, because this model cannot read it]" for what in ("image", "file")]
    assert text == "<tool c1>a\n" + "\n".join(notes)
    assert named == {"messages.content.image_url", "messages.content.input_file"}


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_content": "Hm."},
        {"reasoning": "Hm."},
        {"thinking": "Hm."},
        {"content": [{"type": "thinking", "thinking": "Hm.", "signature": "s"}, {"type": "text", "text": "x"}]},
        {"content": [{"type": "reasoning", "text": "Hm."}, {"type": "text", "text": "x"}]},
        {"reasoning_content": "Hm.", "reasoning": "Hm."},
    ],
)
def test_reasoning_of_other_servers_is_reasoning(fields: dict[str, Any]) -> None:
    assert render({"role": "assistant", "content": "x", **fields}) == ("<assistant Hm.>x", set())


def test_the_one_call_of_older_clients_is_a_call_with_its_result() -> None:
    call = {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": '{"a": 1}'}}
    text, _ = render(USER, call, {"role": "function", "name": "read", "content": "r"})
    assert text == '<user>hi<assistant>[c00001000 read({"a": 1})]<tool read c00001000>r'


def test_results_without_an_id_belong_to_the_call_of_their_name() -> None:
    calls = [{"function": {"name": name}} for name in ("a", "b", "a")]
    results = [{"role": "tool", "name": name, "content": name} for name in ("b", "a", "x", "y")]
    text, _ = render({"role": "assistant", "tool_calls": calls}, *results)
    ids = [f"c00000{number:03d}" for number in range(3)]
    assert text.startswith(f"<assistant>[{ids[0]} a({{}})][{ids[1]} b({{}})][{ids[2]} a({{}})]")
    assert text.endswith(f"<tool b {ids[1]}>b<tool a {ids[0]}>a<tool x {ids[2]}>x<tool y>y")


def test_results_of_unknown_calls_and_calls_without_results_stay() -> None:
    text, _ = render(
        {"role": "tool", "tool_call_id": "gone", "content": "r"},
        called("{}"),
        USER,
        {"role": "assistant", "content": "x", "tool_calls": []},
    )
    assert text == "<tool gone>r<assistant>[c1 read({})]<user>hi<assistant>x"


def test_calls_of_custom_tools_are_calls_with_one_argument() -> None:
    call = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": 'a "b"'}}
    text, _ = render({"role": "assistant", "tool_calls": [call]})
    assert text == '<assistant>[c1 patch({"input": "a \\"b\\""})]'


KIMI = """\
{%- for message in messages %}<{{ message.role }}>
{%- if message.role == 'tool' %}## Return of {{ message.tool_call_id }}\n{% endif %}{{ message.content or '' }}
{%- for call in message.tool_calls or [] -%}
<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>{{ call.function.arguments | tojson }}<|tool_call_end|>
{%- endfor %}{%- endfor %}"""


def test_calls_have_the_ids_that_kimi_reads() -> None:
    def calls(*named: tuple[str, str]) -> dict[str, Any]:
        made = [{"id": one, "type": "function", "function": {"name": name, "arguments": "{}"}} for one, name in named]
        return {"role": "assistant", "content": None, "tool_calls": made}

    turns = [
        USER,
        calls(("call_a", "read"), ("functions.write:7", "write")),
        {"role": "tool", "tool_call_id": "functions.write:7", "content": "w"},
        {"role": "tool", "tool_call_id": "call_a", "content": "r"},
        calls(("call_a", "read")),  # the same id again
        {"role": "tool", "tool_call_id": "call_a", "content": "s"},
        {"role": "tool", "tool_call_id": "unknown", "content": "?"},
    ]
    text, named = render(*turns, template=ChatTemplate({"default": KIMI}, {}))
    begin, middle, end = "<|tool_call_begin|>", "<|tool_call_argument_begin|>{}", "<|tool_call_end|>"
    assert text == (
        f"<user>hi<assistant>{begin}functions.read:0{middle}{end}{begin}functions.write:1{middle}{end}"
        "<tool>## Return of functions.write:1\nw<tool>## Return of functions.read:0\nr"
        f"<assistant>{begin}functions.read:2{middle}{end}"
        "<tool>## Return of functions.read:2\ns<tool>## Return of unknown\n?"
    )
    assert named == set()
    assert "[call_a read({})]" in render(*turns)[0], "other templates have the ids of the caller"
