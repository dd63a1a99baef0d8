"""Bodies of the OpenAI API, decoded and checked (pure).

`fields` says what happens to every field, applied or not. An explicit null is the same as leaving the field out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec

from headrace.gateway.chat.request import Chat, ChatMessage, Completion, Tokenization
from headrace.gateway.chat.thinking import ALIASES, FIELD, one_budget
from headrace.gateway.checks import invalid
from headrace.gateway.hints import ignored
from headrace.gateway.images.given import GivenImage, detail_of, image_of_url, part_of, refuse_file


class StreamOptions(msgspec.Struct, kw_only=True):
    """Options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Whether to reason. Other members of it are hints."""

    type: Literal["enabled", "disabled"]
    budget_tokens: int | None = None


class ChatReasoning(msgspec.Struct, kw_only=True):
    """How to reason, as routers of models ask for it. Other members of it are hints."""

    effort: str | None = None
    enabled: bool | None = None
    exclude: bool | None = None
    """Leave the reasoning out of the answer."""
    max_tokens: int | None = None


# Both bodies list the same five fields, because a msgspec struct has a single base, and theirs is the neutral one.
class ChatRequest(Chat, kw_only=True):
    """Body of POST /v1/chat/completions."""

    request_id: str | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    timings_per_token: bool | None = None

    reasoning_budget: int | None = None
    thinking_budget: int | None = None
    thinking_budget_tokens: int | None = None
    enable_thinking: bool | None = None
    thinking: Thinking | None = None
    reasoning: ChatReasoning | None = None
    include_reasoning: bool | None = None


class CompletionRequest(Completion, kw_only=True):
    """Body of POST /v1/completions. A list of prompts is one of texts, of tokens, or of lists of tokens."""

    request_id: str | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    timings_per_token: bool | None = None


class EmbeddingRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/embeddings."""

    model: str | None = None
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    truncate_prompt_tokens: int | None = None
    priority: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None


class TokenizeRequest(Tokenization, kw_only=True):
    """Body of POST /tokenize: a text, or a conversation through the chat template."""

    return_token_strs: bool | None = None
    return_image_identities: bool | None = None
    content: str | None = None
    add_special: bool | None = None
    with_pieces: bool | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]


# --- checking -------------------------------------------------------------------------------------------------------


def check_chat_body(request: ChatRequest) -> None:
    """Raise `StatusError` for contradictory fields of this protocol. A switch for the template becomes one of its
    variables."""
    check_body(request)
    request.thinking_token_budget = one_budget(
        {
            **{name: getattr(request, name) for name in (FIELD, *ALIASES)},
            "thinking.budget_tokens": None if request.thinking is None else request.thinking.budget_tokens,
            "reasoning.max_tokens": None if request.reasoning is None else request.reasoning.max_tokens,
        }
    )
    if request.reasoning is not None:
        _apply_reasoning(request, request.reasoning)
    if request.thinking is not None and request.thinking.type == "disabled":
        if request.enable_thinking or request.reasoning_effort not in (None, "none"):
            other = "enable_thinking" if request.enable_thinking else "reasoning_effort"
            raise invalid("thinking", f"thinking is disabled, but {other} asks for it; leave out one of them")
        request.reasoning_effort = "none"
    elif request.thinking is not None:
        if request.enable_thinking is False or request.reasoning_effort == "none":
            other = "enable_thinking" if request.enable_thinking is False else "reasoning_effort"
            raise invalid("thinking", f"thinking is enabled, but {other} turns it off; leave out one of them")
        request.enable_thinking = True
    if request.enable_thinking is not None:
        request.chat_template_kwargs = {"enable_thinking": request.enable_thinking} | (
            request.chat_template_kwargs or {}
        )


def _apply_reasoning(request: ChatRequest, reasoning: ChatReasoning) -> None:
    """Copy the members of the object `reasoning` to the fields with the same meaning."""
    effort = "none" if reasoning.enabled is False else reasoning.effort
    if effort is not None:
        if request.reasoning_effort not in (None, effort):
            raise invalid("reasoning", f"reasoning asks for {effort}, and reasoning_effort for another; leave out one")
        request.reasoning_effort = effort
    elif reasoning.enabled and request.enable_thinking is None:
        request.enable_thinking = True
    if reasoning.exclude and request.include_reasoning is None:
        request.include_reasoning = False


def check_body(request: ChatRequest | CompletionRequest) -> None:
    """Raise `StatusError` for contradictory fields that both kinds of requests have."""
    options = request.stream_options
    if options is None:
        return
    if not request.stream:
        raise invalid("stream_options", "stream_options needs stream to be true")
    if options.continuous_usage_stats and not options.include_usage:
        ignored("stream_options.continuous_usage_stats", "without include_usage, a stream has no usage")


_KINDS = ("image_url", "input_image")
"""`input_image` is that of the Responses API, whose parts some clients send to both."""


def take_images(messages: Sequence[ChatMessage]) -> None:
    """Put a `GivenImage` in the place of each image of the messages. Those in turns of the assistant stay as they are:
    the model does not read them. Raises `StatusError`."""
    for position, message in enumerate(messages):
        if message.role == "assistant" or not isinstance(message.content, list):
            continue
        for number, part in enumerate(message.content):
            kind = part.get("type")
            part.pop("image", None)  # nothing of a caller's stands for a checked image
            if isinstance(kind, str) and kind in _KINDS:
                image = _image(f"messages[{position}].content[{number}]", kind, part)
                message.content[number] = part_of(image, kind)


def _image(where: str, kind: str, part: dict[str, Any]) -> GivenImage:
    if kind == "input_image":
        refuse_file(where, part)
    given = part.get("image_url")
    if not isinstance(given, dict):
        return image_of_url(f"{where}.image_url", given, detail_of(f"{where}.detail", part.get("detail")))
    if given.get("detail") is None:  # some clients write it beside the URL's object
        detail = detail_of(f"{where}.detail", part.get("detail"))
    else:
        detail = detail_of(f"{where}.image_url.detail", given["detail"])
    return image_of_url(f"{where}.image_url.url", given.get("url"), detail)
