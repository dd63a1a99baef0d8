"""pydantic-ai: text, a stream, and values of a type by a tool."""

import asyncio
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.clients.target import BASE_URL, MODEL


class Answer(BaseModel):
    """An answer."""

    verdict: Literal["yes", "no"]


async def main() -> None:
    """Run all."""
    model = OpenAIChatModel(MODEL, provider=OpenAIProvider(base_url=BASE_URL, api_key="unused"))
    settings = {"temperature": 0.0, "max_tokens": 16}
    agent = Agent(model, model_settings=settings)
    answer = await agent.run("What is the capital of France?")
    assert "Paris" in answer.output
    async with agent.run_stream("What is the capital of France?") as streamed:
        assert [text async for text in streamed.stream_text()][-1] == answer.output
    for output in (ToolOutput(Answer), NativeOutput(Answer)):
        typed = Agent(model, output_type=output, model_settings={**settings, "max_tokens": 64}, retries=0)
        assert (await typed.run("Is the sky blue?")).output.verdict in ("yes", "no")


asyncio.run(main())
