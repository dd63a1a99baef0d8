"""Streams of all protocols continue after an upstream failure, and end with an error when the gateway stops."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.gateway.upstream import routers
from headrace.protos.status import Reason, StatusError
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [{"role": "user", "content": "hi"}]
MOST = 40


def texts(response: str, prefix: str, read: Callable[[Any], str]) -> str:
    """The concatenated text of the events or lines with this prefix."""
    lines = [line.removeprefix(prefix) for line in response.splitlines() if line.startswith(prefix or "{")]
    return "".join(read(json.loads(line)) for line in lines if line.startswith("{"))


# path -> what is asked, and how the text of a stream is read
STREAMS: dict[str, tuple[dict[str, Any], Callable[[str], str]]] = {
    "/v1/chat/completions": (
        {"messages": HI, "stream": True, "max_tokens": MOST},
        lambda text: texts(text, "data: ", lambda one: one["choices"][0]["delta"].get("content", "")),
    ),
    "/v1/messages": (
        {"messages": HI, "stream": True, "max_tokens": MOST},
        lambda text: texts(text, "data: ", lambda one: one.get("delta", {}).get("text", "")),
    ),
    "/api/chat": (
        {"messages": HI, "options": {"num_predict": MOST}},
        lambda text: texts(text, "", lambda one: one["message"]["content"]),
    ),
    "/api/generate": (
        {"prompt": "hi", "options": {"num_predict": MOST}},
        lambda text: texts(text, "", lambda one: one["response"]),
    ),
    "/generate_stream": (
        {"inputs": "hi", "parameters": {"max_new_tokens": MOST}},
        lambda text: texts(text, "data:", lambda one: "" if one["token"]["special"] else one["token"]["text"]),
    ),
    "/v2/models/tiny/generate_stream": (
        {"text_input": "hi", "max_tokens": MOST},
        lambda text: texts(text, "data: ", lambda one: one["text_output"]),
    ),
}


@pytest.fixture(autouse=True)
def _fresh(router: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "FIRST_BACKOFF_S", 0.01)
    router.reset()


@pytest.mark.parametrize("path", STREAMS)
async def test_an_answer_that_breaks_off_upstream_goes_on(gateway: Any, router: Any, kit: Any, path: str) -> None:
    async def lose(_: Any, stream: Any, send: Any) -> None:
        if stream.request.resume_token_ids:
            await kit.speak(router, stream, send)
            return
        for position, token in enumerate(kit.tokens_of(router.answer)[:9]):  # the last one is half of a character
            await send([token], position, None)
        raise StatusError(Reason.DRAINING, "going")

    router.script = lose
    body, read = STREAMS[path]
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text
    assert read(response.text) == router.answer
    _, second = router.streams
    assert list(second.request.resume_token_ids) == kit.tokens_of(router.answer)[:9]


@pytest.mark.parametrize("path", STREAMS)
async def test_a_gateway_that_stops_says_so_in_the_stream(gateway: Any, router: Any, kit: Any, path: str) -> None:
    begun = asyncio.Event()

    async def pause(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("Hi"), 0, None)
        begun.set()
        await asyncio.Event().wait()

    router.script = pause
    asking = asyncio.create_task(gateway.http.post(path, json=STREAMS[path][0]))
    async with asyncio.timeout(patience(10)):
        await begun.wait()
        await asyncio.sleep(0.1)
        gateway.edge.interrupt()
        text = (await asking).text
    last = text.rstrip("\n").splitlines()[-1]
    assert "error" in json.loads(last[last.index("{") :])
    assert "stopping" in last
