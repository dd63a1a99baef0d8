"""KServe's protocol over HTTP. docs/reference/http-api.md has every name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from headrace.common.version import headrace_version
from headrace.gateway.checks import unsupported
from headrace.gateway.edge.endpoint import EVENTS, Endpoint, Handler, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import encode
from headrace.gateway.kserve.answering import answer_whole, find_model, plans_of
from headrace.gateway.kserve.answers import (
    KSERVE_ERRORS,
    GenerateStream,
    KserveGenerateAnswer,
    KserveInferAnswer,
    KserveModel,
    KserveReady,
    KserveServer,
    Parts,
    generated,
    model_metadata,
)
from headrace.gateway.kserve.requests import NAMES
from headrace.gateway.kserve.wire import LENGTH_HEADER, KserveGenerate, KserveInfer, answer_of, generate_of, infer_of
from headrace.gateway.services import Services
from headrace.gateway.text.models import Model
from headrace.protos.status import Reason, StatusError

_NOT_OF_MODELS = ("config", "stats")
# Models' names may have slashes, so the longer paths come first.
_MODEL_PATHS = ("/v2/models/{name:path}/versions/{version}", "/v2/models/{name:path}")


def endpoints(services: Services) -> Sequence[Endpoint]:
    """GET /v2 and the models; POST infer, generate and generate_stream."""
    own = _Inferences(services)

    def read(path: str, name: str, handler: Handler, summary: str, answer: Any, is_open: bool = False) -> Endpoint:
        operation = Operation(f"{summary}, for KServe's clients", answer)
        return Endpoint("GET", path, name, handler, operation, KSERVE_ERRORS, is_open)

    def posted(path: str, name: str, handler: Handler, summary: str, answer: Any, request: Any) -> Endpoint:
        stream_type = EVENTS if answer is None else ""
        operation = Operation(f"{summary}, for KServe's clients", answer, (request,), True, stream_type)
        return Endpoint("POST", path, name, handler, operation, KSERVE_ERRORS)

    streamed = "Stream the continuation of a text"
    return [
        read("/v2", "kserve_server", own.server, "Describe the gateway", KserveServer, is_open=True),
        *under(
            _MODEL_PATHS,
            posted("/infer", "kserve_infer", own.infer, "Continue texts in tensors", KserveInferAnswer, KserveInfer),
            posted(
                "/generate", "kserve_generate", own.generate, "Continue texts", KserveGenerateAnswer, KserveGenerate
            ),
            posted("/generate_stream", "kserve_generate", own.generate_stream, streamed, None, KserveGenerate),
            read("/ready", "kserve_models", own.ready, "Tell that a model can be asked for", KserveReady),
            read("", "kserve_models", own.model, "Describe a model", KserveModel),
        ),
    ]


class _Inferences:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def server(self, exchange: Exchange) -> None:
        """GET /v2."""
        await exchange.respond(encode(KserveServer(version=headrace_version())))

    async def ready(self, exchange: Exchange) -> None:
        """GET ready: 200, or the error that a request would get."""
        model = await self._model(exchange, loads=False)
        await exchange.respond(encode(KserveReady(model.name, True)))

    async def model(self, exchange: Exchange) -> None:
        """GET a model."""
        try:
            model = await self._model(exchange, loads=False)
        except StatusError as error:
            name, _, part = exchange.scope["path_params"]["name"].rpartition("/")
            if error.reason is not Reason.MODEL_NOT_FOUND or part not in _NOT_OF_MODELS:
                raise
            problem = (
                f"{part} of a model is Triton's own and not supported; GET /v2/models/{name[:200]} has its tensors"
            )
            raise unsupported(part, problem) from None
        await exchange.respond(encode(model_metadata(model.name)))

    async def infer(self, exchange: Exchange) -> None:
        """POST infer."""
        request = infer_of(await exchange.body(), exchange.header(LENGTH_HEADER))
        if request.inference.streams:
            raise unsupported("stream", "stream: infer answers as a whole; use generate_stream, or gRPC")
        model = await self._model(exchange)
        body, json_size = answer_of(
            model.name, request, await answer_whole(self._services, model, request.inference, exchange.caller)
        )
        if json_size is None:
            await exchange.respond(body)
        else:
            headers = [(LENGTH_HEADER.encode(), b"%d" % json_size)]
            await exchange.respond(body, content_type=b"application/octet-stream", headers=headers)

    async def generate(self, exchange: Exchange) -> None:
        """POST generate."""
        inference, request_id = generate_of(await exchange.body(), streams=False)
        if inference.streams:
            raise unsupported("stream", "stream: generate answers as a whole; use generate_stream")
        model = await self._model(exchange)
        tensors = await answer_whole(self._services, model, inference, exchange.caller)
        await exchange.respond(encode(generated(model.name, request_id, tensors)))

    async def generate_stream(self, exchange: Exchange) -> None:
        """POST generate_stream; without `stream`, the stream has one event."""
        inference, request_id = generate_of(await exchange.body(), streams=True)
        model = await self._model(exchange)
        if not inference.streams:
            value = generated(
                model.name, request_id, await answer_whole(self._services, model, inference, exchange.caller)
            )
            await exchange.write(b"data: " + encode(value) + b"\n\n", last=True)
            return
        with NAMES.in_callers_terms():
            plans = await plans_of(self._services, model, inference)
            parts = Parts(inference, len(plans[0].job.token_ids))
            stream = GenerateStream(model.name, request_id, parts)
            await self._services.answering.stream(exchange, plans, stream)

    async def _model(self, exchange: Exchange, *, loads: bool = True) -> Model:
        path = exchange.scope["path_params"]
        return await find_model(self._services, path["name"], path.get("version", ""), loads=loads)
