"""The worker's gRPC services: Inference, over the mailbox, and Worker, over the watch hub and the model card."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health

from headrace.common.transport.introspection import set_serving
from headrace.common.transport.session_server import SessionServer, handler_of
from headrace.common.transport.sessions import CallContext
from headrace.protos import inference_pb2, inference_pb2_grpc, worker_pb2
from headrace.protos.status import Reason, StatusError, abort
from headrace.worker.adapters.library import Adapter
from headrace.worker.engine.mailbox import Mailbox, OutputStream
from headrace.worker.grammar.compiler import Grammars, Vocabulary, VocabularyError
from headrace.worker.request.images import PlacedImage
from headrace.worker.request.request import Request
from headrace.worker.request.stop_texts import StopTexts
from headrace.worker.server.adapters import AdapterDesk
from headrace.worker.server.admission import DecodedRequest, ModelLimits, admit, decode
from headrace.worker.server.blocks import BlockCalls, BlockServicer
from headrace.worker.server.images import ImageDesk
from headrace.worker.server.observer import RequestObserver
from headrace.worker.server.responses import finished_already, responses_of
from headrace.worker.server.watch import WatchHub

log = logging.getLogger(__name__)

INFERENCE = "headrace.v1.Inference"
SERVICE_NAMES = (INFERENCE, "headrace.v1.Worker")
CHUNK_BYTES = 1 << 20
DEFAULT_HEARTBEAT_S = 0.5
MIN_HEARTBEAT_S = 0.05
DRAINING_RETRY_S = 1.0
STUCK_RETRY_S = 5.0

if TYPE_CHECKING:
    Context = grpc.aio.ServicerContext[Any, Any]


class InferenceService(inference_pb2_grpc.InferenceServicer):
    """Generate: one stream for each request, from admission to its finish or error status."""

    def __init__(
        self,
        mailbox: Mailbox,
        hub: WatchHub,
        limits: ModelLimits,
        grammars: Grammars,
        vocabulary: Callable[[], Vocabulary],
        observer: RequestObserver | None = None,
        adapters: AdapterDesk | None = None,
        images: ImageDesk | None = None,
    ) -> None:
        """`vocabulary` is called in threads, and may raise VocabularyError."""
        self._vocabulary = vocabulary
        self._images = images or ImageDesk(limits.model, None)
        self._adapters = adapters or AdapterDesk(None, limits.model)
        self.sessions = SessionServer(handler_of(self._generate, decode))
        self._observer = observer or RequestObserver()
        self._mailbox = mailbox
        self._grammars = grammars
        self._hub = hub
        self._limits = limits
        self._unnamed = itertools.count()

    async def Generate(
        self, request: inference_pb2.GenerateRequest, context: Context | CallContext
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        """See the proto."""
        async with contextlib.aclosing(self._generate(DecodedRequest.of(request), context)) as responses:
            async for response in responses:
                yield response

    async def _generate(
        self, decoded: DecodedRequest, context: Context | CallContext
    ) -> AsyncGenerator[inference_pb2.GenerateResponse, None]:
        request = decoded.message
        span = self._observer.arrived(request, context.invocation_metadata())
        try:
            adapter = self._adapters.find(request.adapter)
            adapter_sha256 = "" if adapter is None else adapter.sha256
            self._refuse_now(decoded)
            images = await self._place(decoded)
            admitted = self._admit(decoded, images, context.time_remaining(), adapter_sha256)
            ended = finished_already(admitted)
            if ended is not None:
                span.end()
                yield ended
                return
            if span.is_recording:
                admitted.steps = []
            stream = await self._hand_over(admitted, decoded, adapter)
        except StatusError as error:
            self._observer.refused(span, error)
            await abort(context, error)
        except BaseException as error:
            self._observer.broken_off(span, error)
            raise
        failure: StatusError | None = None
        try:
            async for response in responses_of(stream):
                yield response
        except StatusError as error:
            failure = error
            await abort(context, error)
        finally:
            stream.close()
            self._adapters.let_go(adapter, admitted)
            if failure is not None and not admitted.scheduled_s:  # refused by the engine thread
                self._observer.refused(span, failure)
            else:
                self._observer.ended(span, admitted, failure, is_whole=stream.has_ended)

    async def Session(self, request_iterator: AsyncIterator[inference_pb2.SessionRequest], context: Context) -> None:
        """See the proto."""
        await self.sessions.serve(request_iterator, context)

    async def _hand_over(self, admitted: Request, decoded: DecodedRequest, adapter: Adapter | None) -> OutputStream:
        """Make a request ready and hand it to the engine. It counts as open from the beginning, and a drain waits for
        it. What was admitted before the drain is answered."""
        with self._mailbox.expecting(admitted), self._hub.expecting(admitted.num_tokens, decoded.message.belief):
            await self._constrain(admitted, decoded)
            await self._find_texts(admitted)
            await self._adapters.hold(adapter, admitted)
            try:
                return self._mailbox.submit(admitted)
            except StatusError:
                self._adapters.let_go(adapter, admitted, was_submitted=False)
                raise

    def _refuse_now(self, decoded: DecodedRequest) -> None:
        """StatusError if no request is accepted at present."""
        if self._hub.draining:
            raise StatusError(
                Reason.DRAINING, "the worker is draining and accepts no new requests", retry_after_s=DRAINING_RETRY_S
            )
        if self._hub.silent_because is not None:
            raise StatusError(
                Reason.NO_CAPACITY,
                f"the worker accepts no requests: {self._hub.silent_because}; try again later, or another worker",
                retry_after_s=STUCK_RETRY_S,
            )
        contradiction = self._hub.contradiction(decoded.message.belief)
        if contradiction is not None:
            raise contradiction

    async def _place(self, decoded: DecodedRequest) -> Sequence[PlacedImage]:
        """The images of a request, if it has any, at their places in the prompt."""
        if not decoded.images:
            return ()
        self._images.check_bound(decoded.message.image_view_pixels)
        # Hashing megabytes would delay the streams of others.
        return await asyncio.to_thread(decoded.placed, self._images.place)

    def _admit(
        self,
        decoded: DecodedRequest,
        images: Sequence[PlacedImage],
        deadline_s: float | None,
        adapter_sha256: str,
    ) -> Request:
        request_id = decoded.message.request_id or f"unnamed-{next(self._unnamed)}"
        admitted = admit(
            decoded,
            self._limits,
            request_id=request_id,
            arrival_s=time.monotonic(),
            adapter_sha256=adapter_sha256,
            images=images,
        )
        if deadline_s is not None:
            admitted.deadline_s = admitted.arrival_s + deadline_s
        return admitted

    async def _constrain(self, request: Request, decoded: DecodedRequest) -> None:
        """Compile the request's constraint, if it has one, before it is queued."""
        source, message = request.constraint_source, decoded.message.sampling
        if source is None:
            return
        ends = message.stop_token_ids if message.ignore_eos else request.sampling.stop_token_ids
        begun_s = time.monotonic()
        constraint = await self._grammars.constrain(
            source,
            end_token_ids=ends,
            generated=request.resume_token_ids,
            tenant=decoded.message.tenant,
            priority=request.priority,
        )
        request.preparing_s += time.monotonic() - begun_s
        request.sampling = replace(request.sampling, constraint=constraint)

    async def _find_texts(self, request: Request) -> None:
        """If the request is a beam search that ends at texts, give it the texts of the vocabulary's tokens."""
        params = request.sampling.beam_search
        if params is None or not params.stop:
            return
        begun_s = time.monotonic()
        try:
            token_bytes, special_ids = await asyncio.to_thread(self._vocabulary)
        except VocabularyError as error:
            problem = f"the model's beams cannot end at texts: {error}; use stop_token_ids"
            raise StatusError(Reason.UNSUPPORTED, problem, field="sampling.beam_search.stop") from error
        hidden_ids = frozenset[int]() if params.shows_special_tokens else special_ids - params.shown_token_ids
        assert request.beams is not None
        request.beams.end_at(StopTexts(params.stop, token_bytes, hidden_ids))
        request.preparing_s += time.monotonic() - begun_s


