"""TGI's endpoints for prompts. docs/reference/http-api.md has every field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.common.version import headrace_version
from headrace.gateway.chat.choice import best_of
from headrace.gateway.chat.generation import Plan
from headrace.gateway.chat.planning import CompletionPlan
from headrace.gateway.chat.sampling import MAX_CHOICES, MAX_LOGPROBS, MAX_STOP_STRINGS
from headrace.gateway.checks import invalid
from headrace.gateway.edge.endpoint import EVENTS, Endpoint, Handler, Operation
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.requests import query_of, request_of
from headrace.gateway.edge.wire import encode
from headrace.gateway.services import Services
from headrace.gateway.tgi.answers import TGI_ERRORS, Shown, TgiAnswer, TgiChoice, TgiInfo, TgiStream, whole
from headrace.gateway.tgi.fields import REQUEST
from headrace.gateway.tgi.types import NAMES, TgiParameters, TgiRequest, completion_of, samples


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST /generate, /generate_stream and /; GET /info."""
    own = _Generations(services)

    def generating(path: str, handler: Handler, summary: str, answer: Any, stream_type: str = "") -> Endpoint:
        operation = Operation(f"{summary}, for TGI's clients", answer, (TgiRequest,), True, stream_type)
        return Endpoint("POST", path, "tgi_generate", handler, operation, TGI_ERRORS)

    info = Operation("What is served", TgiInfo, query={"model": {"type": "string"}})
    return [
        generating("/generate", own.generate, "Continue a prompt", TgiAnswer),
        generating("/generate_stream", own.generate_stream, "Stream the continuation of a prompt", None, EVENTS),
        generating("/", own.either, "Continue a prompt, whole or as a stream", list[TgiAnswer], EVENTS),
        Endpoint("GET", "/info", "tgi_info", own.info, info, TGI_ERRORS),
    ]


class _Generations:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def generate(self, exchange: Exchange) -> None:
        """POST /generate."""
        request = await request_of(exchange, TgiRequest, REQUEST)
        if request.stream:
            raise invalid("stream", "stream: /generate answers as a whole; use /generate_stream")
        await exchange.respond(encode(await self._whole(exchange, request)))

    async def generate_stream(self, exchange: Exchange) -> None:
        """POST /generate_stream."""
        request = await request_of(exchange, TgiRequest, REQUEST)
        if request.stream is False:
            raise invalid("stream", "stream: /generate_stream answers with a stream; use /generate")
        await self._stream(exchange, request)

    async def either(self, exchange: Exchange) -> None:
        """POST /: as /generate or /generate_stream, depending on `stream`. A whole answer is in a list."""
        request = await request_of(exchange, TgiRequest, REQUEST)
        if request.stream:
            await self._stream(exchange, request)
        else:
            await exchange.respond(encode([await self._whole(exchange, request)]))

    async def info(self, exchange: Exchange) -> None:
        """GET /info."""
        model = await self._services.models.find(query_of(exchange).get("model", ""), loads=False)
        info = TgiInfo(
            model_id=model.name,
            model_sha=model.card.fingerprint,
            max_best_of=MAX_CHOICES,
            max_stop_sequences=MAX_STOP_STRINGS,
            max_top_n_tokens=MAX_LOGPROBS,
            max_input_tokens=model.card.max_context_tokens - 1,
            max_total_tokens=model.card.max_context_tokens,
            version=headrace_version(),
        )
        await exchange.respond(encode(info))

    async def _stream(self, exchange: Exchange, request: TgiRequest) -> None:
        with NAMES.in_callers_terms():
            completion = await self._services.chats.plan_completion(completion_of(request, streams=True))
            stream = TgiStream(_shown(request, completion))
            await self._services.answering.stream(exchange, completion.plans, stream)

    async def _whole(self, exchange: Exchange, request: TgiRequest) -> TgiAnswer:
        with NAMES.in_callers_terms():
            completion = await self._services.chats.plan_completion(completion_of(request, streams=False))
            shown = _shown(request, completion)
            choices = [TgiChoice(shown, i) for i in range(_plan(completion).job.num_choices)]
            await self._services.answering.gather(exchange.caller, completion.plans, choices)
            return whole(_ranked(choices), shown)


def _ranked(choices: Sequence[TgiChoice]) -> list[TgiChoice]:
    """The choices that succeeded, best first."""
    (best,) = best_of(choices, len(choices), 1)
    others = [i for i, one in enumerate(choices) if i != best and one.ending is not None and one.ending.error is None]
    return [choices[best], *(choices[i] for i in others)]


def _plan(completion: CompletionPlan) -> Plan:
    (plan,) = completion.plans
    return plan


def _shown(request: TgiRequest, completion: CompletionPlan) -> Shown:
    parameters = request.parameters or TgiParameters()
    plan = _plan(completion)
    tokenizer = completion.model.text.tokenizer
    return Shown(
        token_bytes=tokenizer.token_bytes,
        special_ids=tokenizer.special_ids,
        prompt=plan.job.token_ids,
        prefix=request.inputs if parameters.return_full_text else "",
        num_top=parameters.top_n_tokens or 0,
        details=bool(parameters.details),
        prefill=bool(parameters.decoder_input_details),
        seed=plan.requests[0].sampling.seed if samples(request) else None,
        holds=bool(plan.job.sampling.stop),
    )
