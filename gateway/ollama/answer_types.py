"""Types of Ollama's responses, for the OpenAPI document. Tests compare real responses with them."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from headrace.gateway.edge.wire import Shape


class OllamaError(Shape):
    """The shape of failures in Ollama's protocol."""

    error: str


class _Answer(Shape, kw_only=True):
    model: str
    created_at: str
    done: bool
    done_reason: Literal["stop", "length", "load"] | msgspec.UnsetType = msgspec.UNSET
    logprobs: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET
    total_duration: int | msgspec.UnsetType = msgspec.UNSET
    load_duration: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_count: int | msgspec.UnsetType = msgspec.UNSET
    prompt_eval_duration: int | msgspec.UnsetType = msgspec.UNSET
    eval_count: int | msgspec.UnsetType = msgspec.UNSET
    eval_duration: int | msgspec.UnsetType = msgspec.UNSET


class OllamaAnswerMessage(Shape):
    """The message of an answer."""

    role: Literal["assistant"]
    content: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[dict[str, Any]] | msgspec.UnsetType = msgspec.UNSET


class OllamaChatAnswer(_Answer, kw_only=True):
    """The answer to a conversation; times are in nanoseconds."""

    message: OllamaAnswerMessage


class OllamaGenerateAnswer(_Answer, kw_only=True):
    """The answer to a prompt; times are in nanoseconds. `context` has the tokens of prompt and answer."""

    response: str
    thinking: str | msgspec.UnsetType = msgspec.UNSET
    context: list[int] | msgspec.UnsetType = msgspec.UNSET


class OllamaEmbedded(Shape):
    """A vector for each text; times are in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int
    load_duration: int
    prompt_eval_count: int


class OllamaEmbedding(Shape):
    """The vector of one text."""

    embedding: list[float]


class OllamaDetails(Shape):
    """The known properties of a model's files."""

    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class OllamaListed(Shape):
    """A model that is served."""

    name: str
    model: str
    modified_at: str
    digest: str
    details: OllamaDetails
    size: int


class OllamaList(Shape):
    """The list of models."""

    models: list[OllamaListed]


class OllamaRunning(Shape):
    """A model that is served, as one that runs."""

    name: str
    model: str
    digest: str
    details: OllamaDetails
    size: int
    size_vram: int
    expires_at: str
    context_length: int


class OllamaRunningList(Shape):
    """The list of running models."""

    models: list[OllamaRunning]


class OllamaShown(Shape):
    """The known properties of a model."""

    modelfile: str
    parameters: str
    template: str
    details: OllamaDetails
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class OllamaStatus(Shape):
    """The progress of a pull."""

    status: str


class OllamaVersion(Shape):
    """The version of Ollama whose API this is."""

    version: str