class WorkerService(BlockServicer):
    """The Worker service, for routers and operators: model card, tokenizer, reports, draining, adapters and exchanged
    blocks."""

    def __init__(
        self,
        card: worker_pb2.GetModelCardResponse,
        tokenizer_bundle: bytes,
        mailbox: Mailbox,
        hub: WatchHub,
        adapters: AdapterDesk | None = None,
        blocks: BlockCalls | None = None,
        health: health.aio.HealthServicer | None = None,
    ) -> None:
        """With `health`, draining changes whether requests are accepted there."""
        super().__init__(blocks or BlockCalls(None, hub))
        self._card = card
        self._adapters = adapters or AdapterDesk(None, card.card.name)
        self._bundle = tokenizer_bundle
        self._mailbox = mailbox
        self._hub = hub
        self._undone = asyncio.Event()
        self._health = health

    async def GetModelCard(
        self, request: worker_pb2.GetModelCardRequest, context: Context
    ) -> worker_pb2.GetModelCardResponse:
        """See the proto."""
        answer = worker_pb2.GetModelCardResponse()
        answer.CopyFrom(self._card)
        answer.adapters.CopyFrom(self._adapters.list())
        return answer

    async def LoadAdapter(
        self, request: worker_pb2.LoadAdapterRequest, context: Context
    ) -> worker_pb2.LoadAdapterResponse:
        """See the proto."""
        try:
            return await self._adapters.load(request)
        except StatusError as error:
            await abort(context, error)

    async def UnloadAdapter(
        self, request: worker_pb2.UnloadAdapterRequest, context: Context
    ) -> worker_pb2.UnloadAdapterResponse:
        """See the proto."""
        try:
            self._adapters.unload(request.name)
        except StatusError as error:
            await abort(context, error)
        return worker_pb2.UnloadAdapterResponse()

    async def GetTokenizer(
        self, request: worker_pb2.GetTokenizerRequest, context: Context
    ) -> AsyncIterator[worker_pb2.GetTokenizerResponse]:
        """See the proto."""
        if request.sha256 != self._card.card.tokenizer_sha256:
            message = f"no tokenizer bundle {request.sha256[:64]!r} here"
            await abort(context, StatusError(Reason.NOT_FOUND, message, field="sha256"))
        for start in range(0, len(self._bundle), CHUNK_BYTES):
            yield worker_pb2.GetTokenizerResponse(chunk=self._bundle[start : start + CHUNK_BYTES])

    async def Watch(
        self, request: worker_pb2.WatchRequest, context: Context
    ) -> AsyncIterator[worker_pb2.WatchResponse]:
        """See the proto."""
        heartbeat_s = request.heartbeat_ms / 1000 or DEFAULT_HEARTBEAT_S
        if heartbeat_s < MIN_HEARTBEAT_S:
            message = f"heartbeat_ms must be 0 or at least {MIN_HEARTBEAT_S * 1000:.0f}, not {request.heartbeat_ms}"
            await abort(context, StatusError(Reason.INVALID_FIELD, message, field="heartbeat_ms"))
        async for response in self._hub.watch(heartbeat_s, request.min_interval_ms / 1000, request.watcher_id):
            yield response

    async def AdjustWatch(
        self, request: worker_pb2.AdjustWatchRequest, context: Context
    ) -> worker_pb2.AdjustWatchResponse:
        """See the proto."""
        if not request.watcher_id:
            message = "watcher_id must be that of a watch, not 0"
            await abort(context, StatusError(Reason.INVALID_FIELD, message, field="watcher_id"))
        if not self._hub.adjust(request.watcher_id, request.min_interval_ms / 1000):
            message = f"there is no watch with id {request.watcher_id}"
            await abort(context, StatusError(Reason.NOT_FOUND, message, field="watcher_id"))
        return worker_pb2.AdjustWatchResponse()

    async def Drain(self, request: worker_pb2.DrainRequest, context: Context) -> worker_pb2.DrainResponse:
        """See the proto."""
        if request.undo:
            if self._hub.is_stopping:
                await abort(context, StatusError(Reason.DRAINING, "the worker is stopping; start it again instead"))
            self._hub.drain(False)
            self.blocks.reset()
            self._undone.set()
            await self._tell_health(True)
            log.info("accepting requests again")
            return worker_pb2.DrainResponse(num_running=self._mailbox.num_open)
        self._hub.drain()
        self._undone.clear()
        await self._tell_health(False)
        log.info("draining: %d requests are still running", self._mailbox.num_open)
        remaining_s = context.time_remaining()
        # Answer before the deadline. At the deadline the answer would be lost.
        await self._drained(None if remaining_s is None else max(remaining_s - 0.1, 0.0))
        return worker_pb2.DrainResponse(num_running=self._mailbox.num_open)

    async def _drained(self, timeout_s: float | None) -> None:
        """Wait until no request is left and the blocks are handed over, the drain is undone, or the time is over."""

        async def all_ended() -> None:
            await asyncio.gather(self._mailbox.wait_until_empty(None), self.blocks.wait(timeout_s))

        ends = [asyncio.create_task(all_ended()), asyncio.create_task(self._undone.wait())]
        try:
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()

    async def _tell_health(self, takes_requests: bool) -> None:
        if self._health is not None:
            await set_serving(self._health, [INFERENCE], takes_requests and self._hub.silent_because is None)
