"""The types of OpenAI's answers, for the OpenAPI document.

Real answers are written from prepared bytes; tests compare them with these types.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.gateway.edge.description import Shape


class CachedTokensByTier(Shape):
    """Cached prompt tokens by where they were found: in a worker's memory, on its disk, at other workers."""

    memory: int
    disk: int
    peers: int


class PromptTokensDetails(Shape):
    """The number of prompt tokens found in a prefix cache. By tier, if some were not in the worker's memory."""

    cached_tokens: int
    cached_tokens_by_tier: CachedTokensByTier | msgspec.UnsetType = msgspec.UNSET


class CompletionTokensDetails(Shape):
    """The number of reasoning tokens among the generated tokens, and the numbers of accepted and rejected draft
    tokens."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(Shape):
    """The usage of a request, in tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(Shape):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenTokenLogprob(TokenLogprob):
    """A token of the answer, and the most probable ones at its position."""

    top_logprobs: list[TokenLogprob]


class ChatLogprobs(Shape):
    """Log-probabilities of a chat's choice."""

    content: list[ChosenTokenLogprob]
    refusal: None


class PromptTokenLogprob(Shape):
    """A possible token of the prompt, by its id."""

    logprob: float
    rank: int
    decoded_token: str


class CalledFunction(Shape):
    """The called function; arguments are JSON text."""

    name: str
    arguments: str


class ToolCall(Shape, tag_field="type", tag="function"):
    """A function call for the caller to make."""

    id: str
    function: CalledFunction


class CalledCustomTool(Shape):
    """The called custom tool; its input is any text."""

    name: str
    input: str


class CustomToolCall(Shape, tag_field="type", tag="custom"):
    """A call of a custom tool for the caller to make."""

    id: str
    custom: CalledCustomTool


class AssistantMessage(Shape):
    """The message of the model."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    annotations: list[None]
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall | CustomToolCall] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(Shape):
    """One answer to a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: Literal["stop", "length", "tool_calls"]
    stop_reason: int | str | None
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(Shape):
    """The answer to a chat."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: list[dict[str, PromptTokenLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class CompletionLogprobs(Shape):
    """Parallel lists, with null at the first token of an echoed prompt."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Shape):
    """One continuation of a prompt."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Literal["stop", "length"]
    stop_reason: int | str | None
    prompt_logprobs: list[dict[str, PromptTokenLogprob] | None] | msgspec.UnsetType = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class Completion(Shape):
    """The answer to a completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    system_fingerprint: str
    choices: list[CompletionChoice]
    usage: Usage


class ModelCard(Shape):
    """A model, loaded or not."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    type: Literal["model"]
    display_name: str
    created_at: str
    root: str
    parent: str | None
    max_model_len: int | None
    task: Literal["generate", "embed", "rank"]
    dimensions: int | None
    state: Literal["unloaded", "loading", "loaded", "unloading", "failed"]
    problem: str | None


class ModelList(Shape):
    """The list of models."""

    object: Literal["list"]
    data: list[ModelCard]
    has_more: bool
    first_id: str | None
    last_id: str | None


class EmbeddingUsage(Shape):
    """Tokens of all texts."""

    prompt_tokens: int
    total_tokens: int


class Embedding(Shape):
    """A vector: its numbers, or little-endian float32 in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingList(Shape):
    """A vector for each text, in their order."""

    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class Tokens(Shape):
    """Tokens of a text or a conversation, and their texts if requested."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(Shape):
    """The text of tokens."""

    prompt: str
