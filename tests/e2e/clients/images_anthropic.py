"""anthropic-python with images: messages, streams, documents, results of tools, counts, refusals."""

import anthropic

from tests.e2e.clients.pictures import BASE64, QUESTION, RIGHT, SWAPPED
from tests.e2e.clients.target import BASE_URL, MODEL, refusal


def main() -> None:
    """Run all."""
    client = anthropic.Anthropic(base_url=BASE_URL.removesuffix("/v1"), api_key="unused", max_retries=0)
    for files, right in ((BASE64, RIGHT), (BASE64[::-1], SWAPPED)):
        blocks = [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}} for data in files
        ]
        messages = [{"role": "user", "content": [*blocks, {"type": "text", "text": QUESTION}]}]
        asked = {"model": MODEL, "messages": messages, "max_tokens": 8, "extra_body": {"temperature": 0}}
        answer = client.messages.create(**asked)
        assert answer.content[0].text.strip() == right
        with client.messages.stream(**asked) as stream:
            assert stream.get_final_text().strip() == right
        counted = client.messages.count_tokens(model=MODEL, messages=messages).input_tokens
        usage = answer.usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 32
        call = {"type": "tool_use", "id": "t1", "name": "read", "input": {}}
        result = {"type": "tool_result", "tool_use_id": "t1", "content": blocks}
        shown = client.messages.count_tokens(
            model=MODEL,
            messages=[
                {"role": "user", "content": "what is"},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [result]},
            ],
        )
        assert shown.input_tokens > 32
        document = {"type": "document", "source": {"type": "content", "content": blocks}}
        messages = [{"role": "user", "content": [document]}]
        assert client.messages.count_tokens(model=MODEL, messages=messages).input_tokens > 32
    for source, problem in (
        ({"type": "url", "url": "https://example.com/a.png"}, "the server fetches no images"),
        ({"type": "file", "file_id": "file_1"}, "a source of type file is not supported; send the image as base64"),
    ):
        messages = [{"role": "user", "content": [{"type": "image", "source": source}]}]
        asked = {"model": MODEL, "messages": messages, "max_tokens": 8}
        error = refusal(anthropic.BadRequestError, lambda asked=asked: client.messages.create(**asked))
        assert problem in str(error)


main()
