"""The available models, and their tokenizers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.gateway.chat.logprobs import token_bytes_of
from headrace.gateway.checks import invalid
from headrace.gateway.edge.endpoint import BARE_API, Endpoint, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.query import number_of, query_of
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.openai.answers import DetokenizedText, ModelCard, ModelList, Tokens, card_of
from headrace.gateway.openai.fields import DETOKENIZE, TOKENIZE
from headrace.gateway.openai.images import take_images
from headrace.gateway.openai.types import DetokenizeRequest, TokenizeRequest
from headrace.gateway.services import Services
from headrace.gateway.text.detokenizer import detokenize
from headrace.gateway.text.models import Model
from headrace.protos.status import Reason, StatusError

MAX_PAGE = 1000
"""The most models of a page."""


def endpoints(services: Services) -> Sequence[Endpoint]:
    """GET models, models/{id} and /tokenizer_info; POST /tokenize and /detokenize."""
    own = _Models(services)
    page = {
        "limit": {"type": "integer", "minimum": 1, "maximum": MAX_PAGE},
        "after_id": {"type": "string"},
        "before_id": {"type": "string"},
    }
    listed = Operation("List the models", ModelList, query=page)
    found = Operation("Look a model up", ModelCard)
    info = Operation("Describe a model's tokenizer", dict[str, Any], query={"model": {"type": "string"}})
    tokens = Operation("Turn text into tokens", Tokens, (TokenizeRequest,))
    text = Operation("Turn tokens into text", DetokenizedText, (DetokenizeRequest,))
    return [
        *under(
            BARE_API,
            Endpoint("GET", "/models", "models", own.list_models, listed),
            Endpoint("GET", "/models/{name:path}", "models", own.get_model, found),
        ),
        Endpoint("GET", "/tokenizer_info", "tokenize", own.tokenizer_info, info),
        Endpoint("POST", "/tokenize", "tokenize", own.tokenize, tokens),
        Endpoint("POST", "/detokenize", "detokenize", own.detokenize, text),
    ]


class _Models:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def list_models(self, exchange: Exchange) -> None:
        cards = [card_of(model) for model in await self._services.models.overview()]
        page, has_more = _page_of(cards, query_of(exchange))
        first, last = (page[0].id, page[-1].id) if page else (None, None)
        await exchange.respond(encode(ModelList(data=page, has_more=has_more, first_id=first, last_id=last)))

    async def get_model(self, exchange: Exchange) -> None:
        await exchange.respond(
            encode(card_of(await self._services.models.look_up(exchange.scope["path_params"]["name"])))
        )

    async def tokenizer_info(self, exchange: Exchange) -> None:
        """What clients that render prompts by themselves need, such as lm-eval."""
        model = await self._services.models.find(query_of(exchange).get("model", ""))
        text = model.text
        before, after = text.tokenizer.special_around
        answer: dict[str, Any] = {
            **text.special_tokens,
            "add_bos_token": bool(before),
            "add_eos_token": bool(after),
            "chat_template": None if text.own_template is None else text.own_template.source,
            "model_max_length": model.card.max_context_tokens,
            "tokenizer_class": "PreTrainedTokenizerFast",
            "vocab_size": model.card.vocab_size,
        }
        await exchange.respond(encode(answer))

    async def tokenize(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = decode_body(body, TokenizeRequest)
        TOKENIZE.check(body)
        take_images(request.messages or ())
        model, token_ids = await self._services.chats.tokenize(request)
        answer = Tokens(count=len(token_ids), max_model_len=model.card.max_context_tokens, tokens=token_ids)
        if request.return_token_strs:
            table = _table(model)
            answer.token_strs = [token_bytes_of(table, i).decode(errors="replace") for i in token_ids]
        await exchange.respond(encode(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = decode_body(body, DetokenizeRequest)
        DETOKENIZE.check(body)
        model = await self._services.models.find(request.model or "")
        if request.tokens and not 0 <= min(request.tokens) <= max(request.tokens) < model.card.vocab_size:
            raise invalid("tokens", f"tokens must be from 0 to {model.card.vocab_size - 1}")
        await exchange.respond(encode(DetokenizedText(detokenize(request.tokens, _table(model)))))


def _table(model: Model) -> Sequence[bytes]:
    """The bytes of the model's tokens. Raises `StatusError` for encoders that come without a detokenizer."""
    if not model.text.tokenizer.token_bytes:
        problem = f"the model '{model.name}' has no detokenizer; convert its tokenizer again with one"
        raise StatusError(Reason.UNSUPPORTED, problem, field="model")
    return model.text.tokenizer.token_bytes


def _page_of(cards: list[ModelCard], query: Mapping[str, str]) -> tuple[list[ModelCard], bool]:
    """The page of models that Anthropic's query parameters ask for, and whether more follow in the same direction.
    Without `limit`, these are all models. Raises `StatusError`."""
    limit = number_of(query, "limit", max(1, len(cards)), 1, MAX_PAGE)
    places = {card.id: place for place, card in enumerate(cards)}
    for name in ("after_id", "before_id"):
        if name in query and query[name] not in places:
            raise invalid(name, f"{name}: there is no model of this id")
    if "before_id" in query and "after_id" in query:
        raise invalid("before_id", "before_id does not go with after_id")
    if "before_id" in query:
        cards = cards[: places[query["before_id"]]]
        return cards[-limit:], len(cards) > limit
    if "after_id" in query:
        cards = cards[places[query["after_id"]] + 1 :]
    return cards[:limit], len(cards) > limit
