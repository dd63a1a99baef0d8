"""anthropic: create, stream, tools, count_tokens, structured output, errors."""

import anthropic
from anthropic import Anthropic
from target import BASE_URL, MODEL, refusal

client = Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key="unused", max_retries=0)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
# What newer clients have no name for any more goes as it is.
fields = {"model": MODEL, "max_tokens": 24, "extra_body": {"temperature": 0}}

answer = client.messages.create(**fields, system="You answer briefly.", messages=QUESTION)
(block,) = answer.content
assert block.type == "text"
assert "Paris" in block.text
assert answer.stop_reason in ("end_turn", "max_tokens")
assert answer.usage.output_tokens <= 24

counted = client.messages.count_tokens(model=MODEL, system="You answer briefly.", messages=QUESTION)
assert counted.input_tokens == answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0)

with client.messages.stream(**fields, system="You answer briefly.", messages=QUESTION) as stream:
    text = "".join(stream.text_stream)
    final = stream.get_final_message()
assert text == block.text
assert final.stop_reason == answer.stop_reason
assert final.usage.output_tokens == answer.usage.output_tokens
kinds = [event.type for event in client.messages.create(**fields, messages=QUESTION, stream=True)]
assert kinds[0] == "message_start"
assert kinds[-2:] == ["message_delta", "message_stop"]

# The model goes on with what the assistant began.
begun = [*QUESTION, {"role": "assistant", "content": "The capital of France is"}]
assert "Paris" in client.messages.create(**fields, messages=begun).content[0].text
stopped = client.messages.create(**fields, messages=begun, stop_sequences=["aris"])
assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "aris")

tool = {
    "name": "get_weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
asked = {**fields, "max_tokens": 64, "tools": [tool]}
weather = [{"role": "user", "content": "How is the weather in Paris?"}]
choice = {"type": "tool", "name": "get_weather"}
called = client.messages.create(**asked, messages=weather, tool_choice=choice)
(call,) = called.content
assert called.stop_reason == "tool_use"
assert call.type == "tool_use"
assert call.input["city"] in ("Paris", "Rome")
with client.messages.stream(**asked, messages=weather, tool_choice=choice) as stream:
    for _ in stream:
        pass
    assert stream.get_final_message().content[0].input == call.input
told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "sunny"}]}
result = client.messages.create(**asked, messages=[*weather, {"role": "assistant", "content": called.content}, told])
assert result.stop_reason in ("end_turn", "max_tokens", "tool_use")

missing = refusal(
    anthropic.NotFoundError,
    lambda: client.messages.create(model="no-such-model", max_tokens=8, messages=QUESTION),
)
assert missing.body["error"]["type"] == "not_found_error"
image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}
seen = [{"role": "user", "content": [image]}]
error = refusal(anthropic.BadRequestError, lambda: client.messages.create(model=MODEL, max_tokens=8, messages=seen))
assert "image" in str(error)
