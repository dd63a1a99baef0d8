"""ollama-python with images: files and bytes, in messages and beside prompts."""

import ollama

from tests.e2e.clients.pictures import PICTURES, QUESTION, RIGHT, SWAPPED
from tests.e2e.clients.target import BASE_URL, MODEL


def main() -> None:
    """Run all."""
    client = ollama.Client(BASE_URL.removesuffix("/v1"))
    assert "vision" in client.show(MODEL).capabilities
    greedy = {"temperature": 0, "num_predict": 8}
    for paths, right in ((PICTURES, RIGHT), (PICTURES[::-1], SWAPPED)):
        message = {"role": "user", "content": QUESTION, "images": [str(path) for path in paths]}
        assert client.chat(MODEL, [message], options=greedy).message.content.strip() == right
        parts = client.generate(
            MODEL, QUESTION, images=[path.read_bytes() for path in paths], options=greedy, stream=True
        )
        assert "".join(part.response for part in parts).strip() == right


main()
