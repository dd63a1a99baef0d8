"""The APIs that the client supports: how a request is written, and how a line of the stream is read.

OpenAI's three come in server-sent events, as do TGI's and KServe's; Ollama's lines are JSON. A line is decoded into the
few fields that count, which costs about a microsecond.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote

import msgspec

Message = Mapping[str, str]
"""`role` and `content` of a message."""


class Prompt(NamedTuple):
    """The content of a request: messages, the last one from the user, and the length of the answer in tokens."""

    messages: Sequence[Message]
    max_tokens: int
    number: int = 0
    """Of the conversation."""

    @property
    def text(self) -> str:
        """The messages as one text, for APIs without messages."""
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n".join(message["content"] for message in self.messages)


class Options(NamedTuple):
    """Fields that all requests share. `sampling` goes to the place of the API's parameters, with the API's names;
    `extra` goes into the body at its top level."""

    model: str
    ignore_eos: bool = False
    sampling: Mapping[str, Any] = {}
    extra: Mapping[str, Any] = {}


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Parameters of sampling, in OpenAI's and vLLM's words."""
_OWN_WORDS: Mapping[str, str] = {name: name for name in SAMPLING}


class Piece(NamedTuple):
    """The content of an event. `is_last` ends the stream as the protocol defines."""

    text: str = ""
    has_content: bool = False
    finish_reason: str = ""
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    error: str = ""
    is_last: bool = False
    is_of_answer: bool = True
    """False for an event that only counts tokens or ends the stream."""
    counts_itself: bool = False
    """Whether `completion_tokens` are those of this event, not of the whole answer."""
    cached_tokens: int | None = None
    """Of the prompt, those that the server found in its cache."""


_LAST = Piece(is_last=True, is_of_answer=False)


class Api(Protocol):
    """The interface of an API."""

    models_path: str
    """Where the names of models are."""
    has_prefix: bool
    """Whether lines begin with `data:`."""
    marks_end: bool
    """Whether the protocol marks the end of a stream."""
    ignores_eos: bool
    """Whether it can be told to continue after the end of an answer."""
    sampling: Mapping[str, str]
    """Its words for those of SAMPLING that it has."""

    def path(self, model: str) -> str:
        """The path of requests."""

    def body(self, prompt: Prompt, options: Options) -> bytes:
        """A request's body."""

    def read(self, payload: bytes) -> Piece | str:
        """Decode an event. Returns a text if the event has nothing else. Raises msgspec.DecodeError if it is no event
        of this API."""

    def model_names(self, raw: bytes) -> list[str]:
        """The names in the response from `models_path`. Raises msgspec.DecodeError."""


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: Any = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


class _Named(msgspec.Struct):
    id: str


class _List(msgspec.Struct):
    data: list[_Named]


_OF_CHUNK = msgspec.json.Decoder(_Chunk)


class _OpenAI:
    """The common part of completions and chats."""

    models_path = "/v1/models"
    has_prefix = True
    marks_end = True
    ignores_eos = True
    sampling: Mapping[str, str] = _OWN_WORDS

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def path(self, model: str) -> str:
        """The path, which is the same for all models."""
        return self._endpoint

    def read(self, payload: bytes) -> Piece | str:
        """Decode a chunk, or the mark of the end."""
        if payload == b"[DONE]":
            return _LAST
        chunk = _OF_CHUNK.decode(payload)
        if len(chunk.choices) == 1 and chunk.usage is None and chunk.error is None:
            only = chunk.choices[0]
            if only.finish_reason is None:
                text = only.text if only.delta is None else only.delta.content
                if text:
                    return text
        if chunk.error is not None:
            return Piece(error=_message(chunk.error))
        prompt_tokens = completion_tokens = cached_tokens = None
        if chunk.usage is not None:
            prompt_tokens, completion_tokens = chunk.usage.prompt_tokens, chunk.usage.completion_tokens
            cached_tokens = _cached_in(chunk.usage.prompt_tokens_details)
        if not chunk.choices:
            return Piece(
                "", False, "", prompt_tokens, completion_tokens, is_of_answer=False, cached_tokens=cached_tokens
            )
        choice = chunk.choices[0]
        text = choice.text or ""
        has_content = bool(text)
        delta = choice.delta
        if delta is not None:
            text = delta.content or delta.reasoning_content or delta.reasoning or ""
            has_content = bool(text) or bool(delta.tool_calls)
        return Piece(
            text,
            has_content,
            choice.finish_reason or "",
            prompt_tokens,
            completion_tokens,
            cached_tokens=cached_tokens,
        )

    def model_names(self, raw: bytes) -> list[str]:
        """The ids in the list."""
        return [named.id for named in msgspec.json.decode(raw, type=_List).data]


def _cached_in(details: Any) -> int | None:
    """The cached tokens in the details of a prompt's usage, if the server tells them."""
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return cached if isinstance(cached, int) else None


class Completions(_OpenAI):
    """POST /v1/completions."""

    def body(self, prompt: Prompt, options: Options) -> bytes:
        """The body: one text, streamed with usage."""
        return _encoded({"model": options.model, "prompt": prompt.text, "max_tokens": prompt.max_tokens}, options)


