"""Ollama's endpoints: chats, prompts, embeddings, models. docs/reference/http-api.md has every field."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from headrace.common.tasks import end_tasks
from headrace.gateway.chat.generation import Plan, plan_job
from headrace.gateway.chat.logprobs import ChatLogprobs
from headrace.gateway.chat.output import ChatChoice
from headrace.gateway.chat.sampling import shortest
from headrace.gateway.checks import invalid
from headrace.gateway.edge.endpoint import Endpoint, Handler, Operation
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.requests import request_of
from headrace.gateway.edge.wire import encode
from headrace.gateway.encoding.planning import TextsToEmbed
from headrace.gateway.encoding.vectors import check_dimensions, floats_of, shortened
from headrace.gateway.hints import ignored
from headrace.gateway.ollama.answers import (
    KEEP_ALIVE,
    NDJSON,
    OLLAMA_ERRORS,
    OllamaAnswer,
    OllamaDetails,
    OllamaEmbedded,
    OllamaEmbedding,
    OllamaList,
    OllamaListed,
    OllamaReply,
    OllamaRunning,
    OllamaRunningList,
    OllamaShown,
    OllamaStatus,
    OllamaVersion,
    Stopwatch,
    line,
    loaded,
    time_of,
)
from headrace.gateway.ollama.blobs import too_many_bytes
from headrace.gateway.ollama.fields import CHAT, COPY, CREATE, DELETE, EMBED, EMBEDDINGS, GENERATE, PULL, SHOW
from headrace.gateway.ollama.managing import LATEST, Managing
from headrace.gateway.ollama.turns import (
    CHAT_NAMES,
    chat_of,
    check_fields,
    completion_of,
    effort_of,
    is_zero,
    prompted_chat_of,
    seconds_of,
)
from headrace.gateway.ollama.types import (
    OllamaChat,
    OllamaCopy,
    OllamaCreate,
    OllamaDelete,
    OllamaEmbed,
    OllamaEmbeddings,
    OllamaGenerate,
    OllamaPull,
    OllamaShow,
)
from headrace.gateway.services import Services
from headrace.gateway.text.models import ListedModel, Model, Models
from headrace.protos.cache_eviction import longest_context
from headrace.protos.inference_pb2 import TASK_EMBED
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ModelCard

API_VERSION = "0.13.4"
"""The version of Ollama whose API is served. Clients compare it with the minimum that they need."""
_NEVER = "9999-12-31T23:59:59Z"
_SILENT_S = 1.0
"""A request to create a model that takes longer than this sends a progress message."""
_MOST_IDLE_MS = 1000 * 366 * 24 * 3600 * 1000
# Default of the card -> name of Ollama's parameter.
_PARAMETERS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repeat_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "max_tokens": "num_predict",
}


def endpoints(services: Services, managing: Managing) -> Sequence[Endpoint]:
    """All endpoints. `managing` changes the models, as far as the operator allows it."""
    own = _Generations(services, managing)
    models = _Models(services)
    managed = _Managed(managing)
    lines = NDJSON.decode()

    def generating(
        path: str, name: str, handler: Handler, summary: str, answer: Any, request: Any, stream_type: str = ""
    ) -> Endpoint:
        operation = Operation(f"{summary}, for Ollama's clients", answer, (request,), True, stream_type)
        return Endpoint("POST", path, name, handler, operation, OLLAMA_ERRORS)

    def reading(
        method: str, path: str, name: str, handler: Handler, operation: Operation, is_open: bool = False
    ) -> Endpoint:
        return Endpoint(method, path, name, handler, operation, OLLAMA_ERRORS, is_open=is_open, makes_work=False)

    chat = "Answer a conversation"
    prompt = "Answer a prompt"
    texts = "Turn texts into vectors"
    text = "Turn a text into a vector"
    tags = Operation("List the models", OllamaList)
    running = Operation("List the models, as those that run", OllamaRunningList)
    version = Operation("The version of Ollama's API", OllamaVersion)
    show = Operation("Describe a model", OllamaShown, (OllamaShow,))
    served = "Tell whether a model is served, as a pull that has ended"
    pull = Operation(served, OllamaStatus, (OllamaPull,), stream_type=lines)
    made = "Make a model from files that were sent, or give one another name"
    create = Operation(made, OllamaStatus, (OllamaCreate,), False, lines)
    blob = Operation("Tell whether a file was sent", None)
    sent = Operation("Send a file from which to create a model", None)
    copy = Operation("Give a model another name", None, (OllamaCopy,))
    delete = Operation("Take away a name of a model, or remove a created model", None, (OllamaDelete,))
    refused = Operation("Refused: a gateway uploads no models", is_refused=True)
    return [
        generating("/api/chat", "ollama_chat", own.chat, chat, OllamaReply, OllamaChat, lines),
        generating("/api/generate", "ollama_generate", own.generate, prompt, OllamaReply, OllamaGenerate, lines),
        generating("/api/embed", "ollama_embed", own.embed, texts, OllamaEmbedded, OllamaEmbed),
        generating("/api/embeddings", "ollama_embed", own.embeddings, text, OllamaEmbedding, OllamaEmbeddings),
        reading("GET", "/api/tags", "ollama_models", models.tags, tags),
        reading("GET", "/api/ps", "ollama_models", models.running, running),
        reading("GET", "/api/version", "ollama_version", models.version, version, is_open=True),
        reading("POST", "/api/show", "ollama_models", models.show, show),
        reading("POST", "/api/pull", "ollama_pull", models.pull, pull),
        reading("POST", "/api/create", "ollama_manage", managed.create, create),
        reading("GET", "/api/blobs/{digest}", "ollama_manage", managed.has_blob, blob),
        reading("POST", "/api/blobs/{digest}", "ollama_manage", managed.take_blob, sent),
        reading("POST", "/api/copy", "ollama_manage", managed.copy, copy),
        reading("DELETE", "/api/delete", "ollama_manage", managed.delete, delete),
        reading("POST", "/api/push", "ollama_manage", managed.push, refused),
    ]


async def find(models: Models, name: str | None, *, loads: bool = True) -> Model:
    """The model of this name, with or without `:latest`. Raises `StatusError`."""
    try:
        return await models.find(name or "", loads=loads)
    except StatusError as error:
        if error.reason is not Reason.MODEL_NOT_FOUND or not (name or "").endswith(LATEST):
            raise
        return await models.find((name or "").removesuffix(LATEST), loads=loads)


class _Generations:
    def __init__(self, services: Services, managing: Managing) -> None:
        self._services = services
        self._managing = managing

    async def chat(self, exchange: Exchange) -> None:
        """POST /api/chat."""
        request = await request_of(exchange, OllamaChat, CHAT)
        self._check(request)
        if not request.messages and await self._unloaded(exchange, request):
            return
        model = await find(self._services.models, request.model)
        if not request.messages:
            await self._load(exchange, request, model)
            return
        with CHAT_NAMES.in_callers_terms():
            effort = self._effort(request, model)
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
        request = await request_of(exchange, OllamaGenerate, GENERATE)
        self._check(request)
        if not request.prompt and not request.images and await self._unloaded(exchange, request):
            return
        model = await find(self._services.models, request.model)
        if not request.prompt and not request.images:
            await self._load(exchange, request, model)
        elif request.raw or request.suffix or (model.text.own_template is None and request.chat_template is None):
            await self._continue(exchange, request, model)
        else:
            await self._prompted(exchange, request, model)

    async def embed(self, exchange: Exchange) -> None:
        """POST /api/embed: one or many texts, as vectors of length 1."""
        request = await request_of(exchange, OllamaEmbed, EMBED)
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
        request = await request_of(exchange, OllamaEmbeddings, EMBEDDINGS)
        check_fields(request)
        model = await find(self._services.models, request.model)
        plan = await self._services.encodings.plan(TextsToEmbed(model.asked_as, [request.prompt], -1, field="prompt"))
        (vector,) = await self._services.encoding_runner.run(plan, exchange.caller)
        await exchange.respond(encode(OllamaEmbedding(floats_of(vector))))

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
                prompt=None if request.raw or request.suffix else plan.job.token_ids,
            )
            await self._answer(exchange, request, plan, answer, [ChatChoice(None)])

    async def _prompted(self, exchange: Exchange, request: OllamaGenerate, model: Model) -> None:
        """Answer a prompt through the model's chat template, after the tokens of the given context."""
        effort = self._effort(request, model)
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

    def _effort(self, request: OllamaChat | OllamaGenerate, model: Model) -> str | None:
        template = model.chat_template(request.chat_template)
        return effort_of(request.think, template, self._services.chats.reasons(model, template))

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
            exchange.stream_type = NDJSON
            exchange.keep_alive_event = KEEP_ALIVE
            await self._services.answering.stream(exchange, [plan], answer, readers)
        self._release(request)

    def _check(self, request: OllamaChat | OllamaGenerate) -> None:
        check_fields(request, unloads=self._managing.unloads)
        if self._managing.unloads:
            kept = request.keep_alive
            self._managing.stay(request.model or "", None if kept is None else seconds_of(kept))

    def _release(self, request: OllamaChat | OllamaGenerate) -> None:
        """After a request has ended, unload its model as its `keep_alive` says."""
        if not self._managing.unloads or request.keep_alive is None:
            return
        if is_zero(request.keep_alive):
            self._managing.unload_soon(request.model or "")
        elif (seconds := seconds_of(request.keep_alive)) > 0:
            self._managing.leave_after(request.model or "", seconds)

    async def _unloaded(self, exchange: Exchange, request: OllamaChat | OllamaGenerate) -> bool:
        """Answer a request without a prompt that unloads its model. Returns whether it is one, and may be."""
        if not self._managing.unloads or not is_zero(request.keep_alive):
            return False
        name = request.model or ""
        if not await self._managing.unload(name):
            return False
        await _respond(exchange, loaded(name, isinstance(request, OllamaChat), "unload"), request.stream)
        return True

    async def _load(self, exchange: Exchange, request: OllamaChat | OllamaGenerate, model: Model) -> None:
        """Answer a request without a prompt, which only checks the model."""
        unloads = is_zero(request.keep_alive)
        value = loaded(model.name, isinstance(request, OllamaChat), "unload" if unloads else "load")
        await _respond(exchange, value, request.stream)
        if not unloads:
            self._release(request)


