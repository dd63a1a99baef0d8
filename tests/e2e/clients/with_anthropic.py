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

# What the provider takes, and clients send by default.
listed = client.models.list()
assert MODEL in [model.id for model in listed]
assert client.models.retrieve(MODEL).display_name == MODEL
prompt = {
    "model": MODEL,
    "system": [{"type": "text", "text": "You answer briefly.", "cache_control": {"type": "ephemeral"}}],
    "messages": [*QUESTION, {"role": "system", "content": "Name only the city."}],
    "thinking": {"type": "adaptive", "display": "omitted"},
    "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
    "output_config": {"effort": "high"},
    "tools": [tool, {"type": "web_search_20250305", "name": "web_search"}, {"type": "bash_20250124", "name": "bash"}],
    "betas": ["context-management-2025-06-27"],
}
counted = client.beta.messages.count_tokens(**prompt)
assert counted.context_management.original_input_tokens == counted.input_tokens
warmed = client.beta.messages.create(**prompt, max_tokens=0)
assert (warmed.content, warmed.stop_reason, warmed.usage.output_tokens) == ([], "max_tokens", 0)
raw = client.beta.messages.with_raw_response.create(**prompt, max_tokens=24, extra_body={"temperature": 0})
said = raw.parse()
assert "tools.web_search_20250305" in raw.headers["x-headrace-ignored"]
assert said.context_management.applied_edits == []
assert said.usage.cache_read_input_tokens + said.usage.input_tokens == counted.input_tokens
assert said.usage.cache_read_input_tokens > 0.5 * counted.input_tokens
with client.beta.messages.stream(**prompt, max_tokens=24) as stream:
    assert stream.get_final_message().usage.output_tokens <= 24
long = refusal(
    anthropic.BadRequestError,
    lambda: client.messages.create(model=MODEL, max_tokens=8, messages=[{"role": "user", "content": "the " * 9000}]),
)
assert long.body["error"]["message"].startswith("prompt is too long: ")
