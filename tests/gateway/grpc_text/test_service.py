"""The gRPC API gives the same answers as the HTTP API, with gRPC statuses and details."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import grpc
import pytest
import pytest_asyncio

from headrace.protos import text_pb2, text_pb2_grpc
from headrace.protos.status import Reason, StatusError, error_of
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI = [text_pb2.ChatMessage(role="user", content="hi")]


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


@pytest_asyncio.fixture(loop_scope="module")
async def text(gateway: Any) -> Any:
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        yield text_pb2_grpc.TextStub(channel)


async def failure(call: Any) -> StatusError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return error_of(caught.value)


async def test_a_chat_streams_text_and_ends_with_reason_and_usage(text: Any, router: Any) -> None:
    call = text.Chat(text_pb2.ChatRequest(model="tiny", messages=HI), metadata=(("x-request-id", "abc"),))
    answers = [answer async for answer in call]
    assert "".join(answer.content for answer in answers) == router.answer
    *middle, last = answers
    assert not any(answer.HasField("finish_reason") or answer.HasField("usage") for answer in middle)
    assert last.finish_reason == "stop"
    assert last.usage.completion_tokens == len(router.answer.encode()) + 1
    assert last.usage.prompt_tokens == len(router.streams[0].request.token_ids)
    assert {answer.request_id for answer in answers} == {"abc"}
    assert router.streams[0].metadata["x-request-id"] == "abc"


async def test_a_completion_takes_text_or_tokens_and_all_parameters(text: Any, router: Any, kit: Any) -> None:
    params = text_pb2.TextParams(
        temperature=0.5, top_k=3, seed=7, max_tokens=5, stop_token_ids=[9], logit_bias={4: 1.5}, ignore_eos=True
    )
    call = text.Complete(text_pb2.CompleteRequest(text="hello", params=params))
    answers = [answer async for answer in call]
    assert "".join(answer.text for answer in answers) == "Hello"
    assert answers[-1].finish_reason == "length"
    request = router.streams[0].request
    assert list(request.token_ids) == [0, 262]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed, sampling.max_tokens) == (0.5, 3, 7, 5)
    assert (list(sampling.stop_token_ids), dict(sampling.logit_bias), sampling.ignore_eos) == ([9], {4: 1.5}, True)
    tokens = text_pb2.CompleteRequest(model="tiny", token_ids=text_pb2.TokenIds(ids=[5, 6]))
    assert [answer async for answer in text.Complete(tokens)]
    assert list(router.streams[1].request.token_ids) == [5, 6]


async def test_a_stop_string_ends_a_chat(text: Any, router: Any) -> None:
    params = text_pb2.TextParams(stop=[", w"])
    answers = [a async for a in text.Chat(text_pb2.ChatRequest(messages=HI, params=params))]
    assert "".join(answer.content for answer in answers) == "Hello"


async def test_calls_that_were_answered_count_as_ok(text: Any, gateway: Any) -> None:
    await text.Detokenize(text_pb2.DetokenizeRequest(token_ids=[262]))
    with pytest.raises(grpc.aio.AioRpcError):
        await text.Detokenize(text_pb2.DetokenizeRequest(token_ids=[100_000]))
    page = (await gateway.http.get("/metrics")).text
    outcomes = re.findall(r'headrace_requests_total\{endpoint="grpc_detokenize",outcome="(\w+)"\}', page)
    assert sorted(outcomes) == ["invalid_field", "ok"]


async def test_failures_have_the_status_and_the_field(text: Any) -> None:
    error = await failure(text.Chat(text_pb2.ChatRequest(model="other", messages=HI)))
    assert (error.reason, error.field) == (Reason.MODEL_NOT_FOUND, "model")
    hot = text_pb2.TextParams(temperature=3)
    error = await failure(text.Chat(text_pb2.ChatRequest(messages=HI, params=hot)))
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, "temperature")
    error = await failure(text.Chat(text_pb2.ChatRequest()))
    assert (error.reason, error.field) == (Reason.INVALID_FIELD, "messages")
    error = await failure(text.Complete(text_pb2.CompleteRequest()))
    assert error.reason is Reason.INVALID_FIELD
    error = await failure(text.Complete(text_pb2.CompleteRequest(text="x" * 300)))
    assert error.reason is Reason.CONTEXT_TOO_LONG


async def test_a_refusal_from_upstream_is_passed_on_with_its_details(text: Any, router: Any) -> None:
    async def refuse(_: Any, stream: Any, send: Any) -> None:
        raise StatusError(Reason.QUEUE_FULL, "full", retry_after_s=2.5)

    router.script = refuse
    error = await failure(text.Chat(text_pb2.ChatRequest(messages=HI)))
    assert (error.reason, error.message) == (Reason.QUEUE_FULL, "full")
    assert error.retry_after_s is not None
    assert 2.5 <= error.retry_after_s <= 3.75


async def test_a_caller_that_cancels_cancels_the_generation(text: Any, router: Any, kit: Any) -> None:
    async def endless(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("a"), 0, None)
        await asyncio.Event().wait()

    router.script = endless
    call = text.Chat(text_pb2.ChatRequest(messages=HI))
    assert (await call.read()).content == "a"
    call.cancel()
    await asyncio.wait_for(router.streams[0].cancelled.wait(), patience(5))


async def test_tokens_texts_and_models(text: Any, kit: Any) -> None:
    tokens = await text.Tokenize(text_pb2.TokenizeRequest(text="hello w"))
    assert (list(tokens.token_ids), tokens.max_context_tokens) == ([0, 262, 263], 256)
    chat = await text.Tokenize(text_pb2.TokenizeRequest(messages=HI))
    assert chat.token_ids[0] == 1
    back = await text.Detokenize(text_pb2.DetokenizeRequest(token_ids=[1, 262, *kit.tokens_of("é")]))
    assert back.text == "<|im_start|>helloé"
    models = await text.ListModels(text_pb2.TextListModelsRequest())
    assert [(model.name, model.max_context_tokens) for model in models.models] == [("tiny", 256)]
    for call in (
        text.Tokenize(text_pb2.TokenizeRequest()),
        text.Detokenize(text_pb2.DetokenizeRequest(token_ids=[270])),
    ):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