async def _respond(exchange: Exchange, value: OllamaReply | OllamaStatus, stream: bool | None) -> None:
    if stream is False:
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


class _Models:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def tags(self, exchange: Exchange) -> None:
        models = await self._services.models.overview()
        listed = [OllamaListed(**_identity(model), modified_at=time_of(_card(model).created_s)) for model in models]
        await exchange.respond(encode(OllamaList(listed)))

    async def running(self, exchange: Exchange) -> None:
        models = await self._services.models.overview()
        running = [
            OllamaRunning(
                **_identity(model),
                expires_at=_expires_at(model),
                context_length=_card(model).max_context_tokens,
            )
            for model in models
            if model.state == "loaded"
        ]
        await exchange.respond(encode(OllamaRunningList(running)))

    async def version(self, exchange: Exchange) -> None:
        await exchange.respond(encode(OllamaVersion(API_VERSION)))

    async def show(self, exchange: Exchange) -> None:
        request = await request_of(exchange, OllamaShow, SHOW)
        model = await find(self._services.models, request.model or request.name, loads=False)
        template = model.text.own_template
        shown = OllamaShown(
            modelfile=f"FROM {model.name}\n",
            parameters="\n".join(_parameters(model.card)),
            template="" if template is None else template.source,
            details=OllamaDetails(),
            model_info={
                "general.architecture": "openvino",
                "openvino.context_length": model.card.max_context_tokens,
                "openvino.vocab_size": model.card.vocab_size,
            },
            capabilities=self._capabilities(model),
            modified_at=time_of(model.card.created_s),
        )
        await exchange.respond(encode(shown))

    def _capabilities(self, model: Model) -> list[str]:
        if model.card.task:
            return ["embedding"] if model.card.task == TASK_EMBED else []
        chats = self._services.chats
        found = ["completion", *(["insert"] * chats.fills_gaps(model))]
        if model.text.template is not None:
            found += ["vision"] * (model.images is not None)
            found += ["tools"] * chats.calls_tools(model) + ["thinking"] * chats.reasons(model)
        return found

    async def pull(self, exchange: Exchange) -> None:
        """Report success if the model is served. Clients cannot pull other models."""
        request = await request_of(exchange, OllamaPull, PULL)
        name = request.model or request.name
        try:
            model = await find(self._services.models, name, loads=False)
        except StatusError as error:
            if error.reason is not Reason.MODEL_NOT_FOUND:
                raise
            remedy = "a gateway pulls no models: ask its operator to serve this one (headrace pull, headrace serve)"
            raise StatusError(error.reason, f"{error.message}; {remedy}", field=error.field) from error
        if request.stream is False:
            await exchange.respond(encode(OllamaStatus("success")))
            return
        exchange.stream_type = NDJSON
        statuses = (f"the model '{model.name}' is served already", "success")
        await exchange.write(b"".join(line(OllamaStatus(status)) for status in statuses), last=True)


