"""In each protocol with chats, requests may name a template of the operator's list."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
import pytest_asyncio

from headrace.protos import text_pb2, text_pb2_grpc

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
TEMPLATES = {
    "loud": "{% for m in messages %}{{ m.content | upper }}!{% endfor %}",
    "thinking": "{% for m in messages %}{{ m.content }}?{% endfor %}{{ enable_thinking }}<think>{{ '</think>' }}",
}
CHATS: list[tuple[str, dict[str, Any], str]] = [
    ("/v1/chat/completions", {"messages": HI}, "chat_template"),
    ("/v1/responses", {"input": "hi"}, "chat_template"),
    ("/v1/messages", {"max_tokens": 9, "messages": HI}, "chat_template"),
    ("/api/chat", {"messages": HI, "stream": False}, ""),
    ("/api/generate", {"prompt": "hi", "stream": False}, ""),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def listing(kit_of_module: Any, model: Any) -> AsyncIterator[Any]:
    """A gateway with a list of templates."""
    async with kit_of_module.serving_gateway(model.address, chat_templates=TEMPLATES) as running:
        yield running


@pytest.fixture(autouse=True)
def _fresh(model: Any) -> None:
    model.reset()


@pytest.mark.parametrize(("path", "body", "param"), CHATS)
async def test_a_chat_names_a_template(listing: Any, model: Any, path: str, body: Any, param: str) -> None:
    response = await listing.http.post(path, json={"model": "tiny", **body, "chat_template": "loud"})
    assert response.status_code == 200, response.text
    assert model.prompt.removeprefix("<|bos|>") == "HI!"
    unknown = await listing.http.post(path, json={"model": "tiny", **body, "chat_template": "lou"})
    error = unknown.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    assert unknown.status_code == 400
    assert "there is no template named 'lou'; the server has 'loud', 'thinking'" in message
    assert not param or error.get("param", param) == param


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses/input_tokens", {"input": "hi"}),
        ("/v1/messages/count_tokens", {"messages": HI}),
    ],
)
async def test_its_tokens_are_counted(listing: Any, path: str, body: Any) -> None:
    own = (await listing.http.post(path, json={"model": "tiny", **body})).json()["input_tokens"]
    named = (await listing.http.post(path, json={"model": "tiny", **body, "chat_template": "loud"})).json()
    assert named["input_tokens"] < own


async def test_reasoning_is_switched_as_the_named_template_takes_it(listing: Any, model: Any) -> None:
    body = {"model": "tiny", "messages": HI, "stream": False, "chat_template": "thinking"}
    for think, shown in ((True, "True"), (False, "False")):
        response = await listing.http.post("/api/chat", json={**body, "think": think})
        assert response.status_code == 200, response.text
        assert f"?{shown}<think>" in model.prompt
    disabled = {"type": "disabled"}
    response = await listing.http.post(
        "/v1/messages",
        json={
            "model": "tiny",
            "max_tokens": 9,
            "messages": HI,
            "thinking": disabled,
            "chat_template": "thinking",
        },
    )
    assert response.status_code == 200, response.text
    assert "?False<think>" in model.prompt


async def test_a_prompt_without_a_template_takes_none(listing: Any, model: Any) -> None:
    for more in ({"raw": True}, {"suffix": "x"}):
        body = {"model": "tiny", "prompt": "hi", "stream": False, "chat_template": "loud", **more}
        response = await listing.http.post("/api/generate", json=body)
        assert response.status_code == 400
        assert response.json()["error"].startswith("chat_template is not supported")
    assert model.streams == []


async def test_grpc_names_a_template(listing: Any, model: Any) -> None:
    messages = [text_pb2.ChatMessage(role="user", content="hi")]
    async with grpc.aio.insecure_channel(listing.grpc_address) as channel:
        text = text_pb2_grpc.TextStub(channel)
        asked = text_pb2.ChatRequest(model="tiny", messages=messages, chat_template="loud")
        assert [_ async for _ in text.Chat(asked)]
        assert model.prompt.removeprefix("<|bos|>") == "HI!"
        tokenize = text_pb2.TokenizeRequest(model="tiny", messages=messages, chat_template="loud")
        found = await text.Tokenize(tokenize)
        assert list(found.token_ids) == list(model.streams[0].request.token_ids)
        asked.chat_template = "lou"
        with pytest.raises(grpc.aio.AioRpcError, match="there is no template named 'lou'"):
            assert [_ async for _ in text.Chat(asked)]
