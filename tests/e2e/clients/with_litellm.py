"""litellm: chat, stream, tools, text completion."""

import asyncio
from typing import Any

import litellm

from tests.e2e.clients.target import BASE_URL, MODEL

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]},
    },
}


def main() -> None:
    """Run all."""
    options: dict[str, Any] = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": "unused", "temperature": 0}
    answer = litellm.completion(messages=QUESTION, max_tokens=16, **options)
    text = answer.choices[0].message.content
    assert "Paris" in text
    assert answer.usage.completion_tokens <= 16
    chunks = list(litellm.completion(messages=QUESTION, max_tokens=16, stream=True, **options))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text
    later = asyncio.run(litellm.acompletion(messages=QUESTION, max_tokens=16, **options))
    assert later.choices[0].message.content == text

    asked: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 64}
    called = litellm.completion(messages=QUESTION, **asked, **options)
    assert called.choices[0].finish_reason == "tool_calls"
    assert called.choices[0].message.tool_calls[0].function.name == "get_weather"
    options["model"] = f"text-completion-openai/{MODEL}"
    completed = litellm.text_completion(prompt="The capital of France is", max_tokens=4, **options)
    assert "Paris" in completed.choices[0].text


main()