class Chat(_OpenAI):
    """POST /v1/chat/completions."""

    def body(self, prompt: Prompt, options: Options) -> bytes:
        """The body: messages, streamed with usage."""
        head = {"model": options.model, "messages": prompt.messages, "max_completion_tokens": prompt.max_tokens}
        return _encoded(head, options)


_STREAMED: Mapping[str, Any] = {"stream": True, "stream_options": {"include_usage": True}}
_ENDLESS: Mapping[str, Any] = {"ignore_eos": True}


def _encoded(head: Mapping[str, Any], options: Options) -> bytes:
    endless = _ENDLESS if options.ignore_eos else {}
    return msgspec.json.encode({**head, **_STREAMED, **endless, **options.sampling, **options.extra})


class _ResponseUsage(msgspec.Struct):
    input_tokens: int | None = None
    output_tokens: int | None = None
    input_tokens_details: Any = None


class _Incomplete(msgspec.Struct):
    reason: str = ""


class _Response(msgspec.Struct):
    usage: _ResponseUsage | None = None
    incomplete_details: _Incomplete | None = None
    error: Any = None


class _ResponseEvent(msgspec.Struct):
    type: str = ""
    delta: Any = None
    response: _Response | None = None
    message: str | None = None


_OF_RESPONSE_EVENT = msgspec.json.Decoder(_ResponseEvent)
_NOTHING = Piece(is_of_answer=False)


class Responses(_OpenAI):
    """The API of POST /v1/responses. Responses are not stored."""

    _reasons = {"max_output_tokens": "length"}  # noqa: RUF012
    _deltas = frozenset({"response.output_text.delta", "response.reasoning_text.delta"})

    def body(self, prompt: Prompt, options: Options) -> bytes:
        """The body: messages as the input."""
        head = {"model": options.model, "input": prompt.messages, "max_output_tokens": prompt.max_tokens}
        fields = {**head, "stream": True, "store": False, **options.sampling}
        if options.ignore_eos:
            fields["ignore_eos"] = True
        return msgspec.json.encode({**fields, **options.extra})

    def read(self, payload: bytes) -> Piece | str:
        """Decode an event. The last one has the whole response."""
        if payload == b"[DONE]":
            return _NOTHING
        event = _OF_RESPONSE_EVENT.decode(payload)
        if event.type in self._deltas:
            return event.delta if isinstance(event.delta, str) and event.delta else _NOTHING
        response = event.response
        match event.type:
            case "error":
                return Piece(error=event.message or "an error without a message")
            case "response.failed":
                return Piece(error=_message(response.error if response is not None else None))
            case "response.completed" | "response.incomplete" if response is not None:
                details, usage = response.incomplete_details, response.usage or _ResponseUsage()
                reason = self._reasons.get(details.reason, details.reason) if details is not None else "stop"
                cached = _cached_in(usage.input_tokens_details)
                return Piece(
                    "", False, reason, usage.input_tokens, usage.output_tokens, is_last=True, cached_tokens=cached
                )
        return _NOTHING


class _OllamaChunk(msgspec.Struct):
    message: _Delta | None = None
    done: bool = False
    done_reason: str = ""
    prompt_eval_count: int | None = None
    eval_count: int | None = None
    error: Any = None


class _OllamaTag(msgspec.Struct):
    name: str


class _OllamaTags(msgspec.Struct):
    models: list[_OllamaTag]


class Ollama:
    """POST /api/chat of Ollama."""

    models_path = "/api/tags"
    has_prefix = False
    marks_end = True
    ignores_eos = False
    sampling: Mapping[str, str] = {**_OWN_WORDS, "repetition_penalty": "repeat_penalty"}
    _of_chunk = msgspec.json.Decoder(_OllamaChunk)

    def path(self, model: str) -> str:
        """The path, which is the same for all models."""
        return "/api/chat"

    def body(self, prompt: Prompt, options: Options) -> bytes:
        """The body: messages. `num_predict` bounds the answer. Ollama cannot ignore end-of-sequence tokens."""
        numbers = {"num_predict": prompt.max_tokens, **options.sampling}
        head = {"model": options.model, "messages": prompt.messages, "stream": True, "options": numbers}
        return msgspec.json.encode({**head, **options.extra})

    def read(self, payload: bytes) -> Piece | str:
        """Decode a line."""
        chunk = self._of_chunk.decode(payload)
        if chunk.error is not None:
            return Piece(error=_message(chunk.error))
        text = (chunk.message.content or "") if chunk.message is not None else ""
        reason = chunk.done_reason or ("stop" if chunk.done else "")
        return Piece(text, bool(text), reason, chunk.prompt_eval_count, chunk.eval_count, is_last=chunk.done)

    def model_names(self, raw: bytes) -> list[str]:
        """The names in the list."""
        return [tag.name for tag in msgspec.json.decode(raw, type=_OllamaTags).models]


class _TgiToken(msgspec.Struct):
    text: str = ""
    special: bool = False


