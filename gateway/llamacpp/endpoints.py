"""llama.cpp's own endpoints. docs/reference/http-api.md has every field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace.common.version import headrace_version
from headrace.gateway.chat.generation import plan_job
from headrace.gateway.chat.prompts import Gap
from headrace.gateway.chat.sampling import shortest
from headrace.gateway.chat.timings import Stopwatch
from headrace.gateway.edge.endpoint import EVENTS, Endpoint, Operation
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.requests import query_of, request_of
from headrace.gateway.edge.wire import encode
from headrace.gateway.llamacpp.answers import (
    LLAMA_ERRORS,
    LlamaAnswer,
    LlamaChoice,
    LlamaProps,
    LlamaSlot,
    LlamaText,
)
from headrace.gateway.llamacpp.fields import APPLY_TEMPLATE, COMPLETION, INFILL
from headrace.gateway.llamacpp.types import (
    NAMES,
    LlamaCompletion,
    LlamaInfill,
    LlamaRequest,
    LlamaTemplate,
    completion_of,
    gap_of,
    mixed,
)
from headrace.gateway.services import Services
from headrace.gateway.text.detokenizer import detokenize
from headrace.gateway.text.models import Model
from headrace.protos.inference_pb2 import SamplingParams
from headrace.protos.sampling_fields import NUMBERS


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST /completion, /infill and /apply-template; GET /props and /slots."""
    own = _Llama(services)
    completion = Operation("Continue a prompt, for llama.cpp's clients", LlamaAnswer, (LlamaCompletion,), True, EVENTS)
    infill = Operation("Fill a gap in a text, for llama.cpp's clients", LlamaAnswer, (LlamaInfill,), True, EVENTS)
    template = Operation("Write a conversation as the model reads it", LlamaText, (LlamaTemplate,))
    model = {"model": {"type": "string"}}
    props = Operation("Describe a model, for llama.cpp's clients", LlamaProps, query=model)
    slots = Operation("List the places in the workers' batches", list[LlamaSlot], query=model)
    return [
        Endpoint("POST", "/completion", "llamacpp_completion", own.completion, completion, LLAMA_ERRORS),
        Endpoint("POST", "/infill", "llamacpp_infill", own.infill, infill, LLAMA_ERRORS),
        Endpoint("POST", "/apply-template", "llamacpp_template", own.apply_template, template, LLAMA_ERRORS),
        Endpoint("GET", "/props", "llamacpp_props", own.props, props, LLAMA_ERRORS),
        Endpoint("GET", "/slots", "llamacpp_slots", own.slots, slots, LLAMA_ERRORS),
    ]


class _Llama:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def completion(self, exchange: Exchange) -> None:
        """POST /completion."""
        request = await request_of(exchange, LlamaCompletion, COMPLETION)
        parts, is_tokens = mixed(request.prompt)
        if is_tokens:
            await self._answer(exchange, request, [part for part in parts if isinstance(part, int)])
        elif len(parts) == 1:
            await self._answer(exchange, request, str(parts[0]))
        else:
            model = await self._services.models.find(request.model or "")
            tokens: list[int] = []
            for place, part in enumerate(parts):
                if isinstance(part, int):
                    tokens.append(part)
                else:
                    tokens += await self._services.chats.tokens_of(model, part, add_special_tokens=not place)
            await self._answer(exchange, request, tokens)

    async def infill(self, exchange: Exchange) -> None:
        """POST /infill."""
        request = await request_of(exchange, LlamaInfill, INFILL)
        before, gap = gap_of(request)
        await self._answer(exchange, request, before, gap)

    async def apply_template(self, exchange: Exchange) -> None:
        """POST /apply-template."""
        request = await request_of(exchange, LlamaTemplate, APPLY_TEMPLATE)
        found = await self._services.chats.tokenize(request)
        model, token_ids = found.model, found.shown
        await exchange.respond(encode(LlamaText(detokenize(token_ids, model.text.tokenizer.token_bytes))))

    async def props(self, exchange: Exchange) -> None:
        """GET /props."""
        model = await self._services.models.find(query_of(exchange).get("model", ""), loads=False)
        text = model.text
        params = {**_settings(model.card.default_sampling), "n_predict": -1}
        props = LlamaProps(
            default_generation_settings={
                "id": 0,
                "id_task": -1,
                "n_ctx": model.card.max_context_tokens,
                "speculative": False,
                "is_processing": False,
                "params": params,
                **params,
            },
            total_slots=len(await self._slots(model)) or 1,
            model_alias=model.name,
            model_path=model.name,
            modalities={"vision": model.images is not None, "audio": False},
            chat_template="" if text.own_template is None else text.own_template.source,
            bos_token=text.special_tokens.get("bos_token", ""),
            eos_token=text.special_tokens.get("eos_token", ""),
            build_info=f"headrace {headrace_version()}",
        )
        await exchange.respond(encode(props))

    async def slots(self, exchange: Exchange) -> None:
        """GET /slots: for each worker, the places in its batch, those of running requests first."""
        model = await self._services.models.find(query_of(exchange).get("model", ""), loads=False)
        await exchange.respond(encode(await self._slots(model)))

    async def _slots(self, model: Model) -> list[LlamaSlot]:
        base = model.card.parent or model.card.name
        found: list[LlamaSlot] = []
        for worker in await self._services.upstream.list_workers():
            if worker.model != base:
                continue
            for number in range(worker.load.max_num_seqs):
                found.append(
                    LlamaSlot(
                        id=len(found),
                        n_ctx=model.card.max_context_tokens,
                        speculative=False,
                        is_processing=number < worker.load.num_running,
                        worker=worker.worker_id,
                    )
                )
        return found

    async def _answer(
        self, exchange: Exchange, request: LlamaRequest, prompt: str | list[int], gap: Gap | None = None
    ) -> None:
        with NAMES.in_callers_terms():
            planned = await self._services.chats.plan_completion(completion_of(request, prompt), gap)
            (plan,) = planned.plans
            job = replace(plan.job, sampling=replace(plan.job.sampling, default_max_tokens=None))
            plan = plan_job(job)
        token_bytes = planned.model.text.tokenizer.token_bytes
        sampling = plan.requests[0].sampling
        choice = LlamaChoice(
            model=planned.model.name,
            prompt=detokenize(job.shown_ids_of_prompt, token_bytes),
            num_prompt_tokens=len(job.token_ids),
            settings={
                **_settings(sampling),
                "seed": sampling.seed,
                "n_predict": -1 if request.n_predict is None else request.n_predict,
                "n_ctx": planned.model.card.max_context_tokens,
                "stop": list(job.sampling.stop),
                "stream": bool(request.stream),
                "n_probs": request.n_probs or 0,
            },
            token_bytes=token_bytes,
            watch=Stopwatch(exchange.caller.arrived_s),
            shows_tokens=bool(request.return_tokens),
            shows_probabilities=bool(request.n_probs),
        )
        if request.stream:
            await self._services.answering.stream(exchange, [plan], choice)
        else:
            await self._services.answering.gather(exchange.caller, [plan], [choice])
            await exchange.respond(choice.whole())


def _settings(sampling: SamplingParams) -> dict[str, Any]:
    """The numbers of a request's sampling, by llama.cpp's names."""
    found: dict[str, Any] = {}
    for name, number in NUMBERS.items():
        if name != "seed":
            value = getattr(sampling, name) if sampling.HasField(name) else number.default
            found[name] = shortest(value) if isinstance(value, float) else value
    found["repeat_penalty"] = found.pop("repetition_penalty")
    return found
