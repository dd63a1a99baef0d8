"""openai-python with images: chats, streams and responses; and with what is refused by name."""

import openai

from tests.e2e.clients.pictures import QUESTION, RIGHT, SWAPPED, URLS
from tests.e2e.clients.target import BASE_URL, MODEL, refusal


def main() -> None:
    """Run all."""
    client = openai.OpenAI(base_url=BASE_URL, api_key="unused", max_retries=0)
    for urls, right in ((URLS, RIGHT), (URLS[::-1], SWAPPED)):
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": "auto"}} for url in urls]
        messages = [{"role": "user", "content": [*parts, {"type": "text", "text": QUESTION}]}]
        asked = {"model": MODEL, "messages": messages, "temperature": 0, "max_tokens": 8}
        answer = client.chat.completions.create(**asked)
        assert (answer.choices[0].message.content or "").strip() == right
        details = answer.usage.prompt_tokens_details
        assert details.image_tokens == 32
        stream = client.chat.completions.create(**asked, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream).strip() == right
        inputs = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
        content = [*inputs, {"type": "input_text", "text": QUESTION}]
        response = client.responses.create(
            model=MODEL, input=[{"role": "user", "content": content}], temperature=0, max_output_tokens=8
        )
        assert response.output_text.strip() == right
    messages = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}]
    error = refusal(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=messages))
    assert "messages[0].content[0]: the server fetches no images" in str(error)
    pdf = "data:application/pdf;base64,JVBERi0xLjc="
    for part, name in (
        ({"type": "input_image", "file_id": "file-1", "detail": "auto"}, "file_id"),
        ({"type": "input_file", "filename": "a.pdf", "file_data": pdf}, "type"),
    ):
        asked = {"model": MODEL, "input": [{"role": "user", "content": [part]}]}
        error = refusal(openai.BadRequestError, lambda asked=asked: client.responses.create(**asked))
        assert error.param == f"input[0].content[0].{name}"
    messages = [{"role": "user", "content": [{"type": "file", "file": {"filename": "a.pdf", "file_data": pdf}}]}]
    error = refusal(openai.BadRequestError, lambda: client.chat.completions.create(model=MODEL, messages=messages))
    assert "the server reads no files; send its text, or pictures of its pages as images" in str(error)


main()