class _TgiDetails(msgspec.Struct):
    finish_reason: str = ""
    generated_tokens: int | None = None
    input_length: int | None = None


class _TgiChunk(msgspec.Struct):
    token: _TgiToken | None = None
    details: _TgiDetails | None = None
    error: Any = None


class _TgiInfo(msgspec.Struct):
    model_id: str


class Tgi:
    """POST /generate_stream of Text Generation Inference."""

    models_path = "/info"
    has_prefix = True
    marks_end = True
    ignores_eos = False
    sampling: Mapping[str, str] = {
        name: name for name in ("temperature", "top_p", "top_k", "frequency_penalty", "repetition_penalty")
    }
    _of_chunk = msgspec.json.Decoder(_TgiChunk)
    _reasons = {"eos_token": "stop", "stop_sequence": "stop"}  # noqa: RUF012

    def path(self, model: str) -> str:
        """The path. The server has a single model."""
        return "/generate_stream"

    def body(self, prompt: Prompt, options: Options) -> bytes:
        """The body: one text. TGI cannot ignore end-of-sequence tokens."""
        numbers = {"max_new_tokens": prompt.max_tokens, "details": True, **options.sampling}
        return msgspec.json.encode({"inputs": prompt.text, "parameters": numbers, **options.extra})

    def read(self, payload: bytes) -> Piece | str:
        """Decode a token; the last one has details."""
        chunk = self._of_chunk.decode(payload)
        if chunk.error is not None:
            return Piece(error=_message(chunk.error))
        text = chunk.token.text if chunk.token is not None else ""
        has_content = chunk.token is not None
        if chunk.details is None:
            return Piece(text, has_content)
        details = chunk.details
        reason = self._reasons.get(details.finish_reason, details.finish_reason)
        return Piece(text, has_content, reason, details.input_length, details.generated_tokens, is_last=True)

    def model_names(self, raw: bytes) -> list[str]:
        """The name of the single model."""
        return [msgspec.json.decode(raw, type=_TgiInfo).model_id]


class _KserveChunk(msgspec.Struct):
    text_output: str = ""
    finish_reason: str | None = None
    num_input_tokens: int | None = None
    num_output_tokens: int | None = None
    error: Any = None


class KServe:
    """POST /v2/models/MODEL/generate_stream, the extension of KServe's protocol for texts."""

    models_path = "/v1/models"
    has_prefix = True
    marks_end = False
    ignores_eos = True
    sampling: Mapping[str, str] = _OWN_WORDS
    _of_chunk = msgspec.json.Decoder(_KserveChunk)

    def path(self, model: str) -> str:
        """The path, which has the model's name."""
        return f"/v2/models/{quote(model, safe='')}/generate_stream"

    def body(self, prompt: Prompt, options: Options) -> bytes:
        """The body: one text."""
        asked = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens")
        numbers = {"max_tokens": prompt.max_tokens, "stream": True, **dict.fromkeys(asked, True), **options.sampling}
        if options.ignore_eos:
            numbers["ignore_eos"] = True
        return msgspec.json.encode({"text_input": prompt.text, "parameters": numbers, **options.extra})

    def read(self, payload: bytes) -> Piece | str:
        """Decode a part of the text."""
        chunk = self._of_chunk.decode(payload)
        if chunk.error is not None:
            return Piece(error=_message(chunk.error))
        counts = (chunk.num_input_tokens, chunk.num_output_tokens)
        return Piece(chunk.text_output, bool(chunk.text_output), chunk.finish_reason or "", *counts, counts_itself=True)

    def model_names(self, raw: bytes) -> list[str]:
        """The ids in OpenAI's list, which such servers often have too."""
        return [named.id for named in msgspec.json.decode(raw, type=_List).data]


def _message(error: object) -> str:
    found = error.get("message", error) if isinstance(error, dict) else error
    return str(found)[:500] or "an error without a message"


def error_text(raw: bytes) -> str:
    """The message in the body of a refusal, or the body itself, shortened."""
    try:
        decoded = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return raw[:500].decode(errors="replace").strip()
    if isinstance(decoded, dict):
        for name in ("error", "message", "detail"):
            if decoded.get(name):
                return _message(decoded[name])
    return str(decoded)[:500]


BACKENDS = ("openai", "openai-chat", "openai-responses", "vllm", "ollama", "tgi", "kserve")
"""Names of APIs, as --backend has them. `vllm` is vllm bench serve's word for `openai`."""


def api_of(backend: str, endpoint: str | None) -> Api:
    """The API of a name. An endpoint of chats makes it OpenAI's chat, and one of responses OpenAI's responses."""
    match backend:
        case "ollama":
            return Ollama()
        case "tgi":
            return Tgi()
        case "kserve":
            return KServe()
    if backend == "openai-responses" or (endpoint or "").endswith("/responses"):
        return Responses(endpoint or "/v1/responses")
    if backend == "openai-chat" or (endpoint or "").endswith("chat/completions"):
        return Chat(endpoint or "/v1/chat/completions")
    return Completions(endpoint or "/v1/completions")
