"""KServe's protocol over gRPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing

from msgspec import to_builtins

from headrace.common.version import headrace_version
from headrace.gateway.access.caller import Caller
from headrace.gateway.checks import unsupported
from headrace.gateway.edge.failures import spread
from headrace.gateway.edge.grpc_call import Context, GrpcCalls, caller_of
from headrace.gateway.edge.grpc_edge import admission_var
from headrace.gateway.kserve.answering import answer_whole, find_model, plans_of
from headrace.gateway.kserve.answers import EXTENSIONS, Parts, model_metadata
from headrace.gateway.kserve.messages import inference_of_message, response_of, wants_final
from headrace.gateway.kserve.requests import NAMES, Inference
from headrace.gateway.kserve.tensors import Tensor
from headrace.gateway.services import Services
from headrace.gateway.text.models import Model
from headrace.protos.kserve_pb2 import (
    ModelInferRequest,
    ModelInferResponse,
    ModelMetadataRequest,
    ModelMetadataResponse,
    ModelReadyRequest,
    ModelReadyResponse,
    ModelStreamInferResponse,
    ServerLiveRequest,
    ServerLiveResponse,
    ServerMetadataRequest,
    ServerMetadataResponse,
    ServerReadyRequest,
    ServerReadyResponse,
)
from headrace.protos.kserve_pb2_grpc import GRPCInferenceServiceServicer
from headrace.protos.status import StatusError

SERVICE_NAME = "inference.GRPCInferenceService"
MAX_STREAM_REQUESTS = 256
"""Requests of one stream that are answered at a time; the next one is read when one of them has ended."""
_QUEUED_RESPONSES = 16


class KserveService(GRPCInferenceServiceServicer):
    """Answers for the models."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self.calls = GrpcCalls(SERVICE_NAME, services.metrics)

    async def ServerLive(self, request: ServerLiveRequest, context: Context) -> ServerLiveResponse:
        """The gateway runs."""
        return ServerLiveResponse(live=True)

    async def ServerReady(self, request: ServerReadyRequest, context: Context) -> ServerReadyResponse:
        """Whether a model is ready."""
        return ServerReadyResponse(ready=self._services.models.ready)

    async def ServerMetadata(self, request: ServerMetadataRequest, context: Context) -> ServerMetadataResponse:
        """Metadata of the server."""
        version = headrace_version()
        return ServerMetadataResponse(name="headrace", version=version, extensions=EXTENSIONS)

    async def ModelReady(self, request: ModelReadyRequest, context: Context) -> ModelReadyResponse:
        """Whether the model is ready."""
        try:
            await find_model(self._services, request.name, request.version, loads=False)
        except StatusError:
            return ModelReadyResponse(ready=False)
        return ModelReadyResponse(ready=True)

    async def ModelMetadata(self, request: ModelMetadataRequest, context: Context) -> ModelMetadataResponse:
        """The tensors of a model."""

        async def metadata() -> ModelMetadataResponse:
            return ModelMetadataResponse(
                **to_builtins(
                    model_metadata((await find_model(self._services, request.name, request.version, loads=False)).name)
                )
            )

        return await self.calls.answered(metadata, "grpc_kserve_models", "ModelMetadata", context)

    async def ModelInfer(self, request: ModelInferRequest, context: Context) -> ModelInferResponse:
        """Continue texts."""

        async def infer() -> ModelInferResponse:
            inference = inference_of_message(request)
            if inference.streams:
                raise unsupported("stream", "stream: ModelInfer answers as a whole; use ModelStreamInfer")
            model = await find_model(self._services, request.model_name, request.model_version)
            tensors = await answer_whole(self._services, model, inference, caller_of(context))
            return response_of(model.name, request.id, tensors)

        return await self.calls.answered(infer, "grpc_kserve_infer", "ModelInfer", context)

    async def ModelStreamInfer(
        self, request_iterator: AsyncIterator[ModelInferRequest], context: Context
    ) -> AsyncIterator[ModelStreamInferResponse]:
        """Continue texts of several requests at a time. A request that fails does not end the others."""
        queue: asyncio.Queue[ModelStreamInferResponse | None] = asyncio.Queue(_QUEUED_RESPONSES)
        running: set[asyncio.Task[None]] = set()

        async def read() -> None:
            try:
                async for request in request_iterator:
                    if len(running) >= MAX_STREAM_REQUESTS:
                        await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                    task = asyncio.create_task(self._follow(request, context, queue))
                    running.add(task)
                    task.add_done_callback(running.discard)
                while running:
                    await asyncio.wait(running)
            finally:
                await queue.put(None)

        reader = asyncio.create_task(read())
        try:
            while (response := await queue.get()) is not None:
                yield response
        finally:
            tasks = [reader, *running]
            for task in tasks:
                task.cancel()
            while not queue.empty():
                queue.get_nowait()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(
        self, request: ModelInferRequest, context: Context, queue: asyncio.Queue[ModelStreamInferResponse | None]
    ) -> None:
        """Answer one request of a stream."""
        try:
            async with admission_var.get()():
                caller = caller_of(context)
                answers = self._streamed(request, caller)
                name = "grpc_kserve_stream"
                async with aclosing(self.calls.counted(answers, name, "ModelStreamInfer", caller)) as responses:
                    async for response in responses:
                        await queue.put(ModelStreamInferResponse(infer_response=response))
        except StatusError as error:
            failed = ModelInferResponse(model_name=request.model_name, id=request.id)
            await queue.put(ModelStreamInferResponse(error_message=spread(error).message, infer_response=failed))

    async def _streamed(self, request: ModelInferRequest, caller: Caller) -> AsyncGenerator[ModelInferResponse, None]:
        inference = inference_of_message(request)
        model = await find_model(self._services, request.model_name, request.model_version)
        has_final = wants_final(request)
        told = False if has_final else None
        if inference.streams:
            async with aclosing(self._parts(model, inference, caller)) as parts:
                async for tensors in parts:
                    yield response_of(model.name, request.id, tensors, told)
        else:
            yield response_of(
                model.name, request.id, await answer_whole(self._services, model, inference, caller), told
            )
        if has_final:
            yield response_of(model.name, request.id, (), final=True)

    async def _parts(self, model: Model, inference: Inference, caller: Caller) -> AsyncGenerator[list[Tensor], None]:
        with NAMES.in_callers_terms():
            plans = await plans_of(self._services, model, inference)
            parts = Parts(inference, len(plans[0].job.token_ids))
            async with aclosing(self._services.generator.stream(plans, caller)) as pieces:
                async for _, piece in pieces:
                    if tensors := parts.push(piece):
                        yield tensors
