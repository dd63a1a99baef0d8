"""llama-index: completion, chat, stream, a value of a type by a tool."""

from typing import Literal

from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.llms.openai_like import OpenAILike
from pydantic import BaseModel

from tests.e2e.clients.target import BASE_URL, MODEL


class Answer(BaseModel):
    """An answer."""

    verdict: Literal["yes", "no"]


def main() -> None:
    """Run all."""
    model = OpenAILike(
        model=MODEL,
        api_base=BASE_URL,
        api_key="unused",
        is_chat_model=True,
        is_function_calling_model=True,
        temperature=0,
        max_tokens=48,
        context_window=8192,
    )
    question = [ChatMessage("What is the capital of France?", role="user")]
    answer = model.chat(question).message.content
    assert "Paris" in answer
    assert "".join(chunk.delta or "" for chunk in model.stream_chat(question)) == answer
    texts = OpenAILike(model=MODEL, api_base=BASE_URL, api_key="unused", max_tokens=4, temperature=0)
    assert "Paris" in texts.complete("The capital of France is").text
    program = FunctionCallingProgram.from_defaults(
        Answer, prompt_template_str="Is the sky blue?", llm=model, tool_required=True
    )
    assert program().verdict in ("yes", "no")


main()
