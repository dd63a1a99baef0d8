"""ollama: chat, generate, streams, tools, formats, models, errors."""

import asyncio
import json

import ollama
from target import BASE_URL, MODEL, refusal

HOST = BASE_URL.removesuffix("/v1")
client = ollama.Client(HOST)
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
GREEDY = {"temperature": 0, "num_predict": 16}

(listed,) = [one for one in client.list().models if one.model == MODEL]
assert len(listed.digest) == 64
assert next(one.context_length for one in client.ps().models if one.model == MODEL) > 1000
shown = client.show(MODEL)
assert {"completion", "tools"} <= set(shown.capabilities)
assert shown.modelinfo["openvino.context_length"] > 1000

answer = client.chat(MODEL, QUESTION, options=GREEDY, keep_alive="5m")
assert "Paris" in answer.message.content
assert answer.done_reason in ("stop", "length")
assert 0 < answer.eval_count <= 16
assert 0 < answer.prompt_eval_duration + answer.eval_duration <= answer.total_duration < 120e9
parts = list(client.chat(MODEL, QUESTION, options=GREEDY, stream=True))
assert "".join(part.message.content for part in parts) == answer.message.content
assert [part.done for part in parts] == [False] * (len(parts) - 1) + [True]
assert parts[-1].eval_count == answer.eval_count

# A prompt, and another one after its answer.
first = client.generate(MODEL, "What is the capital of France?", options=GREEDY)
assert first.response == answer.message.content
assert first.prompt_eval_count == answer.prompt_eval_count
more = "".join(
    part.response
    for part in client.generate(MODEL, "And of Italy?", context=first.context, options=GREEDY, stream=True)
)
assert more
raw = client.generate(MODEL, "The capital of France is", raw=True, options={**GREEDY, "num_predict": 4}, logprobs=True)
assert "Paris" in raw.response
assert "".join(one.token for one in raw.logprobs) == raw.response
assert client.generate(MODEL).done_reason == "load"
stopped = client.generate(MODEL, "The capital of France is", raw=True, options={**GREEDY, "stop": ["aris"]})
assert (stopped.response.strip(), stopped.done_reason) == ("P", "stop")


def get_weather(city: str) -> str:
    """The weather in a city.

    Args:
      city: The city
    """
    return f"sunny in {city}"


called = client.chat(
    MODEL, [{"role": "user", "content": "How is the weather in Paris?"}], tools=[get_weather], options=GREEDY
)
assert called.message.content or called.message.tool_calls
call = {"function": {"name": "get_weather", "arguments": {"city": "Paris"}}}
turns = [*QUESTION, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "sunny", "tool_name": "x"}]
assert client.chat(MODEL, turns, tools=[get_weather], options=GREEDY).eval_count <= 16

schema = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
held = client.chat(MODEL, QUESTION, format=schema, options={"temperature": 0, "num_predict": 32})
assert isinstance(json.loads(held.message.content)["sure"], bool)
assert (
    json.loads(client.generate(MODEL, "Say anything.", format="json", options={"temperature": 0}).response) is not None
)

assert client.pull(MODEL).status == "success"
assert [part.status for part in client.pull(MODEL, stream=True)][-1] == "success"
assert refusal(ollama.ResponseError, lambda: client.pull("no-such-model")).status_code == 404
assert refusal(ollama.ResponseError, lambda: client.chat("no-such-model", QUESTION)).status_code == 404
assert "--ollama-manage" in str(refusal(ollama.ResponseError, lambda: client.copy(MODEL, "mine")))
assert "embeddings" in str(refusal(ollama.ResponseError, lambda: client.embed(MODEL, "hi")))
error = refusal(ollama.ResponseError, lambda: client.chat(MODEL, QUESTION, options={"tfs_z": 0.5}))
assert (error.status_code, "options.tfs_z" in error.error) == (400, True)
image = [{"role": "user", "content": "What is this?", "images": [b"png"]}]
assert "images" in str(refusal(ollama.ResponseError, lambda: client.chat(MODEL, image)))


async def asynchronously() -> str:
    """The answer through the other client."""
    parts = await ollama.AsyncClient(HOST).chat(MODEL, QUESTION, options=GREEDY, stream=True)
    return "".join([part.message.content async for part in parts])


assert asyncio.run(asynchronously()) == answer.message.content
