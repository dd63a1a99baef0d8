"""The operations of this protocol, for the OpenAPI document (pure)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.gateway.edge.description import Operation
from headrace.gateway.ollama import answer_types, types

_NDJSON = "application/x-ndjson"


def _operation(
    method: str, path: str, summary: str, answer: Any, requests: Sequence[Any] = (), **more: Any
) -> Operation:
    return Operation(method, path, summary, answer, requests, error=answer_types.OllamaError, **more)


def _streamed(path: str, summary: str, answer: Any, request: Any, generates: bool = True) -> Operation:
    return _operation("POST", path, summary, answer, (request,), is_streamed=generates, stream_type=_NDJSON)


OPERATIONS: tuple[Operation, ...] = (
    _streamed(
        "/api/chat", "Answer a conversation, for Ollama's clients", answer_types.OllamaChatAnswer, types.OllamaChat
    ),
    _streamed(
        "/api/generate",
        "Answer a prompt, for Ollama's clients",
        answer_types.OllamaGenerateAnswer,
        types.OllamaGenerate,
    ),
    _streamed(
        "/api/pull",
        "Tell whether a model is served, as a pull that has ended",
        answer_types.OllamaStatus,
        types.OllamaPull,
        generates=False,
    ),
    _operation("POST", "/api/show", "Describe a model", answer_types.OllamaShown, (types.OllamaShow,)),
    _operation("GET", "/api/tags", "List the models", answer_types.OllamaList),
    _operation("GET", "/api/ps", "List the models, as those that run", answer_types.OllamaRunningList),
    _operation("GET", "/api/version", "The version of Ollama's API", answer_types.OllamaVersion),
    _operation(
        "POST",
        "/api/embed",
        "Turn texts into vectors, for Ollama's clients",
        answer_types.OllamaEmbedded,
        (types.OllamaEmbed,),
        is_generated=True,
    ),
    _operation(
        "POST",
        "/api/embeddings",
        "Turn a text into a vector, for Ollama's clients",
        answer_types.OllamaEmbedding,
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
