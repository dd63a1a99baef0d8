"""ollama-python with images: files, bytes and base64, in messages and beside prompts."""

import ollama

from tests.e2e.clients.pictures import BASE64, PICTURES, QUESTION, RIGHT, SWAPPED
from tests.e2e.clients.target import BASE_URL, MODEL


def main() -> None:
    """Run all."""
    client = ollama.Client(BASE_URL.removesuffix("/v1"))
    assert "vision" in client.show(MODEL).capabilities
    greedy = {"temperature": 0, "num_predict": 8}
    for paths, files, right in ((PICTURES, BASE64, RIGHT), (PICTURES[::-1], BASE64[::-1], SWAPPED)):
        for images in (paths, [str(path) for path in paths], files):
            message = {"role": "user", "content": QUESTION, "images": images}
            assert client.chat(MODEL, [message], options=greedy).message.content.strip() == right
        parts = client.generate(
            MODEL, QUESTION, images=[path.read_bytes() for path in paths], options=greedy, stream=True
        )
        assert "".join(part.response for part in parts).strip() == right


main()
