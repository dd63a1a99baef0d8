"""Rerank in the form of Cohere and Jina, score in that of vLLM. docs/reference/http-api.md has every field."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import UNSET

from headrace.gateway.edge.endpoint import BARE_API, Endpoint, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.requests import request_of
from headrace.gateway.edge.wire import encode
from headrace.gateway.encoding.planning import EncodingPlan, PairsToScore, paired
from headrace.gateway.encoding.vectors import best_first, floats_of
from headrace.gateway.rerank.answers import Reranked, RerankedText, RerankResult, RerankUsage, Score, ScoreList
from headrace.gateway.rerank.fields import RERANK, SCORE
from headrace.gateway.rerank.types import RerankRequest, ScoreRequest
from headrace.gateway.services import Services


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST rerank and score, with and without a version of the API."""
    own = _Ranking(services)
    rerank = Operation("Order documents by how well they answer a query", Reranked, (RerankRequest,), generates=True)
    score = Operation("Score pairs of texts", ScoreList, (ScoreRequest,), generates=True)
    return [
        *under((*BARE_API, "/v2"), Endpoint("POST", "/rerank", "rerank", own.rerank, rerank)),
        *under(BARE_API, Endpoint("POST", "/score", "score", own.score, score)),
    ]


class _Ranking:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def rerank(self, exchange: Exchange) -> None:
        """Order documents by their score, best first. Of equal scores, the earlier document comes first."""
        request = await request_of(exchange, RerankRequest, RERANK)
        texts = [document if isinstance(document, str) else document.text for document in request.documents]
        pairs = PairsToScore(
            request.model or "",
            [(request.query, text) for text in texts],
            ["query"] * len(texts),
            [f"documents[{number}]" for number in range(len(texts))],
            "documents",
            request.truncate_prompt_tokens,
            request.max_tokens_per_doc,
            request.priority or 0,
        )
        plan, scores = await self._scored(exchange, pairs)
        shows = request.return_documents
        results = [
            RerankResult(number, scores[number], RerankedText(texts[number]) if shows else UNSET)
            for number in best_first(scores, request.top_n)
        ]
        name = f"rerank-{exchange.caller.request_id}"
        await exchange.respond(encode(Reranked(name, plan.model.name, results, _usage(plan))))

    async def score(self, exchange: Exchange) -> None:
        """Score each pair: of one text with many, or of two lists of the same length."""
        request = await request_of(exchange, ScoreRequest, SCORE)
        first = request.text_1
        second = request.text_2
        firsts = [first] if isinstance(first, str) else first
        seconds = [second] if isinstance(second, str) else second
        together = paired(firsts, seconds, "text_1", "text_2")
        pairs = PairsToScore(
            request.model or "",
            together,
            ["text_1" if len(firsts) == 1 else f"text_1[{i}]" for i in range(len(together))],
            ["text_2" if isinstance(second, str) else f"text_2[{i}]" for i in range(len(together))],
            "text_2",
            request.truncate_prompt_tokens,
            priority=request.priority or 0,
        )
        plan, scores = await self._scored(exchange, pairs)
        answer = ScoreList(
            id=f"score-{exchange.caller.request_id}",
            created=int(time.time()),
            model=plan.model.name,
            data=[Score(index=i, score=score) for i, score in enumerate(scores)],
            usage=_usage(plan),
        )
        await exchange.respond(encode(answer))

    async def _scored(self, exchange: Exchange, pairs: PairsToScore) -> tuple[EncodingPlan, list[float]]:
        plan = await self._services.encodings.plan_pairs(pairs)
        vectors = await self._services.encoding_runner.run(plan, exchange.caller)
        return plan, [floats_of(vector)[0] for vector in vectors]


def _usage(plan: EncodingPlan) -> RerankUsage:
    return RerankUsage(plan.num_tokens, plan.num_tokens)
