"""The operations of this protocol, for the OpenAPI document (pure)."""

from __future__ import annotations

from typing import Any

from headrace.gateway.edge.description import API, BARE_API, Operation
from headrace.gateway.openai import answers, types

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/chat/completions",
        "Answer a conversation",
        answers.ChatCompletion,
        (types.ChatRequest,),
        is_streamed=True,
        prefixes=BARE_API,
    ),
    Operation(
        "POST",
        "/completions",
        "Continue one or more prompts",
        answers.Completion,
        (types.CompletionRequest,),
        is_streamed=True,
        prefixes=BARE_API,
    ),
    Operation(
        "GET",
        "/models",
        "List the models",
        answers.ModelList,
        prefixes=BARE_API,
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": 1000},
            "after_id": {"type": "string"},
            "before_id": {"type": "string"},
        },
    ),
    Operation("GET", "/models/{name}", "Look a model up", answers.ModelCard, prefixes=BARE_API),
    Operation(
        "POST",
        "/embeddings",
        "Turn texts into vectors",
        answers.EmbeddingList,
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
    Operation("POST", "/tokenize", "Turn text into tokens", answers.Tokens, (types.TokenizeRequest,)),
    Operation("POST", "/detokenize", "Turn tokens into text", answers.DetokenizedText, (types.DetokenizeRequest,)),
)
"""All operations."""
