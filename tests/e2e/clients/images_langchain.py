"""langchain with images: its own parts of versions 1 and 0.3, and OpenAI's, through the clients for OpenAI, for its
Responses and for Anthropic."""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from tests.e2e.clients.pictures import BASE64, QUESTION, RIGHT, SWAPPED
from tests.e2e.clients.target import BASE_URL, MODEL


def url_of(data: str) -> str:
    """A data URL."""
    return f"data:image/png;base64,{data}"


FORMS = (
    lambda data: {"type": "image", "base64": data, "mime_type": "image/png"},
    lambda data: {"type": "image", "source_type": "base64", "data": data, "mime_type": "image/png"},
    lambda data: {"type": "image_url", "image_url": {"url": url_of(data)}},
)


def main() -> None:
    """Run all."""
    openai = {"base_url": BASE_URL, "api_key": "unused", "model": MODEL, "temperature": 0, "max_completion_tokens": 8}
    models = [
        ChatOpenAI(**openai),
        ChatOpenAI(**openai, use_responses_api=True),
        ChatAnthropic(
            base_url=BASE_URL.removesuffix("/v1"), api_key="unused", model=MODEL, temperature=0, max_tokens=8
        ),
    ]
    for model in models:
        for files, right in ((BASE64, RIGHT), (BASE64[::-1], SWAPPED)):
            for part_of in FORMS:
                content = [*map(part_of, files), {"type": "text", "text": QUESTION}]
                assert model.invoke([HumanMessage(content=content)]).text.strip() == right
    # Only the client for chats passes a URL without an object.
    content = [
        *({"type": "image_url", "image_url": url_of(data)} for data in BASE64),
        {"type": "text", "text": QUESTION},
    ]
    assert models[0].invoke([HumanMessage(content=content)]).text.strip() == RIGHT


main()
