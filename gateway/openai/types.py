"""Bodies of the OpenAI API, decoded and checked (pure).

A parameter that this server knows but does not support is refused by name. Unknown ones are ignored, as OpenAI does.
An explicit null is the same as leaving the field out. docs/protocol.md has the table of fields.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from headrace.gateway.chat.request import Chat, Completion, Tokenization, refuse_unless_neutral
from headrace.gateway.chat_fields import UNSUPPORTED, UNSUPPORTED_IN_CHATS
from headrace.gateway.checks import invalid, unsupported


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


# Both bodies list the same nine fields, because a msgspec struct has a single base, and theirs is the neutral one.
class ChatRequest(Chat, kw_only=True):
    """Body of POST /v1/chat/completions. Fields of type Any are known but accepted only with their neutral value."""

    request_id: str | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    diversity_penalty: Any = None
    logits_processors: Any = None

    enable_thinking: bool | None = None
    thinking: Any = None
    """In a checked body, null or disabled."""
    include_reasoning: bool | None = None
    functions: Any = None
    function_call: Any = None
    modalities: Any = None
    audio: Any = None
    web_search_options: Any = None
    chat_template: Any = None
    documents: Any = None
    echo: Any = None
    store: Any = None
    service_tier: Any = None
    prompt_cache_retention: Any = None


class CompletionRequest(Completion, kw_only=True):
    """Body of POST /v1/completions. A list of prompts is one of texts, of tokens, or of lists of tokens."""

    request_id: str | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    use_beam_search: Any = None
    length_penalty: Any = None
    early_stopping: Any = None
    diversity_penalty: Any = None
    logits_processors: Any = None
    suffix: str | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/embeddings. `user` is accepted without effect."""

    model: str | None = None
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class TokenizeRequest(Tokenization, kw_only=True):
    """Body of POST /tokenize: a text, or a conversation through the chat template."""

    return_token_strs: bool | None = None
    chat_template: Any = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


# --- checking -------------------------------------------------------------------------------------------------------

# As in `chat.request`.
NEUTRAL = UNSUPPORTED
NEUTRAL_CHAT = UNSUPPORTED_IN_CHATS


def check_chat_body(request: ChatRequest) -> None:
    """Raise `StatusError` for fields of this protocol that the server does not support. A switch for the template
    becomes one of its variables."""
    _check_body(request)
    refuse_unless_neutral(request, NEUTRAL_CHAT)
    if request.thinking is not None:
        if request.enable_thinking or request.reasoning_effort not in (None, "none"):
            other = "enable_thinking" if request.enable_thinking else "reasoning_effort"
            raise invalid("thinking", f"thinking is disabled, but {other} asks for it; leave out one of them")
        request.reasoning_effort = "none"
    if request.enable_thinking is not None:
        request.chat_template_kwargs = {"enable_thinking": request.enable_thinking} | (
            request.chat_template_kwargs or {}
        )


def check_completion_body(request: CompletionRequest) -> None:
    """Raise `StatusError` for fields of this protocol that the server does not support."""
    _check_body(request)
    if request.suffix:
        raise unsupported("suffix", "suffix is not supported: the model continues a prompt and fills no gaps")


def check_tokenize_body(request: TokenizeRequest) -> None:
    """Raise `StatusError` for fields of this protocol that the server does not support."""
    refuse_unless_neutral(request, {"chat_template": ()})


def _check_body(request: ChatRequest | CompletionRequest) -> None:
    refuse_unless_neutral(request, NEUTRAL)
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
    if options.continuous_usage_stats and not options.include_usage:
        name = "stream_options.continuous_usage_stats"
        raise invalid(name, f"{name} needs include_usage to be true")
