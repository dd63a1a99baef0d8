"""The openai client accepts the gateway's responses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
import pytest_asyncio

pytestmark = pytest.mark.asyncio(loop_scope="module")
HI: Any = [{"role": "user", "content": "hi"}]


@pytest.fixture(autouse=True)
def _fresh(router: Any) -> None:
    router.reset()


@pytest_asyncio.fixture(loop_scope="module")
async def client(gateway: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def test_a_chat_whole_and_streamed(client: openai.AsyncOpenAI, router: Any) -> None:
    whole = await client.chat.completions.create(model="tiny", messages=HI, logprobs=True, top_logprobs=1)
    assert whole.choices[0].message.content == router.answer
    assert whole.usage is not None
    assert whole.usage.prompt_tokens_details is not None
    stream = await client.chat.completions.create(
        model="tiny", messages=HI, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == router.answer
    assert chunks[-1].usage == whole.usage


async def test_a_completion_whole_and_streamed(client: openai.AsyncOpenAI, router: Any) -> None:
    whole = await client.completions.create(model="tiny", prompt="hi", max_tokens=40)
    assert whole.choices[0].text == router.answer
    stream = await client.completions.create(model="tiny", prompt="hi", max_tokens=40, stream=True)
    assert "".join([chunk.choices[0].text async for chunk in stream]) == router.answer


async def test_models(client: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in client.models.list()] == ["tiny"]
    assert (await client.models.retrieve("tiny")).owned_by == "headrace"


async def test_errors_are_the_clients_own_exceptions(client: openai.AsyncOpenAI, router: Any, kit: Any) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await client.chat.completions.create(model="other", messages=HI)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await client.chat.completions.create(model="tiny", messages=HI, temperature=3)
    assert bad.value.param == "temperature"

    async def break_off(_: Any, stream: Any, send: Any) -> None:
        await send(kit.tokens_of("ab"), 0, None)
        raise kit.StatusError(kit.Reason.INTERNAL, "broken")

    router.script = break_off
    stream = await client.chat.completions.create(model="tiny", messages=HI, stream=True)
    with pytest.raises(openai.APIError, match="broken"):
        async for _ in stream:
            pass
