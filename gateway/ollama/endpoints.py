"""Ollama's endpoints for chats and prompts. docs/reference/http-api.md has every field."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from headrace.gateway.chat.generation import Plan, plan_job
from headrace.gateway.chat.logprobs import ChatLogprobs
from headrace.gateway.chat.output import ChatChoice
from headrace.gateway.checks import invalid
from headrace.gateway.edge.endpoint import Endpoint, Operation
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.hints import ignored
from headrace.gateway.ollama.answers import (
    KEEP_ALIVE,
    NDJSON,
    OLLAMA_ERRORS,
    OllamaAnswer,
    OllamaReply,
    Stopwatch,
    line,
    loaded,
)
from headrace.gateway.ollama.fields import CHAT, GENERATE
from headrace.gateway.ollama.names import find
from headrace.gateway.ollama.turns import (
    CHAT_NAMES,
    chat_of,
    check_fields,
    completion_of,
    effort_of,
    is_zero,
    prompted_chat_of,
)
from headrace.gateway.ollama.types import OllamaChat, OllamaGenerate
from headrace.gateway.services import Services
from headrace.gateway.text.models import Model
from headrace.protos.cache_eviction import longest_context
from headrace.protos.status import Reason, StatusError


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST /api/chat and /api/generate."""
    own = _Generations(services)
    lines = NDJSON.decode()
    chat = Operation("Answer a conversation, for Ollama's clients", OllamaReply, (OllamaChat,), True, lines)
    generate = Operation("Answer a prompt, for Ollama's clients", OllamaReply, (OllamaGenerate,), True, lines)
    return [
        Endpoint("POST", "/api/chat", "ollama_chat", own.chat, chat, OLLAMA_ERRORS),
        Endpoint("POST", "/api/generate", "ollama_generate", own.generate, generate, OLLAMA_ERRORS),
    ]


class _Generations:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def chat(self, exchange: Exchange) -> None:
        """POST /api/chat."""
        body = await exchange.body()
        request = decode_body(body, OllamaChat)
        CHAT.check(body)
        check_fields(request)
        del body  # the answer may take long, and images are large
        model = await find(self._services.models, request.model)
        if not request.messages:
            await _load(exchange, request, model)
            return
        with CHAT_NAMES.in_callers_terms():
            effort = effort_of(request.think, model.chat_template(), self._services.chats.reasons(model))
            chat_request = chat_of(request, model.asked_as, effort)
            for message in request.messages:
                message.images = None  # the chat has them
            chat = await self._services.chats.plan(chat_request)
            answer = OllamaAnswer(
                model.name,
                _watch(exchange),
                _logprobs(request, model),
                num_id_chars=chat.reading.num_id_chars,
            )
            await self._answer(exchange, request, _within(chat.plan, request), answer, chat.choices())

    async def generate(self, exchange: Exchange) -> None:
        """POST /api/generate."""
        body = await exchange.body()
        request = decode_body(body, OllamaGenerate)
        GENERATE.check(body)
        check_fields(request)
        model = await find(self._services.models, request.model)
        del body  # the answer may take long, and images are large
        if not request.prompt and not request.images:
            await _load(exchange, request, model)
        elif request.raw or model.text.own_template is None:
            await self._continue(exchange, request, model)
        else:
            await self._prompted(exchange, request, model)

    async def _continue(self, exchange: Exchange, request: OllamaGenerate, model: Model) -> None:
        """Continue a prompt without a template."""
        with CHAT_NAMES.in_callers_terms():
            (plan,) = (await self._services.chats.plan_completion(completion_of(request, model.asked_as))).plans
            job = replace(plan.job, sampling=replace(plan.job.sampling, default_max_tokens=None))
            if request.context:
                job = replace(job, token_ids=[*_context(request.context, model), *job.token_ids])
            plan = _within(plan_job(job), request)
            answer = OllamaAnswer(
                model.name,
                _watch(exchange),
                _logprobs(request, model),
                is_chat=False,
                prompt=None if request.raw else plan.job.token_ids,
            )
            await self._answer(exchange, request, plan, answer, [ChatChoice(None)])

    async def _prompted(self, exchange: Exchange, request: OllamaGenerate, model: Model) -> None:
        """Answer a prompt through the model's chat template, after the tokens of the given context."""
        effort = effort_of(request.think, model.chat_template(), self._services.chats.reasons(model))
        chat_request, names = prompted_chat_of(request, model.asked_as, effort)
        request.images = None  # the chat has them
        with names.in_callers_terms():
            chat = await self._services.chats.plan(chat_request)
            plan = chat.plan
            if request.context:
                token_ids = [*_context(request.context, model), *plan.job.token_ids]
                plan = plan_job(replace(plan.job, token_ids=token_ids))
            plan = _within(plan, request)
            answer = OllamaAnswer(
                model.name,
                _watch(exchange),
                _logprobs(request, model),
                is_chat=False,
                # Without its images, the tokens of such a prompt mean something else.
                prompt=None if plan.job.images else plan.job.token_ids,
            )
            await self._answer(exchange, request, plan, answer, chat.choices())

    async def _answer(
        self,
        exchange: Exchange,
        request: OllamaChat | OllamaGenerate,
        plan: Plan,
        answer: OllamaAnswer,
        readers: Sequence[ChatChoice],
    ) -> None:
        if request.stream is False:
            usage = await self._services.answering.gather(exchange.caller, [plan], [answer], readers)
            await exchange.respond(answer.whole(usage))
        else:
            exchange.stream_type, exchange.keep_alive_event = NDJSON, KEEP_ALIVE
            await self._services.answering.stream(exchange, [plan], answer, readers)


