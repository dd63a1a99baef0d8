"""Requests of Ollama's API (pure). `fields` says what happens to every field.

https://docs.ollama.com/api
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

Duration: TypeAlias = float | str
"""Seconds, or a text such as 5m."""
Format: TypeAlias = str | dict[str, Any]
Think: TypeAlias = bool | Literal["low", "medium", "high", "max"]
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
Alternatives: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=20)]
TokenIds: TypeAlias = list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]


class OllamaOptions(msgspec.Struct, kw_only=True):
    """Sampling options."""

    num_predict: Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)] | None = None
    num_ctx: Count | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    typical_p: float | None = None
    mirostat: int | None = None
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None


class OllamaMessage(msgspec.Struct, kw_only=True):
    """One turn. `images` are files as base64."""

    role: str
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: list[Any] | None = None


class _Question(msgspec.Struct, kw_only=True):
    """The common fields of chat and generate requests."""

    model: str | None = None
    stream: bool | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    keep_alive: Duration | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    chat_template: str | None = None


class OllamaChat(_Question, kw_only=True):
    """Body of POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(_Question, kw_only=True):
    """Body of POST /api/generate."""

    prompt: str | None = None
    suffix: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: TokenIds | None = None
    images: list[Any] | None = None


class OllamaPull(msgspec.Struct, kw_only=True):
    """Body of POST /api/pull."""

    model: str | None = None
    name: str | None = None
    stream: bool | None = None


class OllamaCreate(msgspec.Struct, kw_only=True):
    """Body of POST /api/create."""

    model: str | None = None
    name: str | None = None
    from_: str | None = msgspec.field(default=None, name="from")
    files: dict[str, str] | None = None
    stream: bool | None = None


class OllamaCopy(msgspec.Struct, kw_only=True):
    """Body of POST /api/copy."""

    source: str
    destination: str


class OllamaDelete(msgspec.Struct, kw_only=True):
    """Body of DELETE /api/delete."""

    model: str | None = None
    name: str | None = None


class OllamaShow(msgspec.Struct, kw_only=True):
    """Body of POST /api/show."""

    model: str | None = None
    name: str | None = None


class OllamaEmbed(msgspec.Struct, kw_only=True):
    """Body of POST /api/embed. Texts that are too long are truncated unless `truncate` is false."""

    model: str | None = None
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    keep_alive: Duration | None = None


class OllamaEmbeddings(msgspec.Struct, kw_only=True):
    """Body of POST /api/embeddings."""

    model: str | None = None
    prompt: str
    keep_alive: Duration | None = None
