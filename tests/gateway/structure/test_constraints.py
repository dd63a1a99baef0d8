"""Grammars from all endpoints are translated outside the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import grpc
import pytest

from headrace.gateway.structure import fields as structure
from headrace.protos import text_pb2, text_pb2_grpc
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")

GBNF = 'root ::= "a" | "(" root ")"'
HI = [{"role": "user", "content": "hi"}]
LARK = 'start: "a"'
PATIENCE_S = 20
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HI},
    "/v3/chat/completions": {"messages": HI},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 9},
}


@pytest.fixture(autouse=True)
def fresh(router: Any) -> Iterator[None]:
    router.reset()
    yield
    router.reset()


class Translation:
    """Replaces the translation: records its calls, and blocks until it is released."""

    def __init__(self) -> None:
        self.threads: list[threading.Thread] = []
        self.begun = threading.Event()
        self.let_go = threading.Event()
        self.let_go.set()

    def __call__(self, text: str) -> str:
        assert text == GBNF
        self.threads.append(threading.current_thread())
        self.begun.set()
        assert self.let_go.wait(patience(PATIENCE_S))
        return LARK


@pytest.fixture
def translation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Translation]:
    translation = Translation()
    monkeypatch.setattr(structure, "lark_of", translation)
    yield translation
    translation.let_go.set()


@pytest.mark.parametrize("fields", [{"stream": False}, {"stream": True}])
@pytest.mark.parametrize("path", BODIES)
async def test_http_translates_in_another_thread(
    gateway: Any, router: Any, translation: Translation, path: str, fields: dict[str, Any]
) -> None:
    response = await gateway.http.post(path, json={"model": "tiny", "grammar": GBNF, **fields, **BODIES[path]})
    assert response.status_code == 200, response.text
    assert router.sampling.constraint.grammar == LARK
    assert len(translation.threads) == 1
    assert translation.threads[0] is not threading.current_thread()


async def test_a_response_in_the_background_translates_in_another_thread(
    gateway: Any, translation: Translation
) -> None:
    body = {"model": "tiny", "input": "hi", "background": True, "grammar": GBNF}
    response = await gateway.http.post("/v1/responses", json=body)
    assert response.status_code == 200, response.text
    assert len(translation.threads) == 1
    assert translation.threads[0] is not threading.current_thread()


async def test_grpc_translates_in_another_thread(gateway: Any, router: Any, translation: Translation) -> None:
    params = text_pb2.TextParams(constraint={"grammar": GBNF})
    chat = text_pb2.ChatRequest(messages=[text_pb2.ChatMessage(role="user", content="hi")], params=params)
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        text = text_pb2_grpc.TextStub(channel)
        for call in (text.Chat(chat), text.Complete(text_pb2.CompleteRequest(text="hi", params=params))):
            assert [message async for message in call]
            assert router.sampling.constraint.grammar == LARK
    assert len(translation.threads) == 2
    assert threading.current_thread() not in translation.threads


COMPLETIONS = "/v1/completions"
WITH_GRAMMAR = {"model": "tiny", "grammar": GBNF, **BODIES[COMPLETIONS]}


async def held_in_translation(gateway: Any, translation: Translation) -> asyncio.Task[Any]:
    """A request whose grammar is translated until `translation.let_go` is set."""
    translation.let_go.clear()
    held = asyncio.create_task(gateway.http.post(COMPLETIONS, json=WITH_GRAMMAR))
    assert await asyncio.to_thread(translation.begun.wait, PATIENCE_S)
    return held


async def test_others_are_answered_while_a_grammar_is_translated(gateway: Any, translation: Translation) -> None:
    held = await held_in_translation(gateway, translation)
    plain = {"model": "tiny", **BODIES[COMPLETIONS]}
    assert (await gateway.http.post(COMPLETIONS, json=plain)).status_code == 200
    assert not held.done()
    translation.let_go.set()
    assert (await held).status_code == 200


async def test_more_grammars_than_may_wait_are_refused(
    gateway: Any, translation: Translation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structure, "MAX_PENDING", 1)
    held = await held_in_translation(gateway, translation)
    response = await gateway.http.post(COMPLETIONS, json=WITH_GRAMMAR)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert "grammars" in response.json()["error"]["message"]
    translation.let_go.set()
    assert (await held).status_code == 200
    assert (await gateway.http.post(COMPLETIONS, json=WITH_GRAMMAR)).status_code == 200


async def test_a_client_that_leaves_makes_room(
    gateway: Any, translation: Translation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structure, "MAX_PENDING", 1)
    held = await held_in_translation(gateway, translation)
    held.cancel()
    with suppress(asyncio.CancelledError):
        await held
    translation.let_go.set()
    async with asyncio.timeout(patience(PATIENCE_S)):
        while (response := await gateway.http.post(COMPLETIONS, json=WITH_GRAMMAR)).status_code == 429:
            await asyncio.sleep(0.01)
    assert response.status_code == 200
