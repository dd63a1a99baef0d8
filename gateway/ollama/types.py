"""Requests of Ollama's API (pure). docs/protocol.md has every field.

Unknown fields are refused: a field that is new to this server may change the answer. Fields of type Any are known but
accepted only with their neutral value.

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
Hint: TypeAlias = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Alternatives: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=20)]
TokenIds: TypeAlias = list[Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]]


class OllamaOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Sampling options, and hints for loading that do not affect answers."""

    num_predict: Annotated[int, msgspec.Meta(ge=-2, le=2**31 - 1)] | None = None
    num_ctx: Count | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    repeat_last_n: Annotated[int, msgspec.Meta(ge=-1, le=0)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None

    typical_p: Any = None
    tfs_z: Any = None
    mirostat: Any = None
    penalize_newline: Any = None
    vocab_only: Any = None
    logits_all: Any = None
    embedding_only: Any = None

    # These have no effect without mirostat, or if a context is never shifted.
    mirostat_tau: float | None = None
    mirostat_eta: float | None = None
    num_keep: Hint | None = None
    # Options for loading a model in Ollama's own engine.
    num_batch: Hint | None = None
    num_gpu: Hint | None = None
    main_gpu: Hint | None = None
    num_thread: Hint | None = None
    numa: bool | None = None
    low_vram: bool | None = None
    f16_kv: bool | None = None
    use_mmap: bool | None = None
    use_mlock: bool | None = None


class OllamaMessage(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One turn. `images` must be empty."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None
    images: Any = None


class _Question(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The common fields of chat and generate requests."""

    model: str | None = None
    stream: bool | None = None
    format: Format | None = None
    options: OllamaOptions | None = None
    keep_alive: Duration | None = None
    think: Think | None = None
    logprobs: bool | None = None
    top_logprobs: Alternatives | None = None
    truncate: Any = None
    shift: Any = None


class OllamaChat(_Question, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/chat."""

    messages: list[OllamaMessage] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerate(_Question, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/generate."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    context: TokenIds | None = None
    suffix: Any = None
    template: Any = None
    images: Any = None
    width: Any = None
    height: Any = None
    steps: Any = None


class OllamaPull(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/pull."""

    model: str | None = None
    name: str | None = None
    insecure: bool | None = None
    stream: bool | None = None
    username: Any = None
    password: Any = None


class OllamaShow(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/show."""

    model: str | None = None
    name: str | None = None
    verbose: Any = None
    system: Any = None
    template: Any = None
    options: Any = None


class OllamaEmbed(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/embed. Texts that are too long are truncated unless `truncate` is false."""

    model: str | None = None
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None
    options: OllamaOptions | None = None
    keep_alive: Duration | None = None


class OllamaEmbeddings(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of POST /api/embeddings."""

    model: str | None = None
    prompt: str
    options: OllamaOptions | None = None
    keep_alive: Duration | None = None


HINTS = frozenset(
    {
        "num_batch",
        "num_gpu",
        "main_gpu",
        "num_thread",
        "numa",
        "low_vram",
        "f16_kv",
        "use_mmap",
        "use_mlock",
    }
)
"""Options without effect: they concern the loading of a model in Ollama's own engine."""
NEUTRAL_OPTIONS: dict[str, tuple[Any, ...]] = {
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "mirostat": (0,),
    "penalize_newline": (True,),
    "vocab_only": (False,),
    "logits_all": (False,),
    "embedding_only": (False,),
}
"""Option -> values besides null that match this server's behaviour; other values are refused."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "truncate": (False,),
    "shift": (False,),
    "images": ([],),
    "suffix": ("",),
    "template": ("",),
    "width": (0,),
    "height": (0,),
    "steps": (0,),
    "username": ("",),
    "password": ("",),
    "verbose": (False,),
    "system": ("",),
    "options": ({},),
}
"""The same for fields."""

INSTEAD = {
    "truncate": "a prompt that is too long is refused; leave it out",
    "shift": "an answer ends where the context does; leave it out",
    "images": "the models read texts only",
    "suffix": "the models continue texts and fill no gaps",
    "template": "the model's own chat template is used; with raw, the prompt is taken as it is",
    "verbose": "leave it out",
}
