"""The OpenAI API: chats, completions, embeddings, models and their tokenizers.

docs/reference/http-api.md has every field.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.chat.answering import WholeAnswer
from headrace.gateway.chat.choice import WholeChoice, best_of
from headrace.gateway.chat.generation import Plan
from headrace.gateway.chat.logprobs import ChatLogprobs, CompletionLogprobs, token_bytes_of
from headrace.gateway.chat.output import WholeChat
from headrace.gateway.chat.timings import Stopwatch
from headrace.gateway.checks import invalid, texts_or_tokens
from headrace.gateway.edge.endpoint import API, BARE_API, EVENTS, Endpoint, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.requests import number_of, query_of, request_of
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.encoding.planning import TextsToEmbed
from headrace.gateway.encoding.vectors import base64_of, check_dimensions, floats_of, shortened
from headrace.gateway.field_names import FieldNames
from headrace.gateway.openai.answers import (
    ChatCompletion,
    Completion,
    DetokenizedText,
    Embedding,
    EmbeddingList,
    EmbeddingUsage,
    ModelCard,
    ModelList,
    Shown,
    Tokens,
    card_of,
    identity,
    whole_chat,
    whole_completion,
)
from headrace.gateway.openai.fields import CHAT, COMPLETION, DETOKENIZE, EMBEDDING, TOKENIZE
from headrace.gateway.openai.streams import ChatStream, CompletionStream
from headrace.gateway.openai.types import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
    check_body,
    check_chat_body,
    take_images,
)
from headrace.gateway.services import Services
from headrace.gateway.text.detokenizer import detokenize
from headrace.gateway.text.models import Model
from headrace.protos.status import Reason, StatusError

_OF_THINKING = FieldNames([("reasoning_effort", "thinking")])
"""Disabled thinking means an effort of none."""
_OF_REASONING = FieldNames([("reasoning_effort", "reasoning.effort")])
_AS_THEY_ARE = FieldNames([])


MAX_PAGE = 1000
"""The most models of a page."""


def endpoints(services: Services) -> Sequence[Endpoint]:
    """All endpoints."""
    own = _Generations(services)
    models = _Models(services)
    chat = Operation("Answer a conversation", ChatCompletion, (ChatRequest,), generates=True, stream_type=EVENTS)
    completion = Operation(
        "Continue one or more prompts", Completion, (CompletionRequest,), generates=True, stream_type=EVENTS
    )
    vectors = Operation("Turn texts into vectors", EmbeddingList, (EmbeddingRequest,), generates=True)
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
            Endpoint("POST", "/chat/completions", "chat", own.chat, chat),
            Endpoint("POST", "/completions", "completions", own.completions, completion),
        ),
        *under(API, Endpoint("POST", "/embeddings", "embeddings", own.embeddings, vectors)),
        *under(
            BARE_API,
            Endpoint("GET", "/models", "models", models.list_models, listed),
            Endpoint("GET", "/models/{name:path}", "models", models.get_model, found),
        ),
        Endpoint("GET", "/tokenizer_info", "tokenize", models.tokenizer_info, info),
        Endpoint("POST", "/tokenize", "tokenize", models.tokenize, tokens),
        Endpoint("POST", "/detokenize", "detokenize", models.detokenize, text),
    ]


class Plans:
    """Plans requests without answering them, for endpoint pickers."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def of(self, path: str, body: bytes) -> Plan | None:
        """The plan of a chat, or of the first prompt of a completion; None for other paths. Raises `StatusError`."""
        if path.endswith("/chat/completions"):
            request = decode_body(body, ChatRequest)
            check_chat_body(request)
            take_images(request.messages)
            return (await self._services.chats.plan(request, is_trial=True)).plan
        if path.endswith("/completions"):
            completion = decode_body(body, CompletionRequest)
            check_body(completion)
            return (await self._services.chats.plan_completion(completion)).plans[0]
        return None


