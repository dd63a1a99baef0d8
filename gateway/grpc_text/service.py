"""The gateway's gRPC edge: the Text service, over the same generation path as HTTP."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, TypeAlias, TypeVar

import grpc

from headrace.common.telemetry.logs import request_id_var
from headrace.common.telemetry.tracing import serving_span
from headrace.gateway.access.caller import Caller
from headrace.gateway.chat.choice import Piece
from headrace.gateway.chat.generation import Account, Plan
from headrace.gateway.checks import invalid
from headrace.gateway.edge.failures import draining, spread
from headrace.gateway.edge.grpc_edge import authorization_var
from headrace.gateway.grpc_text.values import FIELD_NAMES, Answers, chat_request, completion_request, tokenize_request
from headrace.gateway.services import Services
from headrace.gateway.telemetry.metrics import outcome_of
from headrace.gateway.text.detokenizer import detokenize
from headrace.protos.status import Reason, StatusError, abort
from headrace.protos.text_pb2 import ChatRequest as TextChatRequest
from headrace.protos.text_pb2 import (
    ChatResponse,
    CompleteRequest,
    CompleteResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    TextListModelsRequest,
    TextListModelsResponse,
    TextModel,
    TokenizeRequest,
    TokenizeResponse,
)
from headrace.protos.text_pb2_grpc import TextServicer

SERVICE_NAME = "headrace.v1.Text"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LOG = logging.getLogger(__name__)

_M = TypeVar("_M")
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class TextService(TextServicer):
    """Answers for the models. Failures are statuses with google.rpc details, as everywhere in headrace."""

    def __init__(self, services: Services) -> None:
        self._models = services.models
        self._chats = services.chats
        self._generator = services.generator
        self._metrics = services.metrics
        self.stopping = False
        """Set by the owner when the server stops: new calls are refused."""

    async def Chat(self, request: TextChatRequest, context: Context) -> AsyncIterator[ChatResponse]:
        """Stream the answers to a conversation."""
        caller = _caller(context)
        async with aclosing(self._guarded(self._chat(request, caller), "grpc_chat", caller, context)) as messages:
            async for message in messages:
                yield message

    async def Complete(self, request: CompleteRequest, context: Context) -> AsyncIterator[CompleteResponse]:
        """Stream the continuations of a text."""
        caller = _caller(context)
        messages = self._guarded(self._complete(request, caller), "grpc_complete", caller, context)
        async with aclosing(messages):
            async for message in messages:
                yield message

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        """Token ids of a text or a conversation."""

        async def tokenize() -> TokenizeResponse:
            with FIELD_NAMES.in_callers_terms():
                model, token_ids = await self._chats.tokenize(tokenize_request(request))
            return TokenizeResponse(token_ids=token_ids, max_context_tokens=model.card.max_context_tokens)

        return await self._answered(tokenize, "grpc_tokenize", context)

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        """Text of token ids, special tokens included."""

        async def text() -> DetokenizeResponse:
            model = await self._models.find(request.model)
            if request.token_ids and max(request.token_ids) >= model.card.vocab_size:
                raise invalid("token_ids", f"token_ids must be below {model.card.vocab_size}")
            return DetokenizeResponse(text=detokenize(request.token_ids, model.text.tokenizer.token_bytes))

        return await self._answered(text, "grpc_detokenize", context)

    async def ListModels(self, request: TextListModelsRequest, context: Context) -> TextListModelsResponse:
        """The available models."""

        async def models() -> TextListModelsResponse:
            listed = await self._models.listed()
            cards = [TextModel(name=one.name, max_context_tokens=one.card.max_context_tokens) for one in listed]
            return TextListModelsResponse(models=cards)

        return await self._answered(models, "grpc_models", context)

    async def _chat(self, request: TextChatRequest, caller: Caller) -> AsyncGenerator[ChatResponse, None]:
        with FIELD_NAMES.in_callers_terms():
            chat = await self._chats.plan(chat_request(request))
        token_bytes = chat.model.text.tokenizer.token_bytes
        answers = Answers(caller.request_id, request.params, token_bytes, chat.reading.num_id_chars)
        account, readers = Account([chat.plan]), chat.choices()
        async with aclosing(self._pieces([chat.plan], caller)) as pieces:
            async for index, piece in pieces:
                read = readers[index].push(piece)
                if read.ending is not None:
                    account.ended(index, read.ending)
                message = answers.chat(index, read, None if account.num_open else account.usage)
                if message is not None:
                    yield message

    async def _complete(self, request: CompleteRequest, caller: Caller) -> AsyncGenerator[CompleteResponse, None]:
        with FIELD_NAMES.in_callers_terms():
            completion = await self._chats.plan_completion(completion_request(request))
        answers = Answers(caller.request_id, request.params, completion.model.text.tokenizer.token_bytes)
        account = Account(completion.plans)
        async with aclosing(self._pieces(completion.plans, caller)) as pieces:
            async for index, piece in pieces:
                if piece.ending is not None:
                    account.ended(index, piece.ending)
                message = answers.completion(index, piece, None if account.num_open else account.usage)
                if message is not None:
                    yield message

    async def _pieces(self, plans: Sequence[Plan], caller: Caller) -> AsyncGenerator[tuple[int, Piece], None]:
        """Pieces of the answers; what upstream refuses is said in this edge's terms."""
        with FIELD_NAMES.in_callers_terms():
            async with aclosing(self._generator.stream(plans, caller)) as pieces:
                async for indexed in pieces:
                    yield indexed

    async def _answered(self, work: Callable[[], Awaitable[_M]], name: str, context: Context) -> _M:
        """The one message of a call that streams nothing."""

        async def once() -> AsyncGenerator[_M, None]:
            yield await work()

        async with aclosing(self._guarded(once(), name, _caller(context), context)) as messages:
            return await anext(messages)

    async def _guarded(
        self, answers: AsyncGenerator[_M, None], name: str, caller: Caller, context: Context
    ) -> AsyncGenerator[_M, None]:
        """The messages; a failure ends the call with its status. Counts the outcome."""
        request_id_var.set(caller.request_id)
        with self._counted(name, caller) as outcome:
            try:
                if self.stopping:
                    raise draining()
                async with aclosing(answers):
                    async for answer in answers:
                        yield answer
                outcome[0] = "ok"
            except StatusError as error:
                outcome[0] = outcome_of(error, has_deadline=caller.deadline_s is not None)
                await abort(context, spread(error))
            except Exception as error:
                outcome[0] = "internal"
                _LOG.exception("%s failed", name)
                await abort(context, StatusError(Reason.INTERNAL, f"the gateway failed: {type(error).__name__}"))

    @contextmanager
    def _counted(self, name: str, caller: Caller) -> Iterator[list[str]]:
        """Count a call under the outcome that is left in the list; calls that are cut off are cancelled."""
        outcome = ["cancelled"]
        method = name.removeprefix("grpc_").title().replace("_", "")
        span = serving_span(f"{SERVICE_NAME}/{method}", caller.traceparent)
        span.set({"rpc.system": "grpc", "headrace.request_id": caller.request_id})
        self._metrics.in_flight.inc()
        try:
            yield outcome
        finally:
            span.set({"headrace.outcome": outcome[0]})
            span.end()
            self._metrics.in_flight.dec()
            self._metrics.request_ended(name, outcome[0], time.monotonic() - caller.arrived_s)


def _caller(context: Context) -> Caller:
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    request_id = metadata.get("x-request-id", "")
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = f"req_{secrets.token_hex(16)}"
    now_s, remaining_s = time.monotonic(), context.time_remaining()
    deadline_s = None if remaining_s is None else now_s + remaining_s
    return Caller(request_id, metadata.get("traceparent", ""), now_s, authorization_var.get(), deadline_s)
