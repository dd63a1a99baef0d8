"""Embeddings of the OpenAI API. docs/reference/http-api.md has every field."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.checks import invalid
from headrace.gateway.edge.endpoint import API, Endpoint, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.encoding.planning import Text, TextsToEmbed
from headrace.gateway.encoding.vectors import base64_of, check_dimensions, floats_of, shortened
from headrace.gateway.openai.answers import Embedding, EmbeddingList, EmbeddingUsage
from headrace.gateway.openai.fields import EMBEDDING
from headrace.gateway.openai.types import EmbeddingRequest
from headrace.gateway.services import Services


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST embeddings."""

    async def embeddings(exchange: Exchange) -> None:
        body = await exchange.body()
        request = decode_body(body, EmbeddingRequest)
        EMBEDDING.check(body)
        texts = texts_of(request)
        plan = await services.encodings.plan(
            TextsToEmbed(request.model or "", texts, request.truncate_prompt_tokens, request.priority or 0)
        )
        check_dimensions(request.dimensions, plan.model.card.dimensions)
        vectors = await services.encoding_runner.run(plan, exchange.caller)
        shown = base64_of if request.encoding_format == "base64" else floats_of
        data = [
            Embedding(index=index, embedding=shown(shortened(vector, request.dimensions)))
            for index, vector in enumerate(vectors)
        ]
        usage = EmbeddingUsage(plan.num_tokens, plan.num_tokens)
        await exchange.respond(encode(EmbeddingList(data=data, model=plan.model.name, usage=usage)))

    operation = Operation("Turn texts into vectors", EmbeddingList, (EmbeddingRequest,), generates=True)
    return under(API, Endpoint("POST", "/embeddings", "embeddings", embeddings, operation))


def texts_of(request: EmbeddingRequest) -> Sequence[Text]:
    """The texts of a request, each a text or its tokens. Raises `StatusError`."""
    given = request.input
    if isinstance(given, str):
        return [given]
    if given and all(isinstance(entry, int) for entry in given):
        return [given]  # type: ignore[list-item]
    if all(isinstance(entry, str) for entry in given) or all(isinstance(entry, list) for entry in given):
        return given  # type: ignore[return-value]
    raise invalid("input", "input must be a text, a list of texts, a list of tokens or a list of lists of tokens")
