"""langchain with images: its own kind of part, through the clients for OpenAI and for Anthropic."""

from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI

from tests.e2e.clients.pictures import BASE64, QUESTION, RIGHT, SWAPPED
from tests.e2e.clients.target import BASE_URL, MODEL


def main() -> None:
    """Run all."""
    models = [
        ChatOpenAI(base_url=BASE_URL, api_key="unused", model=MODEL, temperature=0, max_completion_tokens=8),
        ChatAnthropic(
            base_url=BASE_URL.removesuffix("/v1"), api_key="unused", model=MODEL, temperature=0, max_tokens=8
        ),
    ]
    for model in models:
        for files, right in ((BASE64, RIGHT), (BASE64[::-1], SWAPPED)):
            parts = [{"type": "image", "base64": data, "mime_type": "image/png"} for data in files]
            content = [*parts, {"type": "text", "text": QUESTION}]
            assert model.invoke([HumanMessage(content=content)]).text.strip() == right


main()
