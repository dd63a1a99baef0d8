"""Chat templates of the operator's list, which requests name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.text.chat_template import read_templates
from headrace.gateway.text.models import load_text_side

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
LOUD = "{% for m in messages %}{{ m.content | upper }}!{% endfor %}{{ more }}"
CALLS = "{{ tools | length }}<|START_ACTION|>{{ messages[0].content }}"
TOOL = {"type": "function", "function": {"name": "now"}}


async def test_a_request_may_name_a_template_of_the_list(kit: Any, model: Any) -> None:
    templates = {"loud": LOUD, "calls": CALLS}
    async with kit.serving_gateway(model.address, chat_templates=templates) as gateway:

        async def prompt_of(**fields: Any) -> str:
            response = await gateway.http.post("/tokenize", json={"model": "tiny", "messages": HI, **fields})
            assert response.status_code == 200, response.text
            tokens = response.json()["tokens"]
            text = await gateway.http.post("/detokenize", json={"model": "tiny", "tokens": tokens})
            return str(text.json()["prompt"])

        assert await prompt_of(chat_template="loud") == "HI!"
        assert await prompt_of(chat_template="loud", chat_template_kwargs={"more": "?"}) == "HI!?"
        own = await prompt_of()
        assert "HI!" not in own
        # A special token that only the caller wrote stays text, in the operator's templates as in the model's own.
        for text in ("<|im_end|>", "<s>"):
            messages = [{"role": "user", "content": text}]
            assert len(await tokens_of(gateway, messages, "loud")) > 2

        model.reset()
        model.answer = '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "now", "parameters": {}}]<|END_ACTION|>'
        body = {"model": "tiny", "messages": HI, "tools": [TOOL], "chat_template": "calls"}
        answer = await gateway.http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200, answer.text
        (call,) = answer.json()["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "now", "arguments": "{}"}

        for name in ("lou", "{{ messages }}", ""):
            response = await gateway.http.post("/v1/chat/completions", json={**body, "chat_template": name})
            error = response.json()["error"]
            assert (response.status_code, error["param"]) == (400, "chat_template")
            assert f"there is no template named '{name}'; the server has 'loud', 'calls'" in error["message"]
        response = await gateway.http.post("/tokenize", json={"model": "tiny", "prompt": "a", "chat_template": "loud"})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "chat_template")


async def tokens_of(gateway: Any, messages: Any, name: str) -> list[int]:
    body = {"model": "tiny", "messages": messages, "chat_template": name}
    response = await gateway.http.post("/tokenize", json=body)
    assert response.status_code == 200, response.text
    return list(response.json()["tokens"])


async def test_without_a_list_the_flag_is_named(front: Any) -> None:
    body = {"model": "tiny", "messages": HI, "chat_template": "x"}
    error = (await front.http.post("/v1/chat/completions", json=body)).json()["error"]
    assert "there is no template named 'x'; the server has none (--chat-template)" in error["message"]


async def test_the_list_is_read_from_files(tmp_path: Path, tiny_bundle: bytes) -> None:
    good, bad = tmp_path / "good.jinja", tmp_path / "bad.jinja"
    good.write_text(LOUD)
    bad.write_text("{% if %}")
    assert read_templates([f"a={good}", f"b.2-c={good}"]) == {"a": LOUD, "b.2-c": LOUD}
    for value, problem in (
        ("a", "must be NAME=FILE"),
        (f"a b={good}", "must be NAME=FILE"),
        (f"a={tmp_path / 'none'}", "the chat template 'a' cannot be used: "),
        (f"a={bad}", "the chat template 'a' cannot be used: the chat template is not valid Jinja"),
    ):
        with pytest.raises(ValueError, match=problem):
            read_templates([value])
    with pytest.raises(ValueError, match="there are two templates named 'a'"):
        read_templates([f"a={good}", f"a={good}"])
    side = load_text_side(tiny_bundle, {"a": LOUD})
    assert side.named_templates["a"].source == LOUD
    side.tokenizer.close()
