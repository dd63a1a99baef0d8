"""Embeddings in Ollama's format. docs/reference/http-api.md has every field."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.gateway.edge.endpoint import Endpoint, Operation
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.encoding.planning import TextsToEmbed
from headrace.gateway.encoding.vectors import check_dimensions, floats_of, shortened
from headrace.gateway.ollama.answers import OLLAMA_ERRORS, OllamaEmbedded, OllamaEmbedding
from headrace.gateway.ollama.fields import EMBED, EMBEDDINGS
from headrace.gateway.ollama.names import find
from headrace.gateway.ollama.turns import check_fields
from headrace.gateway.ollama.types import OllamaEmbed, OllamaEmbeddings
from headrace.gateway.services import Services


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST /api/embed and /api/embeddings."""
    own = _Embeddings(services)
    many = Operation("Turn texts into vectors, for Ollama's clients", OllamaEmbedded, (OllamaEmbed,), generates=True)
    one = Operation(
        "Turn a text into a vector, for Ollama's clients", OllamaEmbedding, (OllamaEmbeddings,), generates=True
    )
    return [
        Endpoint("POST", "/api/embed", "ollama_embed", own.embed, many, OLLAMA_ERRORS),
        Endpoint("POST", "/api/embeddings", "ollama_embed", own.embeddings, one, OLLAMA_ERRORS),
    ]


class _Embeddings:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def embed(self, exchange: Exchange) -> None:
        """POST /api/embed: one or many texts, as vectors of length 1."""
        body = await exchange.body()
        request = decode_body(body, OllamaEmbed)
        EMBED.check(body)
        check_fields(request)
        model = await find(self._services.models, request.model)
        texts = [request.input] if isinstance(request.input, str) else request.input
        keep = None if request.truncate is False else -1
        plan = await self._services.encodings.plan(TextsToEmbed(model.asked_as, texts, keep))
        check_dimensions(request.dimensions, model.card.dimensions)
        planned_s = time.monotonic()
        vectors = await self._services.encoding_runner.run(plan, exchange.caller)
        answer = OllamaEmbedded(
            model=model.name,
            embeddings=[floats_of(shortened(vector, request.dimensions)) for vector in vectors],
            total_duration=round(1e9 * (time.monotonic() - exchange.caller.arrived_s)),
            load_duration=round(1e9 * (planned_s - exchange.caller.arrived_s)),
            prompt_eval_count=plan.num_tokens,
        )
        await exchange.respond(encode(answer))

    async def embeddings(self, exchange: Exchange) -> None:
        """POST /api/embeddings: one text."""
        body = await exchange.body()
        request = decode_body(body, OllamaEmbeddings)
        EMBEDDINGS.check(body)
        check_fields(request)
        model = await find(self._services.models, request.model)
        plan = await self._services.encodings.plan(TextsToEmbed(model.asked_as, [request.prompt], -1, field="prompt"))
        (vector,) = await self._services.encoding_runner.run(plan, exchange.caller)
        await exchange.respond(encode(OllamaEmbedding(floats_of(vector))))
