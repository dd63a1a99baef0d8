"""openai-python's Responses API: create, stream, parse, tools, previous_response_id, background, retrieve, delete,
conversations."""

import openai
from openai import OpenAI
from pydantic import BaseModel
from target import BASE_URL, MODEL, refusal

client = OpenAI(base_url=BASE_URL, api_key="unused", max_retries=0)
QUESTION = "What is the capital of France?"
fields = {"model": MODEL, "temperature": 0, "max_output_tokens": 24}

answer = client.responses.create(**fields, input=QUESTION, instructions="You answer briefly.", metadata={"a": "b"})
assert "Paris" in answer.output_text
assert answer.usage is not None
assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
assert answer.metadata == {"a": "b"}

# A stream, as raw events and as the client adds them up.
kinds = []
text = ""
for event in client.responses.create(**fields, input=QUESTION, instructions="You answer briefly.", stream=True):
    kinds.append(event.type)
    if event.type == "response.output_text.delta":
        text += event.delta
    assert event.sequence_number == len(kinds) - 1
assert text == answer.output_text
assert kinds[:2] == ["response.created", "response.in_progress"]
assert kinds[-1] in ("response.completed", "response.incomplete")


class Verdict(BaseModel):
    """The type of a parsed answer."""

    city: str
    sure: bool


room = {**fields, "max_output_tokens": 64}
parsed = client.responses.parse(**room, input=QUESTION, text_format=Verdict)
assert isinstance(parsed.output_parsed, Verdict)
with client.responses.stream(**room, input=QUESTION, text_format=Verdict) as stream:
    for _ in stream:
        pass
    final = stream.get_final_response()
assert final.output_parsed == parsed.output_parsed

# A tool, its result, and the conversation that is kept.
tool = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather in a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
asked = client.responses.create(
    **room, input="How is the weather in Paris?", tools=[tool], tool_choice="required", parallel_tool_calls=False
)
(call,) = asked.output
assert call.type == "function_call"
assert call.name == "get_weather"
told = {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"}
result = client.responses.create(**fields, input=[told], previous_response_id=asked.id, tools=[tool])
assert result.output
items = list(client.responses.input_items.list(result.id, order="asc", limit=2))
assert [item.type for item in items] == ["message", "function_call", "function_call_output"]

# By hand, from the items of the answer.
by_hand = client.responses.create(
    **fields, input=[{"role": "user", "content": "How is it in Paris?"}, *asked.output, told], tools=[tool], store=False
)
assert by_hand.output

# What is kept, in the background and not.
assert client.responses.retrieve(asked.id).output == asked.output
begun = client.responses.create(**fields, input=QUESTION, background=True, stream=True)
events = list(begun)
assert events[0].type == "response.created"
repeated = list(client.responses.retrieve(events[0].response.id, stream=True, starting_after=1))
assert [event.sequence_number for event in repeated] == list(range(2, len(events)))
assert client.responses.cancel(events[0].response.id).status in ("completed", "incomplete")
client.responses.delete(asked.id)
refusal(openai.NotFoundError, lambda: client.responses.retrieve(asked.id))
refusal(openai.NotFoundError, lambda: client.responses.create(model="no-such-model", input=QUESTION))

# A custom tool, whole and streamed; hosted tools beside it, and alone.
custom = {
    "type": "custom",
    "name": "note",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "+" /[a-z]{1,8}/ LF\n%import common.LF'},
}
search = [{"type": "web_search"}]
noting = {**room, "input": "Note it.", "tools": [custom, *search], "tool_choice": "required"}
raw = client.responses.with_raw_response.create(**noting)
assert raw.headers["x-headrace-ignored"] == "tools.web_search"
call = raw.parse().output[0]
assert call.type == "custom_tool_call"
assert call.input[0] == "+"
with client.responses.stream(**noting) as stream:
    deltas = [event.delta for event in stream if event.type == "response.custom_tool_call_input.delta"]
    final = stream.get_final_response()
assert final.output[0].input == call.input == "".join(deltas)
told = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "noted"}
assert client.responses.create(**{**noting, "input": [call, told], "tool_choice": "auto"}).output
error = refusal(openai.BadRequestError, lambda: client.responses.create(**fields, input=QUESTION, tools=search))
assert error.param == "tools[0].type"

# A conversation, its metadata, its items in pages, and responses that continue it.
conversation = client.conversations.create(
    items=[{"type": "message", "role": "developer", "content": "You answer briefly."}], metadata={"topic": "capitals"}
)
assert client.conversations.retrieve(conversation.id) == conversation
updated = client.conversations.update(conversation.id, metadata={"topic": "cities"})
assert updated.metadata == {"topic": "cities"}
answer = client.responses.create(**fields, input=QUESTION, conversation=conversation.id)
assert answer.conversation is not None
assert answer.conversation.id == conversation.id
going_on = {"input": "And of Italy?", "conversation": {"id": conversation.id}, "stream": True}
*_, last = client.responses.create(**fields, **going_on)
listed = list(client.conversations.items.list(conversation.id, order="asc", limit=2))
assert [item.role for item in listed] == ["developer", "user", "assistant", "user", "assistant"]
assert [part.text for part in listed[2].content] == [answer.output_text]
assert listed[-1].id == last.response.output[-1].id
added = client.conversations.items.create(
    conversation.id,
    items=[{"role": "user", "content": "Thanks."}, {**told, "id": "ctco_1"}],
    include=["reasoning.encrypted_content", "message.input_image.image_url"],
)
assert [item.type for item in added.data] == ["message", "custom_tool_call_output"]
assert client.conversations.items.retrieve("ctco_1", conversation_id=conversation.id) == added.data[1]
assert client.conversations.items.delete("ctco_1", conversation_id=conversation.id).id == conversation.id
refusal(openai.NotFoundError, lambda: client.conversations.items.retrieve("ctco_1", conversation_id=conversation.id))
both = {"conversation": conversation.id, "previous_response_id": answer.id}
assert refusal(openai.BadRequestError, lambda: client.responses.create(**fields, **both)).param == "conversation"
assert client.conversations.delete(conversation.id).deleted
refusal(openai.NotFoundError, lambda: client.conversations.retrieve(conversation.id))
