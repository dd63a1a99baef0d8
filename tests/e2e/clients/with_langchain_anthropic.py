"""langchain-anthropic: chat, stream, bound tools, structured output, usage."""

from typing import Any, Literal

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from pydantic import BaseModel

from tests.e2e.clients.target import BASE_URL, MODEL


@tool
def get_weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather in a city."""
    return f"Rain in {city}."


class Mood(BaseModel):
    """A mood."""

    mood: Literal["good", "bad"]


def main() -> None:
    """Run all."""
    options: dict[str, Any] = {"base_url": BASE_URL.removesuffix("/v1"), "api_key": "unused", "model": MODEL}
    model = ChatAnthropic(**options, max_tokens=16, temperature=0, max_retries=0)
    question = [SystemMessage("You answer briefly."), HumanMessage("What is the capital of France?")]
    answer = model.invoke(question)
    assert "Paris" in answer.text
    assert answer.usage_metadata["output_tokens"] <= 16
    chunks = list(model.stream(question))
    assert "".join(chunk.text for chunk in chunks) == answer.text
    streamed = sum(chunk.usage_metadata["input_tokens"] for chunk in chunks if chunk.usage_metadata)
    assert streamed == answer.usage_metadata["input_tokens"]

    weather = HumanMessage("How is the weather in Paris?")
    bound = ChatAnthropic(**options, max_tokens=64, temperature=0).bind_tools(
        [get_weather], tool_choice="any", parallel_tool_calls=False
    )
    called = bound.invoke([weather])
    call = called.tool_calls[0]
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    assert called.response_metadata["stop_reason"] == "tool_use"
    whole: Any = None
    for chunk in bound.stream([weather]):
        whole = chunk if whole is None else whole + chunk
    assert [one["args"] for one in whole.tool_calls] == [one["args"] for one in called.tool_calls]
    assert model.invoke([weather, called, ToolMessage("Rain.", tool_call_id=call["id"])]).text
    assert model.invoke([weather, AIMessage("", tool_calls=[call]), ToolMessage("Rain.", tool_call_id=call["id"])]).text

    for method in ("json_schema", "function_calling"):
        found = ChatAnthropic(**options, max_tokens=64).with_structured_output(Mood, method=method)
        assert isinstance(found.invoke("I am happy."), Mood)


main()
