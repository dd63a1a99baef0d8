"""The operations of this protocol, for the OpenAPI document (pure)."""

from __future__ import annotations

from typing import Any

from headrace.gateway.edge.description import API, BARE_API, Operation
from headrace.gateway.openai import answer_types, types

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/chat/completions",
        "Answer a conversation",
        answer_types.ChatCompletion,
        (types.ChatRequest,),
        is_streamed=True,
        prefixes=BARE_API,
    ),
    Operation(
        "POST",
        "/completions",
        "Continue one or more prompts",
        answer_types.Completion,
        (types.CompletionRequest,),
        is_streamed=True,
        prefixes=BARE_API,
    ),
    Operation(
        "GET",
        "/models",
        "List the models",
        answer_types.ModelList,
        prefixes=BARE_API,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
            "after_id": {"type": "string"},
            "before_id": {"type": "string"},
        },
    ),
    Operation("GET", "/models/{name}", "Look a model up", answer_types.ModelCard, prefixes=BARE_API),
    Operation(
        "POST",
        "/embeddings",
        "Turn texts into vectors",
        answer_types.EmbeddingList,
        (types.EmbeddingRequest,),
        is_generated=True,
        prefixes=API,
    ),
    Operation(
        "GET",
        "/tokenizer_info",
        "Describe a model's tokenizer",
        dict[str, Any],
        query={"model": {"type": "string"}},
    ),
    Operation("POST", "/tokenize", "Turn text into tokens", answer_types.Tokens, (types.TokenizeRequest,)),
    Operation("POST", "/detokenize", "Turn tokens into text", answer_types.DetokenizedText, (types.DetokenizeRequest,)),
)
"""All operations."""
