"""Chat templates have the semantics of Hugging Face's, and their failures are the caller's to know."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.gateway.text import chat_template
from headrace.gateway.text.chat_template import ChatTemplate
from headrace.gateway.upstream.bundle import BundleError
from headrace.protos.status import Reason, StatusError

CHATML = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
HI = [{"role": "user", "content": "Hi"}]


def render(source: str, messages: Any = HI, **options: Any) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(messages, **options).text


def refusal(source: str, messages: Any = HI, **options: Any) -> StatusError:
    with pytest.raises(StatusError) as caught:
        render(source, messages, **options)
    assert caught.value.reason is Reason.INVALID_FIELD
    return caught.value


def test_a_conversation_ends_with_the_generation_prompt_only_when_asked() -> None:
    assert render(CHATML) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert render(CHATML, add_generation_prompt=False) == "<|im_start|>user\nHi<|im_end|>\n"


@pytest.mark.parametrize("said", ["It is", "It is ", " It\n\n"])
def test_a_final_message_is_left_open_to_be_continued(said: str) -> None:
    messages = [*HI, {"role": "assistant", "content": said}]
    text = render(CHATML, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{said}"
    assert messages[-1]["content"] == said


def test_a_final_message_without_text_or_not_rendered_cannot_be_continued() -> None:
    assert refusal(CHATML, [{"role": "assistant"}], continue_final_message=True).field == "continue_final_message"
    assert "cannot be continued" in refusal("{{ messages[0]['role'] }}", continue_final_message=True).message


PARTS = (
    "{% for message in messages %}{{ message['role'] | upper }}: "
    "{% for part in message['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] }}{% endfor %}"
    "{{ '\n' }}{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)


def test_a_template_that_wants_parts_gets_them() -> None:
    """Given texts, it would leave them out without a word."""
    talk = [{"role": "system", "content": "Be brief."}, *HI]
    assert render(PARTS, talk) == "SYSTEM: Be brief.\nUSER: Hi\nASSISTANT:"
    assert talk[1] == HI[0]
    template = ChatTemplate({"default": PARTS}, {})
    assert template.shows_system
    said = [*HI, {"role": "assistant", "content": "It"}]
    continued = template.render(said, add_generation_prompt=False, continue_final_message=True).text
    assert continued == "USER: Hi\nASSISTANT: It"


def test_a_template_that_takes_both_gets_texts() -> None:
    both = (
        "{% for message in messages %}{% if message['content'] is string %}text {{ message['content'] }}"
        "{% else %}{% for part in message['content'] %}{% if part['type'] == 'text' %}part {{ part['text'] }}"
        "{% endif %}{% endfor %}{% endif %}{% endfor %}"
    )
    assert render(both) == "text Hi"


def test_blocks_are_trimmed_as_the_reference_trims_them() -> None:
    assert render("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ eos_token }}", "<s>"),
        ("{{ {'b': '<é>', 'a': none} | tojson }}", '{"b": "<é>", "a": null}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}{% set x = 1 %}said{% endgeneration %}{{ x }}", "said"),
        ("{{ strftime_now('%%') }}", "%"),
        ("{{ tools is none and documents is none }}", "True"),
        ("{{ messages | length }}{{ nothing_of_that_name }}", "1"),
    ],
)
def test_the_reference_extensions_are_there(source: str, text: str) -> None:
    assert render(source) == text


def test_further_variables_reach_the_template_but_not_the_gateways_own() -> None:
    template = ChatTemplate({"default": "{{ enable_thinking }}"}, {})
    assert template.render(HI, variables={"enable_thinking": False}).text == "False"
    assert template.uses("enable_thinking")
    assert not template.uses("reasoning_effort")
    assert refusal("", variables={"messages": []}).field == "chat_template_kwargs"


def test_what_a_template_raises_is_told_to_the_caller() -> None:
    assert "roles must alternate" in refusal("{{ raise_exception('roles must alternate') }}").message
    assert "TypeError" in refusal("{{ 'a' + messages[0]['content'] + 1 }}").message
    assert refusal("{{ messages[0].x.y }}").field == "messages"


@pytest.mark.parametrize(
    "source",
    ["{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}", "{% for i in range(10**9) %}{% endfor %}"],
)
def test_a_template_can_neither_change_nor_reach_what_is_outside(source: str) -> None:
    assert refusal(source).field == "messages"


def test_size_and_time_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    long = "{% for i in range(99) %}{{ i }} {% endfor %}"
    monkeypatch.setattr(chat_template, "MAX_TEXT_CHARS", 20)
    assert "longer than 20 characters" in refusal(long).message
    monkeypatch.setattr(chat_template, "MAX_RENDER_S", -1.0)
    assert "takes longer" in refusal(long).message


def test_named_templates_need_a_default_unless_there_is_only_one() -> None:
    assert ChatTemplate({"tool_use": "no", "default": "yes"}, {}).render(HI).text == "yes"
    assert ChatTemplate({"only": "yes"}, {}).render(HI).text == "yes"
    with pytest.raises(BundleError, match="default"):
        ChatTemplate({"a": "", "b": ""}, {})


def test_a_source_that_is_no_jinja_is_refused_when_it_is_loaded() -> None:
    with pytest.raises(BundleError, match="not valid Jinja"):
        ChatTemplate({"default": "{% if %}"}, {})


@pytest.mark.parametrize(
    ("source", "changes"),
    [
        ("{{ messages[0].content | lower }}", True),
        ("{{ messages[0].content.title() }}", True),
        ("{{ messages[0].title }} lower 'upper'", False),
    ],
)
def test_a_change_of_case_is_one_of_texts(source: str, changes: bool) -> None:
    assert ChatTemplate({"default": source}, {}).changes_case == changes
