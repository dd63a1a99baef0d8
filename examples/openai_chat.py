"""Streams an answer through the openai package. Usage: openai_chat.py [BASE_URL] [QUESTION]"""

import sys

from openai import OpenAI

base_url = sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"
question = sys.argv[2] if len(sys.argv) > 2 else "What is the capital of France?"

client = OpenAI(base_url=f"{base_url}/v1", api_key="unused")
stream = client.chat.completions.create(
    model=client.models.list().data[0].id,
    messages=[{"role": "user", "content": question}],
    temperature=0,
    max_tokens=64,
    stream=True,
)
for chunk in stream:
    print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
