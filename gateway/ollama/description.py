"""The operations of this protocol, for the OpenAPI document (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.gateway.edge.description import Operation
from headrace.gateway.ollama import answers, types

_NDJSON = "application/x-ndjson"


def _operation(
    method: str, path: str, summary: str, answer: Any, requests: Sequence[Any] = (), **more: Any
) -> Operation:
    return Operation(method, path, summary, answer, requests, error=answers.OllamaError, **more)


def _streamed(path: str, summary: str, answer: Any, request: Any, generates: bool = True) -> Operation:
    return _operation("POST", path, summary, answer, (request,), is_streamed=generates, stream_type=_NDJSON)


OPERATIONS: tuple[Operation, ...] = (
    _streamed("/api/chat", "Answer a conversation, for Ollama's clients", answers.OllamaReply, types.OllamaChat),
    _streamed(
        "/api/generate",
        "Answer a prompt, for Ollama's clients",
        answers.OllamaReply,
        types.OllamaGenerate,
    ),
    _streamed(
        "/api/pull",
        "Tell whether a model is served, as a pull that has ended",
        answers.OllamaStatus,
        types.OllamaPull,
        generates=False,
    ),
    _operation("POST", "/api/show", "Describe a model", answers.OllamaShown, (types.OllamaShow,)),
    _operation("GET", "/api/tags", "List the models", answers.OllamaList),
    _operation("GET", "/api/ps", "List the models, as those that run", answers.OllamaRunningList),
    _operation("GET", "/api/version", "The version of Ollama's API", answers.OllamaVersion),
    _operation(
        "POST",
        "/api/embed",
        "Turn texts into vectors, for Ollama's clients",
        answers.OllamaEmbedded,
        (types.OllamaEmbed,),
        is_generated=True,
    ),
    _operation(
        "POST",
        "/api/embeddings",
        "Turn a text into a vector, for Ollama's clients",
        answers.OllamaEmbedding,
        (types.OllamaEmbeddings,),
        is_generated=True,
    ),
    *(
        _operation(method, path, "Refused: a model's operator manages it", None, status=None)
        for method, path in (
            ("POST", "/api/create"),
            ("POST", "/api/copy"),
            ("POST", "/api/push"),
            ("DELETE", "/api/delete"),
        )
    ),
)
"""All operations."""
