"""huggingface_hub's InferenceClient: text_generation whole and streamed, details, grammars, chats, errors."""

import asyncio
import json

from huggingface_hub import AsyncInferenceClient, InferenceClient
from huggingface_hub.errors import ValidationError
from target import BASE_URL, MODEL, refusal

ROOT = BASE_URL.removesuffix("/v1")
client = InferenceClient(ROOT, token="unused")
PROMPT = "The capital of France is"

text = client.text_generation(PROMPT, max_new_tokens=6)
assert "Paris" in text
assert "".join(client.text_generation(PROMPT, max_new_tokens=6, stream=True)) == text
assert client.text_generation(PROMPT, max_new_tokens=6, return_full_text=True) == PROMPT + text

answer = client.text_generation(PROMPT, max_new_tokens=6, details=True, decoder_input_details=True, top_n_tokens=2)
assert answer.generated_text == text
assert (answer.details.finish_reason, answer.details.generated_tokens) == ("length", 6)
assert "".join(token.text for token in answer.details.tokens) == text
assert "".join(token.text for token in answer.details.prefill).endswith(PROMPT)
assert all(len(top) == 2 for top in answer.details.top_tokens)
events = list(client.text_generation(PROMPT, max_new_tokens=6, details=True, stream=True))
assert [event.token.text for event in events] == [token.text for token in answer.details.tokens]
assert events[-1].generated_text == text
assert events[-1].details.finish_reason == "length"

stopped = client.text_generation(PROMPT, max_new_tokens=6, stop=["aris"], details=True)
assert (stopped.generated_text.strip(), stopped.details.finish_reason) == ("Paris", "stop_sequence")
drawn = [
    client.text_generation(PROMPT, max_new_tokens=8, do_sample=True, temperature=0.9, top_p=0.9, seed=7)
    for _ in range(2)
]
assert drawn[0] == drawn[1]
best = client.text_generation(PROMPT, max_new_tokens=4, do_sample=True, best_of=3, details=True)
assert len(best.details.best_of_sequences) == 2
number = client.text_generation("A number:", max_new_tokens=4, grammar={"type": "regex", "value": "[0-9]{3}"})
assert number.isdigit()
schema = {
    "type": "object",
    "properties": {"sure": {"type": "boolean"}},
    "required": ["sure"],
    "additionalProperties": False,
}
held = client.text_generation("Be sure: ", max_new_tokens=32, grammar={"type": "json", "value": schema})
assert isinstance(json.loads(held)["sure"], bool)

refusal(ValidationError, lambda: client.text_generation(PROMPT, watermark=True))
assert client.text_generation(PROMPT, do_sample=True, typical_p=0.5, max_new_tokens=4)
error = refusal(ValidationError, lambda: client.text_generation(PROMPT, typical_p=2.0))
assert "parameters.typical_p" in str(error)

chat = InferenceClient(base_url=ROOT, token="unused").chat_completion(
    [{"role": "user", "content": "What is the capital of France?"}], model=MODEL, max_tokens=16, temperature=0
)
assert "Paris" in chat.choices[0].message.content


async def asynchronously() -> str:
    """The text through the other client."""
    async with AsyncInferenceClient(ROOT, token="unused") as other:
        stream = await other.text_generation(PROMPT, max_new_tokens=6, stream=True)
        return "".join([part async for part in stream])


assert asyncio.run(asynchronously()) == text
