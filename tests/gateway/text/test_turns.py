"""Templates that refuse a conversation get it in another shape, and only then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from headrace.gateway.text.chat_template import ChatTemplate, NoTemplate
from headrace.gateway.text.turns import joined, with_one_call_a_turn, with_system_folded
from headrace.protos.status import StatusError

TURN = "{{ message.role }}:{{ message.content }};"
NO_SYSTEM = (
    "{% for message in messages %}{% if message.role == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}" + TURN + "{% endfor %}"
)
ALTERNATES = (
    "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    + TURN
    + "{% endfor %}"
)
SYSTEM_THEN_ALTERNATES = (
    "{% if messages[0].role == 'system' %}<{{ messages[0].content }}>{% set messages = messages[1:] %}{% endif %}"
    + ALTERNATES
)
SYSTEM_FIRST = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}" + TURN + "{% endfor %}"
)
ONE_CALL = (
    "{% for message in messages %}{% if message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('This model only supports single tool-calls at once!') }}{% endif %}"
    "call:{{ message.content }}{{ message.tool_calls[0].function.name }};{% else %}" + TURN + "{% endif %}{% endfor %}"
)


def turn(role: str, content: str | None, **others: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **others}


def talk(*turns: str) -> list[dict[str, Any]]:
    """Turns such as `user hi`."""
    return [turn(*one.split(" ", 1)) for one in turns]  # type: ignore[arg-type]


def render(source: str, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
    return ChatTemplate({"default": source}, {}).render(messages, **options).text


@pytest.mark.parametrize(
    ("source", "turns", "text"),
    [
        (NO_SYSTEM, ["system S", "user u"], "user:S\n\nu;"),
        (NO_SYSTEM, ["system S", "user u", "assistant a", "user v"], "user:S\n\nu;assistant:a;user:v;"),
        (NO_SYSTEM, ["system S"], "user:S;"),
        (NO_SYSTEM, ["system S", "assistant a", "user u"], "user:S;assistant:a;user:u;"),
        (NO_SYSTEM, ["user u", "system S", "assistant a"], "user:u\n\nS;assistant:a;"),
        (NO_SYSTEM, ["user u", "assistant a", "system S", "user v"], "user:u;assistant:a;user:S\n\nv;"),
        (ALTERNATES, ["user a", "user b"], "user:a\n\nb;"),
        (ALTERNATES, ["system S", "developer D", "user a", "user b"], "user:S\n\nD\n\na\n\nb;"),
        (ALTERNATES, ["user a", "assistant b", "assistant c", "user d"], "user:a;assistant:b\n\nc;user:d;"),
        (SYSTEM_THEN_ALTERNATES, ["system S", "user a", "user b"], "<S>user:a\n\nb;"),
        (SYSTEM_THEN_ALTERNATES, ["system S", "developer D", "user a", "user b"], "<S\n\nD>user:a\n\nb;"),
        (SYSTEM_FIRST, ["system S", "system T", "user u"], "system:S\n\nT;user:u;"),
        (SYSTEM_FIRST, ["system S", "user u", "system T", "user v"], "system:S;user:u;user:T\n\nv;"),
    ],
)
def test_a_conversation_that_is_refused_comes_in_another_shape(source: str, turns: list[str], text: str) -> None:
    template = ChatTemplate({"default": source}, {})
    assert [template.render(talk(*turns)).text for _ in range(2)] == [text, text]


@pytest.mark.parametrize("source", [NO_SYSTEM, ALTERNATES, SYSTEM_FIRST, SYSTEM_THEN_ALTERNATES])
def test_a_conversation_that_is_taken_keeps_its_text(source: str) -> None:
    template = ChatTemplate({"default": source}, {})
    template.render(talk("system S", "user a", "user b"))
    assert template.render(talk("user a", "assistant b")).text == "user:a;assistant:b;"
    everything = "{% for message in messages %}" + TURN + "{% endfor %}"
    assert render(everything, talk("system S", "user a", "user b")) == "system:S;user:a;user:b;"


def test_calls_come_one_by_one_each_before_its_result() -> None:
    calls = [{"id": f"{n}", "function": {"name": f"f{n}", "arguments": {}}} for n in (1, 2)]
    messages = [
        turn("user", "hi"),
        turn("assistant", "wait ", tool_calls=calls),
        turn("tool", "two", tool_call_id="2"),
        turn("tool", "one", tool_call_id="1"),
        turn("user", "so?"),
    ]
    assert render(ONE_CALL, messages) == "user:hi;call:wait f1;tool:one;call:f2;tool:two;user:so?;"
    assert ChatTemplate({"default": ONE_CALL}, {}).takes_one_call
    assert not ChatTemplate({"default": ONE_CALL.replace("!= 1", "> 9")}, {}).takes_one_call


def test_no_result_is_lost_when_calls_are_split() -> None:
    calls = [{"id": name, "function": {"name": "f"}} for name in ("a", "a", "b")]
    results = [turn("tool", f"{n}", tool_call_id=name) for n, name in enumerate(("a", "a", "x", "y"))]
    split = with_one_call_a_turn([turn("assistant", None, tool_calls=calls), *results])
    assert sorted(m["content"] for m in split if m["role"] == "tool") == ["0", "1", "2", "3"]
    assert sum(len(m.get("tool_calls", ())) for m in split) == 3


def test_what_is_refused_once_is_not_rendered_again(monkeypatch: pytest.MonkeyPatch) -> None:
    template = ChatTemplate({"default": NO_SYSTEM}, {})
    template.render(talk("system S", "user u"))
    rendered: list[list[str]] = []
    run = template._attempt

    def counted(messages: Sequence[Mapping[str, Any]], *values: Any, **options: Any) -> str:
        rendered.append([m["role"] for m in messages])
        return run(messages, *values, **options)

    monkeypatch.setattr(template, "_attempt", counted)
    assert template.render(talk("system other", "user u", "assistant a", "user v")).text.startswith("user:other\n\nu;")
    template.render(talk("system S", "user u", "assistant a", "user w", "assistant b", "user x"))
    assert ["system"] not in [roles[:1] for roles in rendered[1:]]


def test_a_refusal_of_a_text_is_not_taken_for_one_of_a_shape() -> None:
    """The template takes system turns, but not this one."""
    source = NO_SYSTEM.replace("message.role == 'system'", "message.content == 'bad'")
    template = ChatTemplate({"default": source}, {})
    assert template.render(talk("system bad", "user u")).text == "user:bad\n\nu;"
    assert template.render(talk("system good", "user u")).text == "system:good;user:u;"


def test_the_first_error_is_told_if_nothing_helps() -> None:
    source = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('first') }}{% endif %}{{ raise_exception('second') }}"
    )
    template = ChatTemplate({"default": source}, {})
    for _ in range(2):
        with pytest.raises(StatusError, match="first"):
            template.render(talk("system S", "user u"))
    with pytest.raises(StatusError, match="second"):
        template.render(talk("user u", "user v"))


def test_variables_and_a_continued_message_survive_a_fold() -> None:
    source = NO_SYSTEM.replace("{% endfor %}", "{{ mood }}{% endfor %}")
    messages = talk("system S", "user u", "assistant It is ")
    template = ChatTemplate({"default": source}, {})
    for _ in range(2):
        text = template.render(
            messages, add_generation_prompt=False, continue_final_message=True, variables={"mood": "!"}
        ).text
        assert text == "user:S\n\nu;!assistant:It is "


def test_a_template_may_take_the_system_for_some_variables_only() -> None:
    source = NO_SYSTEM.replace("{% if ", "{% if not modern and ")
    template = ChatTemplate({"default": source}, {})
    talking = talk("system S", "user u")
    assert template.render(talking).text == "user:S\n\nu;"
    assert template.render(talking, variables={"modern": True}).text == "system:S;user:u;"


def test_a_message_with_more_than_text_is_not_folded() -> None:
    messages = [turn("system", "S", tools="[]"), turn("user", "u")]
    assert with_system_folded(messages, keeps_head=False) is messages


def test_joined_turns_keep_calls_and_reasoning() -> None:
    call = {"id": "1", "function": {"name": "f"}}
    messages = [
        turn("assistant", "a", reasoning_content="x"),
        turn("assistant", None, tool_calls=[call], reasoning_content="y"),
    ]
    assert joined(messages) == [turn("assistant", "a", reasoning_content="x\n\ny", tool_calls=[call])]
    results = [turn("tool", "1"), turn("tool", "2")]
    assert joined(results) is results


def test_a_model_without_a_template_takes_one_message_as_its_prompt() -> None:
    template = NoTemplate()
    assert template.render(talk("user Once upon a time")).text == "Once upon a time"
    assert not template.shows_system
    with pytest.raises(StatusError, match=r"takes a single message.*/v1/completions"):
        template.render(talk("system S", "user u"))


def test_named_templates_are_for_their_conversations() -> None:
    template = ChatTemplate({"default": "d", "tool_use": "t", "rag": "r"}, {})
    assert [
        template.chosen(**one).render(talk("user u")).text for one in ({}, {"tools": True}, {"documents": True})
    ] == [
        "d",
        "t",
        "r",
    ]
    assert (
        ChatTemplate({"default": "d", "tool_use": "{% if %}"}, {}).chosen(tools=True).render(talk("user u")).text == "d"
    )
    documents = [{"title": "T", "text": "X"}]
    text = (
        ChatTemplate({"default": "{{ documents[0].text }}"}, {})
        .render(talk("user u"), variables={"documents": documents})
        .text
    )
    assert text == "X"
