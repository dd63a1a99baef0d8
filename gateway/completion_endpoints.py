"""Chats and completions as OpenAI's clients ask for them. docs/protocol.md has every field."""

from __future__ import annotations

import time
from collections.abc import Sequence

from headrace.gateway import openai_types
from headrace.gateway.chat_output import WholeChat
from headrace.gateway.detokenizer import detokenize
from headrace.gateway.endpoint import Endpoint, Services, at_api
from headrace.gateway.exchange import Exchange
from headrace.gateway.generation import Plan
from headrace.gateway.openai_answers import (
    ChatLogprobs,
    ChatStream,
    CompletionLogprobs,
    CompletionStream,
    WholeChoice,
    identity,
    whole_chat,
    whole_completion,
)
from headrace.gateway.openai_types import ChatRequest, CompletionRequest
from headrace.gateway.planning import plan_of


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST chat/completions and completions."""
    own = _Completions(services)
    return [
        *at_api("POST", "/chat/completions", "chat", own.chat),
        *at_api("POST", "/completions", "completions", own.completions),
    ]


class _Completions:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def chat(self, exchange: Exchange) -> None:
        request = openai_types.decode_body(await exchange.body(), ChatRequest)
        chat = await self._services.chats.plan(request)
        model, plan, reading = chat.model, chat.plan, chat.reading
        who = identity("chatcmpl", plan.requests[0].request_id, int(time.time()), model.card)
        logprobs = ChatLogprobs(model.text.tokenizer.token_bytes) if request.logprobs else None
        if request.stream:
            stream = ChatStream(who, logprobs, _wants_usage(request), reading.num_id_chars)
            await self._services.answering.stream(exchange, [plan], stream, chat.choices())
        else:
            chats = [WholeChat(reading.num_id_chars) for _ in plan.requests]
            usage = await self._services.answering.gather(exchange, [plan], chats, chat.choices())
            await exchange.respond(whole_chat(who, chats, logprobs, usage))

    async def completions(self, exchange: Exchange) -> None:
        request = openai_types.decode_body(await exchange.body(), CompletionRequest)
        openai_types.check_completion(request)
        model = await self._services.models.find(request.model or "")
        tokenizer = model.text.tokenizer
        plans: list[Plan] = []
        echoes: list[str] = []
        for prompt in openai_types.prompts_of(request):
            if isinstance(prompt, str):
                add_special_tokens = request.add_special_tokens is not False
                token_ids = await self._services.prompts.of_text(model, prompt, add_special_tokens=add_special_tokens)
                echo = prompt
            else:
                token_ids = prompt
                echo = detokenize(prompt, tokenizer.token_bytes, tokenizer.special_ids) if request.echo else ""
            plans.append(plan_of(request, model, token_ids))
            echoes += [echo] * plans[-1].job.num_choices
        if not request.echo:
            echoes = []
        who = identity("cmpl", plans[0].requests[0].request_id, int(time.time()), model.card)
        logprobs = None if request.logprobs is None else CompletionLogprobs(tokenizer.token_bytes)
        if request.stream:
            await self._services.answering.stream(
                exchange, plans, CompletionStream(who, logprobs, _wants_usage(request), echoes)
            )
        else:
            choices = [WholeChoice() for plan in plans for _ in plan.requests]
            usage = await self._services.answering.gather(exchange, plans, choices)
            await exchange.respond(whole_completion(who, choices, logprobs, usage, echoes))


def _wants_usage(request: ChatRequest | CompletionRequest) -> bool:
    return request.stream_options is not None and bool(request.stream_options.include_usage)