class _Managed:
    """Endpoints that change the models of a host."""

    def __init__(self, managing: Managing) -> None:
        self._managing = managing

    async def create(self, exchange: Exchange) -> None:
        """POST /api/create: a model from files, or another name for one. Its own options would be those of every
        request."""
        request = await request_of(exchange, OllamaCreate, CREATE)
        self._managing.check("create")
        name = request.model or request.name
        if not name:
            raise invalid("model", "model is required")
        if request.from_ and request.files:
            raise invalid("files", "files and from exclude each other; give one of them")
        if request.files:
            await self._make(exchange, name, request.files, streams=request.stream is not False)
        elif request.from_:
            await self._managing.name(request.from_, "from", name, "model")
        else:
            problem = "from or files is required: the model that gets another name, or the files of a new one"
            raise invalid("from", problem)
        await _respond(exchange, OllamaStatus("success"), request.stream)

    async def _make(self, exchange: Exchange, name: str, files: Mapping[str, str], *, streams: bool) -> None:
        """Make a model from files, which takes long."""
        making = asyncio.create_task(self._managing.make(name, files))
        tasks = [making]
        try:
            # What is wrong with the request has a status, and does not begin a stream.
            await asyncio.wait({making}, timeout=_SILENT_S if streams else None)
            if not making.done():
                exchange.stream_type, exchange.keep_alive_event = NDJSON, KEEP_ALIVE
                await exchange.write(line(OllamaStatus("converting and loading the model")))
                tasks.append(asyncio.create_task(exchange.keep_alive()))
            await making
        finally:
            await end_tasks(*tasks)

    async def has_blob(self, exchange: Exchange) -> None:
        """HEAD /api/blobs/:digest."""
        digest = exchange.scope["path_params"]["digest"]
        if not self._managing.uploads().has(digest):
            raise StatusError(Reason.NOT_FOUND, f"there is no blob {digest[:80]}; send it with POST", field="digest")
        await exchange.respond(b"", content_type=b"text/plain; charset=utf-8")

    async def take_blob(self, exchange: Exchange) -> None:
        """POST /api/blobs/:digest."""
        blobs = self._managing.uploads()
        too_large = too_many_bytes(blobs.num_free_bytes)
        if (length := exchange.header("content-length")).isdecimal() and int(length) > blobs.num_free_bytes:
            raise too_large
        pieces = exchange.body_pieces(blobs.num_free_bytes, too_large)
        await blobs.take(exchange.scope["path_params"]["digest"], pieces)
        await exchange.respond(b"", status=201, content_type=b"text/plain; charset=utf-8")

    async def copy(self, exchange: Exchange) -> None:
        """POST /api/copy."""
        request = await request_of(exchange, OllamaCopy, COPY)
        self._managing.check("copy")
        await self._managing.name(request.source, "source", request.destination, "destination")
        await exchange.respond(b"", content_type=b"text/plain; charset=utf-8")

    async def delete(self, exchange: Exchange) -> None:
        """DELETE /api/delete."""
        request = await request_of(exchange, OllamaDelete, DELETE)
        self._managing.check("delete")
        name = request.model or request.name
        if not name:
            raise invalid("model", "model is required")
        await self._managing.forget(name)
        await exchange.respond(b"", content_type=b"text/plain; charset=utf-8")

    async def push(self, exchange: Exchange) -> None:
        """POST /api/push."""
        await exchange.body()
        problem = "a gateway does not push models; its operator publishes them"
        raise StatusError(Reason.UNSUPPORTED, problem)


def _identity(model: ListedModel) -> dict[str, Any]:
    return {
        "name": model.name,
        "model": model.name,
        "digest": _card(model).fingerprint,
        "details": OllamaDetails(),
        "size": _size(model),
    }


def _size(model: ListedModel) -> int:
    """Bytes of memory that the model takes; 0 if they are not known."""
    return 0 if model.hosted is None else model.hosted.num_bytes


def _expires_at(model: ListedModel) -> str:
    """When the model will be unloaded if it gets no more requests."""
    idle_ms = 0 if model.hosted is None else model.hosted.idle_ms
    # More than a thousand years means never.
    return time_of(int(time.time() + idle_ms / 1000)) if 0 < idle_ms < _MOST_IDLE_MS else _NEVER


def _card(model: ListedModel) -> ModelCard:
    """The model's card; empty if it was not loaded yet."""
    return model.card or ModelCard()


def _parameters(card: ModelCard) -> list[str]:
    """The defaults of a model's sampling, as lines of a Modelfile."""
    found = []
    for field, name in _PARAMETERS.items():
        if card.default_sampling.HasField(field):
            found.append(f"{name:<30} {shortest(getattr(card.default_sampling, field)):g}")
    return found