async def _load(exchange: Exchange, request: OllamaChat | OllamaGenerate, model: Model) -> None:
    """Answer a request without a prompt, which only checks the model."""
    value = loaded(model.name, isinstance(request, OllamaChat), "unload" if is_zero(request.keep_alive) else "load")
    if request.stream is False:
        await exchange.respond(encode(value))
    else:
        exchange.stream_type = NDJSON
        await exchange.write(line(value), last=True)


def _logprobs(request: OllamaChat | OllamaGenerate, model: Model) -> ChatLogprobs | None:
    return ChatLogprobs(model.text.tokenizer.token_bytes) if request.logprobs else None


def _context(token_ids: Sequence[int], model: Model) -> Sequence[int]:
    """The tokens of an earlier answer, checked. Raises `StatusError`."""
    if max(token_ids) >= model.card.vocab_size:
        raise invalid("context", f"context: tokens must be below {model.card.vocab_size}")
    return token_ids


def _within(plan: Plan, request: OllamaChat | OllamaGenerate) -> Plan:
    """The plan with answers that end where `num_ctx` tokens of prompt and answer are reached. Raises `StatusError`."""
    num_ctx = None if request.options is None else request.options.num_ctx
    if num_ctx is None:
        return plan
    most = longest_context(plan.job.model.card, plan.job.sampling.cache_eviction)
    num_prompt = len(plan.job.token_ids)
    if num_ctx > most:
        ignored("options.num_ctx", "it is over the model's context, so it means that", value=f">{most}")
        return plan
    if num_prompt >= num_ctx:
        problem = f"the prompt has {num_prompt} tokens, and options.num_ctx leaves room for {num_ctx - 1}"
        raise StatusError(Reason.CONTEXT_TOO_LONG, f"{problem}; shorten the prompt or raise options.num_ctx")
    for one in plan.requests:
        one.sampling.max_tokens = min(one.sampling.max_tokens, num_ctx - num_prompt)
        one.sampling.min_tokens = min(one.sampling.min_tokens, one.sampling.max_tokens)
    return plan


def _watch(exchange: Exchange) -> Stopwatch:
    return Stopwatch(exchange.caller.arrived_s, time.monotonic())
