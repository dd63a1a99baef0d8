"""The description of these endpoints for the OpenAPI document (pure)."""

from __future__ import annotations

from headrace.gateway.edge.description import API, Operation
from headrace.gateway.rerank import answers, types

_UNVERSIONED = ("", "/v2")

OPERATIONS: tuple[Operation, ...] = (
    Operation(
        "POST",
        "/rerank",
        "Order documents by how well they answer a query",
        answers.Reranked,
        (types.RerankRequest,),
        is_generated=True,
        prefixes=(*API, *_UNVERSIONED),
    ),
    Operation(
        "POST",
        "/score",
        "Score pairs of texts",
        answers.ScoreList,
        (types.ScoreRequest,),
        is_generated=True,
        prefixes=(*API, ""),
    ),
)
"""All operations."""
