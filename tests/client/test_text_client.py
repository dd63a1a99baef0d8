"""The client module against a real gateway, and others that know nothing of the protos: buf curl and the example."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from headrace.client import Reason, StatusError, TextClient
from tests.gateway import conftest as kit
from tests.gateway.conftest import FakeRouter, serving_gateway, serving_router, tiny_bundle, tiny_files  # noqa: F401
from tests.patience import patience

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}<tool_call>{% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}{{ mood }}"
    "{% if enable_thinking is defined %}t{% endif %}<think></think>"
)
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def router(tiny_files: dict[str, bytes]) -> AsyncIterator[Any]:  # noqa: F811
    fake = FakeRouter(kit.tar_of({**tiny_files, "chat_template.jinja": TEMPLATE.encode()}))
    async with serving_router(fake) as (address, _):
        fake.address = address  # type: ignore[attr-defined]
        yield fake


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def address(router: Any) -> AsyncIterator[str]:
    async with serving_gateway(router.address, chat_templates={"short": "hello"}) as gateway:
        yield gateway.grpc_address


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


async def with_client(address: str, work: Any, **options: Any) -> Any:
    """Run blocking code with a client while the loop serves it."""

    def run() -> Any:
        with TextClient(address, **options) as client:
            return work(client)

    return await asyncio.to_thread(run)


async def test_a_chat_is_read_in_pieces_or_as_a_whole(address: str, router: Any) -> None:
    def pieces(client: TextClient) -> Any:
        answers = client.chat("hi", temperature=0)
        return [piece.content for piece in answers], answers.usage

    texts, usage = await with_client(address, pieces)
    assert "".join(texts) == router.answer
    assert usage.completion_tokens == len(router.answer.encode()) + 1

    def whole(client: TextClient) -> Any:
        messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "hi"}]
        return client.chat(messages, n=2, logprobs=0, return_token_ids=True).all()

    answers = await with_client(address, whole)
    assert [answer.text for answer in answers] == [router.answer] * 2
    assert answers[0].finish_reason == "stop"
    assert len(answers[0].logprobs) == len(router.answer.encode())
    assert answers[0].token_ids[-1] == kit.EOS


async def test_calls_and_reasoning_are_put_together(address: str, router: Any) -> None:
    router.answer = '<think>Hm.</think><tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    tool = {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}

    def ask(client: TextClient) -> Any:
        return client.chat("hi", tools=[tool], parallel_tool_calls=False, chat_template_kwargs={"mood": "m"}).whole()

    answer = await with_client(address, ask)
    assert (answer.text, answer.reasoning, answer.finish_reason) == ("", "Hm.", "tool_calls")
    assert [(call.name, json.loads(call.arguments)) for call in answer.calls] == [("f", {"a": 1})]
    for choice in ("required", "f"):

        def call(client: TextClient, choice: str = choice) -> Any:
            return client.chat("hi", tools=[tool], tool_choice=choice).all()

        await with_client(address, call)
        assert router.streams[-1].request.sampling.constraint.grammar


async def test_a_template_of_the_operators_list_formats_a_chat(address: str, router: Any) -> None:
    await with_client(address, lambda client: client.chat("hi", chat_template="short").whole())
    of_chat = list(router.streams[-1].request.token_ids)
    await with_client(address, lambda client: client.complete("hello").whole())
    assert list(router.streams[-1].request.token_ids) == [0, *of_chat]
    with pytest.raises(StatusError, match="there is no template named 'long'"):
        await with_client(address, lambda client: client.chat("hi", chat_template="long").whole())


async def test_completions_tokens_and_models(address: str, router: Any) -> None:
    router.answer = "ab"
    assert (await with_client(address, lambda client: client.complete("hello").whole())).text == "ab"
    assert (await with_client(address, lambda client: client.complete([262]).whole())).text == "ab"
    assert await with_client(address, lambda client: client.tokenize("hello w")) == [0, 262, 263]
    assert await with_client(address, lambda client: client.detokenize([262, 263])) == "hello w"
    assert await with_client(address, lambda client: client.models()) == ["tiny"]


async def test_a_failure_says_its_reason_and_field(address: str) -> None:
    for work in (lambda client: client.chat("hi", temperature=3).whole(), lambda client: client.chat([]).whole()):
        with pytest.raises(StatusError) as caught:
            await with_client(address, work)
        assert caught.value.reason is Reason.INVALID_FIELD
        assert caught.value.field in ("temperature", "messages")
    with pytest.raises(StatusError) as caught:
        await with_client(address, lambda client: client.tokenize("a", model="other"))
    assert caught.value.reason is Reason.MODEL_NOT_FOUND


async def test_leaving_the_answers_cancels_them_and_a_key_is_sent(address: str, router: Any) -> None:
    async def endless(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("a"), 0, None)
        await asyncio.Event().wait()

    router.script = endless

    def first(client: TextClient) -> str:
        with client.chat("hi") as answers:
            return next(iter(answers)).content

    assert await with_client(address, first, api_key="sk-x", timeout_s=30.0) == "a"
    async with asyncio.timeout(patience(5)):
        await router.streams[0].cancelled.wait()


async def curl(address: str, method: str, data: Any) -> tuple[int, str, str]:
    """Exit status, output and errors of a call that uses only the server's reflection."""
    process = await asyncio.create_subprocess_exec(
        BIN / "buf",
        "curl",
        "--protocol=grpc",
        "--http2-prior-knowledge",
        f"--data={json.dumps(data)}",
        f"http://{address}/headrace.v1.Text/{method}",
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd="/",
    )
    async with asyncio.timeout(patience(60)):
        out, errors = await process.communicate()
    return process.returncode or 0, out.decode(), errors.decode()


async def test_buf_curl_chats_by_reflection_alone(address: str, router: Any) -> None:
    request = {"messages": [{"role": "user", "content": "hi"}], "params": {"maxTokens": 64}}
    status, out, errors = await curl(address, "Chat", request)
    assert status == 0, errors
    decoder, answers = json.JSONDecoder(), []
    while out := out.lstrip():
        answer, end = decoder.raw_decode(out)
        answers.append(answer)
        out = out[end:]
    assert "".join(answer.get("content", "") for answer in answers) == router.answer
    assert answers[-1]["finishReason"] == "stop"
    assert answers[-1]["usage"]["completionTokens"]
    status, out, errors = await curl(address, "Chat", {"params": {"temperature": 3}})
    assert status != 0
    assert "google.rpc.ErrorInfo" in errors


async def test_the_example_prints_an_answer(address: str, router: Any) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, ROOT / "examples" / "grpc_chat.py", address, "hi", stdout=subprocess.PIPE, cwd="/"
    )
    async with asyncio.timeout(patience(60)):
        out, _ = await process.communicate()
    assert out.decode() == router.answer + "\n"


async def test_a_method_that_is_not_there_is_refused_with_a_reason(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary("/headrace.v1.Text/Fly", lambda _: b"", lambda raw: raw)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert any(key == "grpc-status-details-bin" for key, _ in caught.value.trailing_metadata() or ())
