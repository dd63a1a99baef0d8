"""LlamaIndex, LiteLLM and pydantic-ai with images, each in the forms that its users write."""

from typing import Any

import litellm
from llama_index.core.base.llms.types import ChatMessage, ImageBlock, TextBlock
from llama_index.llms.openai_like import OpenAILike
from pydantic_ai import Agent, BinaryContent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

from tests.e2e.clients.pictures import PICTURES, QUESTION, RIGHT, SWAPPED, URLS
from tests.e2e.clients.target import BASE_URL, MODEL

CASES = ((slice(None), RIGHT), (slice(None, None, -1), SWAPPED))
"""Both orders of the pictures."""


def llama_index() -> None:
    """Blocks of a path, and of bytes with a detail."""
    model = OpenAILike(
        model=MODEL,
        api_base=BASE_URL,
        api_key="unused",
        is_chat_model=True,
        temperature=0,
        max_tokens=8,
        context_window=8192,
    )
    for order, right in CASES:
        for blocks in (
            [ImageBlock(path=path) for path in PICTURES[order]],
            [ImageBlock(image=path.read_bytes(), detail="low") for path in PICTURES[order]],
        ):
            asked = ChatMessage(role="user", blocks=[*blocks, TextBlock(text=QUESTION)])
            assert (model.chat([asked]).message.content or "").strip() == right


def through_litellm() -> None:
    """A URL as text, and in an object with the format that LiteLLM adds."""
    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "unused", "temperature": 0}
    for order, right in CASES:
        for urls in (URLS[order], [{"url": url, "format": "image/png"} for url in URLS[order]]):
            parts = [{"type": "image_url", "image_url": url} for url in urls]
            content = [*parts, {"type": "text", "text": QUESTION}]
            answer = litellm.completion(messages=[{"role": "user", "content": content}], max_tokens=8, **options)
            assert answer.choices[0].message.content.strip() == right


def through_pydantic_ai() -> None:
    """Bytes, in chats and in Responses."""
    provider = OpenAIProvider(base_url=BASE_URL, api_key="unused")
    for model in (OpenAIChatModel(MODEL, provider=provider), OpenAIResponsesModel(MODEL, provider=provider)):
        agent = Agent(model, model_settings={"temperature": 0.0, "max_tokens": 8})
        for order, right in CASES:
            pictures = [BinaryContent(path.read_bytes(), media_type="image/png") for path in PICTURES[order]]
            assert agent.run_sync([*pictures, QUESTION]).output.strip() == right


llama_index()
through_litellm()
through_pydantic_ai()
