"""The models in Ollama's format, and refusals of calls that are left to the operator."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from headrace.gateway.chat.sampling import shortest
from headrace.gateway.edge.endpoint import Endpoint, Handler, Operation
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.ollama.answers import (
    NDJSON,
    OLLAMA_ERRORS,
    OllamaDetails,
    OllamaList,
    OllamaListed,
    OllamaRunning,
    OllamaRunningList,
    OllamaShown,
    OllamaStatus,
    OllamaVersion,
    line,
    time_of,
)
from headrace.gateway.ollama.fields import PULL, SHOW
from headrace.gateway.ollama.names import find
from headrace.gateway.ollama.types import OllamaPull, OllamaShow
from headrace.gateway.services import Services
from headrace.gateway.text.listing import ListedModel
from headrace.gateway.text.models import Model
from headrace.protos.inference_pb2 import TASK_EMBED
from headrace.protos.status import Reason, StatusError
from headrace.protos.worker_pb2 import ModelCard

API_VERSION = "0.13.4"
"""The version of Ollama whose API is served. Clients compare it with the minimum that they need."""
_NEVER = "9999-12-31T23:59:59Z"
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
# What only an operator does -> its method.
_MANAGED = {"create": "POST", "copy": "POST", "push": "POST", "delete": "DELETE"}


def endpoints(services: Services) -> Sequence[Endpoint]:
    """GET /api/tags, /api/ps and /api/version; POST /api/show and /api/pull; and refusals of the rest."""
    own = _Models(services)

    def reading(
        method: str, path: str, name: str, handler: Handler, operation: Operation, is_open: bool = False
    ) -> Endpoint:
        return Endpoint(method, path, name, handler, operation, OLLAMA_ERRORS, is_open=is_open, makes_work=False)

    tags = Operation("List the models", OllamaList)
    running = Operation("List the models, as those that run", OllamaRunningList)
    version = Operation("The version of Ollama's API", OllamaVersion)
    show = Operation("Describe a model", OllamaShown, (OllamaShow,))
    served = "Tell whether a model is served, as a pull that has ended"
    pull = Operation(served, OllamaStatus, (OllamaPull,), stream_type=NDJSON.decode())
    refused = Operation("Refused: a model's operator manages it", is_refused=True)
    return [
        reading("GET", "/api/tags", "ollama_models", own.tags, tags),
        reading("GET", "/api/ps", "ollama_models", own.running, running),
        reading("GET", "/api/version", "ollama_version", own.version, version, is_open=True),
        reading("POST", "/api/show", "ollama_models", own.show, show),
        reading("POST", "/api/pull", "ollama_pull", own.pull, pull),
        *(
            reading(method, f"/api/{verb}", "ollama_manage", _refusing(verb), refused)
            for verb, method in _MANAGED.items()
        ),
    ]


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
        body = await exchange.body()
        request = decode_body(body, OllamaShow)
        SHOW.check(body)
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
        found = ["completion"]
        if model.text.template is not None:
            found += ["vision"] * (model.images is not None)
            found += ["tools"] * chats.calls_tools(model) + ["thinking"] * chats.reasons(model)
        return found

    async def pull(self, exchange: Exchange) -> None:
        """Report success if the model is served. Clients cannot pull other models."""
        body = await exchange.body()
        request = decode_body(body, OllamaPull)
        PULL.check(body)
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


def _refusing(verb: str) -> Handler:
    async def refuse(exchange: Exchange) -> None:
        await exchange.body()
        problem = f"a gateway does not {verb} models; its operator does (headrace pull, headrace serve)"
        raise StatusError(Reason.UNSUPPORTED, problem)

    return refuse


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
