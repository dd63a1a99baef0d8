"""The answers of rerank and score."""

from __future__ import annotations

from typing import Literal

from msgspec import UNSET, UnsetType

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
    document: RerankedText | UnsetType = UNSET


class Reranked(Shape):
    """The best documents, best first."""

    id: str
    model: str
    results: list[RerankResult]
    usage: RerankUsage


class Score(Shape, kw_only=True):
    """The score of a pair."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(Shape, kw_only=True):
    """A score for each pair, in their order."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: RerankUsage