class _Generations:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def chat(self, exchange: Exchange) -> None:
        request = await request_of(exchange, ChatRequest, CHAT)
        check_chat_body(request)
        take_images(request.messages)
        exchange.name_request(request.request_id)
        names = _OF_THINKING if request.thinking else _OF_REASONING if request.reasoning else _AS_THEY_ARE
        with names.in_callers_terms():
            chat = await self._services.chats.plan(request)
        model = chat.model
        plan = chat.plan
        reading = chat.reading
        token_bytes = model.text.tokenizer.token_bytes
        who = identity("chatcmpl", "chat.completion", plan.requests[0].request_id, int(time.time()), model.card)
        logprobs = ChatLogprobs(token_bytes, bool(request.return_tokens_as_token_ids)) if request.logprobs else None
        shown = _shown(exchange, request, [plan])
        if request.stream:
            stream = ChatStream(who, logprobs, shown, reading.num_id_chars)
            await self._services.answering.stream(exchange, [plan], stream, chat.choices())
        else:
            chats = [WholeChat(reading.num_id_chars) for _ in range(plan.job.num_choices)]
            usage = await self._services.answering.gather(exchange.caller, [plan], _timed(chats, shown), chat.choices())
            best = [chats[i] for i in best_of(chats, len(chats), request.n or 1, are_ranked=plan.is_search)]
            await exchange.respond(whole_chat(who, best, logprobs, usage, shown, token_bytes))

    async def completions(self, exchange: Exchange) -> None:
        request = await request_of(exchange, CompletionRequest, COMPLETION)
        check_body(request)
        exchange.name_request(request.request_id)
        completion = await self._services.chats.plan_completion(request)
        model = completion.model
        plans = completion.plans
        token_bytes = model.text.tokenizer.token_bytes
        shown = _shown(exchange, request, plans, completion.echoes)
        who = identity("cmpl", "text_completion", plans[0].requests[0].request_id, int(time.time()), model.card)
        logprobs = None
        if request.logprobs is not None:
            as_ids = bool(request.return_tokens_as_token_ids)
            logprobs = CompletionLogprobs(token_bytes, request.logprobs, as_ids)
        if request.stream:
            await self._services.answering.stream(exchange, plans, CompletionStream(who, logprobs, shown))
        else:
            choices = [WholeChoice() for plan in plans for _ in range(plan.job.num_choices)]
            usage = await self._services.answering.gather(exchange.caller, plans, _timed(choices, shown))
            num_each = plans[0].job.num_choices
            n = request.n or 1
            best = [choices[i] for i in best_of(choices, num_each, n, are_ranked=plans[0].is_search)]
            await exchange.respond(whole_completion(who, best, logprobs, usage, shown, token_bytes))

    async def embeddings(self, exchange: Exchange) -> None:
        request = await request_of(exchange, EmbeddingRequest, EMBEDDING)
        texts = texts_or_tokens("input", request.input)
        plan = await self._services.encodings.plan(
            TextsToEmbed(request.model or "", texts, request.truncate_prompt_tokens, request.priority or 0)
        )
        check_dimensions(request.dimensions, plan.model.card.dimensions)
        vectors = await self._services.encoding_runner.run(plan, exchange.caller)
        shown = base64_of if request.encoding_format == "base64" else floats_of
        data = [
            Embedding(index=index, embedding=shown(shortened(vector, request.dimensions)))
            for index, vector in enumerate(vectors)
        ]
        usage = EmbeddingUsage(plan.num_tokens, plan.num_tokens)
        await exchange.respond(encode(EmbeddingList(data=data, model=plan.model.name, usage=usage)))


@dataclass(frozen=True, slots=True)
class _Timed:
    """A choice of a whole answer whose pieces are timed."""

    index: int
    choice: WholeAnswer
    watch: Stopwatch

    def push(self, piece: Any) -> None:
        """As `WholeAnswer.push`."""
        self.watch.tick(piece, self.index)
        self.choice.push(piece)


def _timed(choices: Sequence[WholeAnswer], shown: Shown) -> Sequence[WholeAnswer]:
    """The choices, timed if the answer has its times."""
    watch = shown.watch
    return choices if watch is None else [_Timed(i, choice, watch) for i, choice in enumerate(choices)]


def _shown(
    exchange: Exchange, request: ChatRequest | CompletionRequest, plans: Sequence[Plan], echoes: Sequence[str] = ()
) -> Shown:
    """The options for the answer to these plans. `echoes` are the texts of the prompts if they are echoed."""
    n = request.n or 1
    options = request.stream_options
    return Shown(
        usage=options is not None and bool(options.include_usage),
        running_usage=options is not None and bool(options.continuous_usage_stats),
        pads=options is not None and bool(options.include_obfuscation),
        num_prompt_tokens=sum(len(plan.job.token_ids) for plan in plans),
        prompts=[plan.job.shown_ids_of_prompt for plan in plans for _ in range(n)],
        token_ids=bool(request.return_token_ids),
        echoes=[text for text in echoes for _ in range(n)],
        prompt_logprobs=request.prompt_logprobs,
        reasoning=not isinstance(request, ChatRequest) or request.include_reasoning is not False,
        watch=Stopwatch(exchange.caller.arrived_s) if request.timings_per_token else None,
    )


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
        """GET /tokenizer_info: the data that clients such as lm-eval need to render prompts themselves."""
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
        request = await request_of(exchange, TokenizeRequest, TOKENIZE)
        take_images(request.messages or ())
        if request.content is not None:
            if request.prompt is not None:
                raise invalid("content", "content is the name of prompt in llama.cpp's API; leave out one of them")
            request.prompt, request.add_special_tokens = request.content, bool(request.add_special)
        found = await self._services.chats.tokenize(request)
        shown = found.shown
        tokens = [*found.token_ids] if request.return_image_identities else shown
        answer = Tokens(count=len(tokens), max_model_len=found.model.card.max_context_tokens, tokens=[*tokens])
        if request.return_token_strs:
            table = _table(found.model)
            answer.token_strs = [token_bytes_of(table, i).decode(errors="replace") for i in shown]
        if request.with_pieces and request.content is not None:
            table = _table(found.model)
            answer.tokens = [{"id": i, "piece": _piece(token_bytes_of(table, i))} for i in shown]
        await exchange.respond(encode(answer))

    async def detokenize(self, exchange: Exchange) -> None:
        request = await request_of(exchange, DetokenizeRequest, DETOKENIZE)
        model = await self._services.models.find(request.model or "")
        if request.tokens and not 0 <= min(request.tokens) <= max(request.tokens) < model.card.vocab_size:
            raise invalid("tokens", f"tokens must be from 0 to {model.card.vocab_size - 1}")
        text = detokenize(request.tokens, _table(model))
        await exchange.respond(encode(DetokenizedText(text, text)))


def _piece(raw: bytes) -> str | list[int]:
    """The text of a token, or its bytes if they are not whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return list(raw)


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
