"""Chats and completions of the OpenAI API. docs/reference/http-api.md has every field."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.gateway.chat.choice import WholeChoice, best_of
from headrace.gateway.chat.generation import Plan
from headrace.gateway.chat.logprobs import ChatLogprobs, CompletionLogprobs
from headrace.gateway.chat.output import WholeChat
from headrace.gateway.edge.endpoint import BARE_API, EVENTS, Endpoint, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import decode_body
from headrace.gateway.field_names import FieldNames
from headrace.gateway.openai.answers import (
    ChatCompletion,
    Completion,
    Shown,
    identity,
    whole_chat,
    whole_completion,
)
from headrace.gateway.openai.fields import CHAT, COMPLETION
from headrace.gateway.openai.images import take_images
from headrace.gateway.openai.streams import ChatStream, CompletionStream
from headrace.gateway.openai.types import ChatRequest, CompletionRequest, check_chat_body, check_completion_body
from headrace.gateway.services import Services

_OF_THINKING = FieldNames([("reasoning_effort", "thinking")])
"""Disabled thinking means an effort of none."""
_OF_REASONING = FieldNames([("reasoning_effort", "reasoning.effort")])
_AS_THEY_ARE = FieldNames([])


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST chat/completions and completions."""
    own = _Completions(services)
    chat = Operation("Answer a conversation", ChatCompletion, (ChatRequest,), generates=True, stream_type=EVENTS)
    completion = Operation(
        "Continue one or more prompts", Completion, (CompletionRequest,), generates=True, stream_type=EVENTS
    )
    return under(
        BARE_API,
        Endpoint("POST", "/chat/completions", "chat", own.chat, chat),
        Endpoint("POST", "/completions", "completions", own.completions, completion),
    )


class _Completions:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def chat(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = decode_body(body, ChatRequest)
        CHAT.check(body)
        check_chat_body(request)
        take_images(request.messages)
        del body  # the answer may take long, and images are large
        exchange.name_request(request.request_id)
        names = _OF_THINKING if request.thinking else _OF_REASONING if request.reasoning else _AS_THEY_ARE
        with names.in_callers_terms():
            chat = await self._services.chats.plan(request)
        model, plan, reading = chat.model, chat.plan, chat.reading
        token_bytes = model.text.tokenizer.token_bytes
        who = identity("chatcmpl", "chat.completion", plan.requests[0].request_id, int(time.time()), model.card)
        logprobs = ChatLogprobs(token_bytes, bool(request.return_tokens_as_token_ids)) if request.logprobs else None
        shown = _shown(request, [plan])
        if request.stream:
            stream = ChatStream(who, logprobs, shown, reading.num_id_chars)
            await self._services.answering.stream(exchange, [plan], stream, chat.choices())
        else:
            chats = [WholeChat(reading.num_id_chars) for _ in plan.requests]
            usage = await self._services.answering.gather(exchange.caller, [plan], chats, chat.choices())
            best = [chats[i] for i in best_of(chats, len(chats), request.n or 1)]
            await exchange.respond(whole_chat(who, best, logprobs, usage, shown, token_bytes))

    async def completions(self, exchange: Exchange) -> None:
        body = await exchange.body()
        request = decode_body(body, CompletionRequest)
        COMPLETION.check(body)
        check_completion_body(request)
        exchange.name_request(request.request_id)
        completion = await self._services.chats.plan_completion(request)
        model, plans = completion.model, completion.plans
        token_bytes = model.text.tokenizer.token_bytes
        shown = _shown(request, plans, completion.echoes)
        who = identity("cmpl", "text_completion", plans[0].requests[0].request_id, int(time.time()), model.card)
        logprobs = None
        if request.logprobs is not None:
            as_ids = bool(request.return_tokens_as_token_ids)
            logprobs = CompletionLogprobs(token_bytes, request.logprobs, as_ids)
        if request.stream:
            await self._services.answering.stream(exchange, plans, CompletionStream(who, logprobs, shown))
        else:
            choices = [WholeChoice() for plan in plans for _ in plan.requests]
            usage = await self._services.answering.gather(exchange.caller, plans, choices)
            num_each, n = plans[0].job.num_choices, request.n or 1
            best = [choices[i] for i in best_of(choices, num_each, n)]
            await exchange.respond(whole_completion(who, best, logprobs, usage, shown, token_bytes))


def _shown(request: ChatRequest | CompletionRequest, plans: Sequence[Plan], echoes: Sequence[str] = ()) -> Shown:
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
    )
