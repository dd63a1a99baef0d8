"""Chats, completions, embeddings, rerank and scores over gRPC, with plain Python values.

    with TextClient("127.0.0.1:8001") as client:
        for piece in client.chat("What is the capital of France?", max_tokens=64):
            print(piece.content, end="", flush=True)

Every failure raises a `StatusError` with the reason and, if a field is at fault, its name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar, cast

import grpc
from google.protobuf.struct_pb2 import Struct

from headrace.common.transport.channels import CHANNEL_OPTIONS
from headrace.protos import text_pb2
from headrace.protos.status import error_of
from headrace.protos.text_pb2_grpc import TextStub

Message = Mapping[str, Any]
_Response = TypeVar("_Response", text_pb2.ChatResponse, text_pb2.CompleteResponse)
_MODES = {
    "auto": text_pb2.CHAT_TOOL_MODE_AUTO,
    "required": text_pb2.CHAT_TOOL_MODE_REQUIRED,
    "none": text_pb2.CHAT_TOOL_MODE_NONE,
}


@dataclass(slots=True)
class Call:
    """A tool that the model calls. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """One complete answer."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    logprobs: list[text_pb2.TextLogprob] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str = ""


class Answers(Generic[_Response]):
    """Answers of a running call. Iterate over their pieces as they arrive, or wait for `all` or `whole`. `close`, or
    the end of a `with` block, cancels the call."""

    def __init__(self, call: Any) -> None:
        self._call = call
        self._whole: dict[int, Answer] = {}
        self.usage: text_pb2.TextUsage | None = None
        """Token counts; set after all answers have ended."""

    def __iter__(self) -> Iterator[_Response]:
        try:
            for piece in self._call:
                self._add(piece)
                yield piece
        except grpc.RpcError as error:
            raise error_of(error) from error

    def all(self) -> list[Answer]:
        """Wait until all answers have ended, and return them in the order of their numbers."""
        for _ in self:
            pass
        return [answer for _, answer in sorted(self._whole.items())]

    def whole(self) -> Answer:
        """Wait until all answers have ended, and return the first."""
        return self.all()[0]

    def close(self) -> None:
        """Cancel the call if it is still running."""
        self._call.cancel()

    def __enter__(self) -> Answers[_Response]:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _add(self, piece: _Response) -> None:
        answer = self._whole.setdefault(piece.index, Answer())
        if isinstance(piece, text_pb2.ChatResponse):
            answer.text += piece.content
            answer.reasoning += piece.reasoning_content
            for part in piece.tool_calls:
                if part.index == len(answer.calls):
                    answer.calls.append(Call(part.id, part.name))
                answer.calls[part.index].arguments += part.arguments
        else:
            answer.text += piece.text
        answer.logprobs.extend(piece.logprobs)
        answer.token_ids.extend(piece.token_ids)
        if piece.HasField("finish_reason"):
            answer.finish_reason = piece.finish_reason
        if piece.HasField("usage"):
            self.usage = piece.usage


class TextClient:
    """A connection to a gateway. Thread-safe."""

    def __init__(
        self,
        address: str,
        *,
        api_key: str = "",
        credentials: grpc.ChannelCredentials | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """`address` is HOST:PORT. `credentials` turn on TLS. `timeout_s` limits the duration of each call."""
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=CHANNEL_OPTIONS)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=CHANNEL_OPTIONS)
        self._text = TextStub(self._channel)
        metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._options: dict[str, Any] = {"metadata": metadata, "timeout": timeout_s}

    def close(self) -> None:
        """Close the connection and cancel all calls."""
        self._channel.close()

    def __enter__(self) -> TextClient:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def chat(
        self,
        messages: str | Iterable[Message | text_pb2.ChatMessage],
        *,
        model: str = "",
        tools: Sequence[Mapping[str, Any]] = (),
        tool_choice: str = "",
        parallel_tool_calls: bool | None = None,
        reasoning_effort: str | None = None,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        continue_final_message: bool = False,
        **params: Any,
    ) -> Answers[text_pb2.ChatResponse]:
        """Request answers to a conversation, or to a single question.

        Each message is a mapping with the fields of `ChatMessage`. Each tool is a mapping with the fields of
        `ChatTool`; its parameters are a JSON schema. `tool_choice` is auto, required, none, or the name of a tool.
        `chat_template` is a name of the operator's list.
        `params` are fields of `TextParams`.
        """
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        request = text_pb2.ChatRequest(
            model=model,
            messages=[one if isinstance(one, text_pb2.ChatMessage) else _message(one) for one in messages],
            params=text_pb2.TextParams(**params),
            tools=[_tool(tool) for tool in tools],
            reasoning_effort=reasoning_effort,
            chat_template=chat_template,
            continue_final_message=continue_final_message,
        )
        if parallel_tool_calls is not None:
            request.parallel_tool_calls = parallel_tool_calls
        if tool_choice in _MODES:
            request.tool_choice.mode = _MODES[tool_choice]
        elif tool_choice:
            request.tool_choice.tool = tool_choice
        if chat_template_kwargs is not None:
            variables = Struct()
            variables.update(dict(chat_template_kwargs))
            request.chat_template_kwargs.CopyFrom(variables)
        return Answers(self._text.Chat(request, **self._options))

    def complete(
        self, prompt: str | Sequence[int], *, model: str = "", **params: Any
    ) -> Answers[text_pb2.CompleteResponse]:
        """Request continuations of a text or of token ids. `params` are fields of `TextParams`."""
        request = text_pb2.CompleteRequest(model=model, params=text_pb2.TextParams(**params))
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return Answers(self._text.Complete(request, **self._options))

    def tokenize(self, text: str, *, model: str = "") -> list[int]:
        """The token ids of a text."""
        return list(self._ask(self._text.Tokenize, text_pb2.TokenizeRequest(model=model, text=text)).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "") -> str:
        """The text of token ids."""
        answer = self._ask(self._text.Detokenize, text_pb2.DetokenizeRequest(model=model, token_ids=token_ids))
        return cast("str", answer.text)

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        model: str = "",
        dimensions: int | None = None,
        truncate_prompt_tokens: int | None = None,
    ) -> list[list[float]]:
        """The vectors of texts, each a text or its token ids."""
        request = text_pb2.EmbedRequest(
            model=model,
            texts=[
                text_pb2.EmbedText(text=text)
                if isinstance(text, str)
                else text_pb2.EmbedText(token_ids=text_pb2.TokenIds(ids=text))
                for text in texts
            ],
            dimensions=dimensions,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return [list(one.values) for one in self._ask(self._text.Embed, request).embeddings]

    def rerank(
        self, query: str, documents: Sequence[str], *, model: str = "", top_n: int | None = None
    ) -> list[tuple[int, float]]:
        """Number and score of the documents, the most relevant first."""
        request = text_pb2.RerankRequest(model=model, query=query, documents=documents, top_n=top_n)
        return [(one.index, one.relevance_score) for one in self._ask(self._text.Rerank, request).results]

    def score(
        self,
        first: str | Sequence[str],
        second: Sequence[str],
        *,
        model: str = "",
        truncate_prompt_tokens: int | None = None,
    ) -> list[float]:
        """The scores of pairs of texts: of one first text with each second one, or of two lists of the same length,
        pair by pair."""
        request = text_pb2.ScoreRequest(
            model=model,
            first_texts=[first] if isinstance(first, str) else first,
            second_texts=second,
            truncate_prompt_tokens=truncate_prompt_tokens,
        )
        return list(self._ask(self._text.Score, request).scores)

    def models(self) -> list[str]:
        """The names of the available models."""
        return [model.name for model in self._ask(self._text.ListModels, text_pb2.TextListModelsRequest()).models]

    def _ask(self, method: Any, request: Any) -> Any:
        try:
            return method(request, **self._options)
        except grpc.RpcError as error:
            raise error_of(error) from error


def _message(message: Message) -> text_pb2.ChatMessage:
    return text_pb2.ChatMessage(**message)


def _tool(tool: Mapping[str, Any]) -> text_pb2.ChatTool:
    parameters = tool.get("parameters", "")
    if not isinstance(parameters, str):
        parameters = json.dumps(parameters)
    return text_pb2.ChatTool(**{**tool, "parameters": parameters})
