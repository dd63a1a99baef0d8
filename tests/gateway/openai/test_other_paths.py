"""Paths and habits of other servers and of older clients."""

from __future__ import annotations

import asyncio
import json
from typing import Any
from urllib.parse import urlsplit

import pytest

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("path", ["/v1/models/", "/models", "/models/", "/v3/models//"])
async def test_the_models_are_listed_with_a_slash_and_without_a_version(gateway: Any, path: str) -> None:
    response = await gateway.http.get(path)
    assert [model["id"] for model in response.json()["data"]] == ["tiny"]


@pytest.mark.parametrize(
    ("path", "body"), [("/chat/completions", HI), ("/completions", {"prompt": "hi"}), ("/v1/chat/completions/", HI)]
)
async def test_answers_come_at_the_paths_of_llama_cpp(gateway: Any, path: str, body: Any) -> None:
    response = await gateway.http.post(path, json=body)
    assert response.status_code == 200, response.text


async def test_a_model_is_looked_up_without_a_version(gateway: Any) -> None:
    assert (await gateway.http.get("/models/tiny")).json()["id"] == "tiny"
    assert (await gateway.http.get("/v1/models/tiny/")).json()["id"] == "tiny"


async def test_health_is_below_v1_too(gateway: Any) -> None:
    assert (await gateway.http.get("/v1/health")).json() == {"status": "ready"}


async def test_the_tokenizer_is_described(gateway: Any) -> None:
    info = (await gateway.http.get("/tokenizer_info")).json()
    assert info["model_max_length"] == (await gateway.http.get("/v1/models/tiny")).json()["max_model_len"]
    assert "<|im_start|>" in info["chat_template"]
    assert (info["add_bos_token"], info["add_eos_token"]) == (True, False)
    response = await gateway.http.get("/tokenizer_info?model=other")
    assert response.status_code == 404


async def test_a_message_has_annotations(gateway: Any) -> None:
    message = (await gateway.http.post("/v1/chat/completions", json=HI)).json()["choices"][0]["message"]
    assert message["annotations"] == []


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_of_http_1_0_gets_no_chunks(gateway: Any, router: Any, stream: bool) -> None:
    router.reset()
    router.answer = "abc"
    body = json.dumps({**HI, "stream": stream}).encode()
    address = urlsplit(str(gateway.http.base_url))
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    writer.write(b"POST /v1/chat/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n" % len(body) + body)
    raw = await reader.read()  # to the end of the connection
    writer.close()
    head, _, answer = raw.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert b"transfer-encoding" not in head.lower()
    assert b"connection: close" in head.lower()
    if stream:
        *events, end = answer.decode().split("\n\n")[:-1]
        assert end == "data: [DONE]"
        texts = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"].get("content") for event in events]
        assert "".join(filter(None, texts)) == "abc"
    else:
        assert json.loads(answer)["choices"][0]["message"]["content"] == "abc"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": -1}, "at least 1 and at most 2147483647"),
        ({"seed": -(2**70)}, "at least -9223372036854775808 and at most 18446744073709551615"),
        ({"temperature": 2.5}, "at least 0 and at most 2"),
    ],
)
async def test_numbers_in_errors_are_written_as_people_write_them(gateway: Any, fields: Any, words: str) -> None:
    message = (await gateway.http.post("/v1/chat/completions", json={**HI, **fields})).json()["error"]["message"]
    assert words in message
