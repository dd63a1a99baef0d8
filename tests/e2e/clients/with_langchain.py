"""langchain-openai: chat, stream, bound tools, structured output."""

from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
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
    options: dict[str, Any] = {"base_url": BASE_URL, "api_key": "unused", "model": MODEL, "temperature": 0}
    model = ChatOpenAI(**options, max_completion_tokens=16)
    answer = model.invoke("What is the capital of France?")
    assert "Paris" in answer.text
    assert answer.usage_metadata["output_tokens"] <= 16
    assert "".join(chunk.text for chunk in model.stream("What is the capital of France?")) == answer.text

    bound = ChatOpenAI(**options, max_completion_tokens=64).bind_tools(
        [get_weather], tool_choice="required", parallel_tool_calls=False
    )
    question = HumanMessage("How is the weather in Paris?")
    called = bound.invoke([question])
    call = called.tool_calls[0]
    assert call["name"] == "get_weather"
    assert call["args"]["city"] in ("Paris", "Rome")
    assert called.response_metadata["finish_reason"] == "tool_calls"
    whole: Any = None
    for chunk in bound.stream([question]):
        whole = chunk if whole is None else whole + chunk
    assert [one["args"] for one in whole.tool_calls] == [one["args"] for one in called.tool_calls]
    history = [question, AIMessage("", tool_calls=[call]), ToolMessage("Rain.", tool_call_id=call["id"])]
    assert model.invoke(history).text

    for method in ("json_schema", "function_calling"):
        found = ChatOpenAI(**options, max_completion_tokens=64).with_structured_output(Mood, method=method)
        assert isinstance(found.invoke("I am happy."), Mood)


main()
