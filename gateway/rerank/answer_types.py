"""Types of rerank responses, for the OpenAPI document. Tests compare real responses with them."""

from __future__ import annotations

from typing import Literal

import msgspec

from headrace.gateway.edge.wire import Shape


class RerankUsage(Shape):
    """Tokens of all pairs of query and document."""

    prompt_tokens: int
    total_tokens: int


class RerankedText(Shape):
    """A document."""

    text: str


class RerankResult(Shape):
    """A document's place in the request and its score."""

    index: int
    relevance_score: float
    document: RerankedText | msgspec.UnsetType = msgspec.UNSET


class Reranked(Shape):
    """The best documents, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: RerankUsage


class Score(Shape):
    """The score of a pair."""

    index: int
    object: Literal["score"]
    score: float


class ScoreList(Shape):
    """A score for each pair, in their order."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Score]
    usage: RerankUsage
