"""The gateway's gRPC edge: the Text service, over the same generation path as HTTP."""

from __future__ import annotations

import logging
import re
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, TypeAlias

import grpc
from google.protobuf.json_format import MessageToDict

from headrace.gateway.conversation import conversation_of
from headrace.gateway.detokenizer import detokenize
from headrace.gateway.failures import draining
from headrace.gateway.generation import Account, Caller, Generator, Job, Usage, plan_job
from headrace.gateway.metrics import Metrics
from headrace.gateway.models import Model, Models
from headrace.gateway.openai_types import ChatMessage, ChatRequest
from headrace.gateway.prompts import Conversation, Prompts
from headrace.gateway.sampling import Sampling, invalid
from headrace.protos.logs import request_id_var
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
    TextParams,
    TextUsage,
    TokenizeRequest,
    TokenizeResponse,
)
from headrace.protos.text_pb2_grpc import TextServicer
from headrace.protos.tracing import serving_span

SERVICE_NAME = "headrace.v1.Text"
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_LOG = logging.getLogger(__name__)

Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class TextService(TextServicer):
    """Answers for the models. Failures are statuses with google.rpc details, as everywhere in headrace."""

    def __init__(self, models: Models, prompts: Prompts, generator: Generator, metrics: Metrics) -> None:
        self._models = models
        self._prompts = prompts
        self._generator = generator
        self._metrics = metrics
        self.stopping = False
        """Set by the owner when the server stops: new calls are refused."""

    async def Chat(self, request: TextChatRequest, context: Context) -> AsyncIterator[ChatResponse]:
        """Stream the answer to a conversation."""
        caller = _caller(context)
        async with aclosing(self._guarded(self._chat(request, caller), "grpc_chat", caller, context)) as answers:
            async for text, reason, usage in answers:
                yield ChatResponse(content=text, finish_reason=reason, usage=usage, request_id=caller.request_id)

    async def Complete(self, request: CompleteRequest, context: Context) -> AsyncIterator[CompleteResponse]:
        """Stream the continuation of a text."""
        caller = _caller(context)
        answers = self._guarded(self._complete(request, caller), "grpc_complete", caller, context)
        async with aclosing(answers):
            async for text, reason, usage in answers:
                yield CompleteResponse(text=text, finish_reason=reason, usage=usage, request_id=caller.request_id)

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        """Token ids of a text or a conversation."""
        try:
            if request.HasField("text") == bool(request.messages):
                raise invalid("text", "give either text or messages")
            model = await self._models.find(request.model)
            if request.HasField("text"):
                token_ids = await self._prompts.of_text(model, request.text)
            else:
                prompt = await self._prompts.of_conversation(model, _conversation(request, model))
                token_ids = list(prompt.token_ids)
            return TokenizeResponse(token_ids=token_ids, max_context_tokens=model.card.max_context_tokens)
        except StatusError as error:
            await abort(context, error)

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        """Text of token ids, special tokens included."""
        try:
            model = await self._models.find(request.model)
            if request.token_ids and max(request.token_ids) >= model.card.vocab_size:
                raise invalid("token_ids", f"token_ids must be below {model.card.vocab_size}")
            return DetokenizeResponse(text=detokenize(request.token_ids, model.text.tokenizer.token_bytes))
        except StatusError as error:
            await abort(context, error)

    async def ListModels(self, request: TextListModelsRequest, context: Context) -> TextListModelsResponse:
        """The models that can be asked for."""
        try:
            models = await self._models.listed()
        except StatusError as error:
            await abort(context, error)
        cards = [TextModel(name=model.name, max_context_tokens=model.card.max_context_tokens) for model in models]
        return TextListModelsResponse(models=cards)

    async def _chat(self, request: TextChatRequest, caller: Caller) -> AsyncGenerator[_Answer, None]:
        model = await self._models.find(request.model)
        token_ids = (await self._prompts.of_conversation(model, _conversation(request, model))).token_ids
        async with aclosing(self._answers(Job(model, token_ids, _sampling(request.params)), caller)) as answers:
            async for answer in answers:
                yield answer

    async def _complete(self, request: CompleteRequest, caller: Caller) -> AsyncGenerator[_Answer, None]:
        model = await self._models.find(request.model)
        kind = request.WhichOneof("prompt")
        if kind is None:
            raise invalid("text", "give either text or token_ids")
        token_ids = await self._prompts.of_text(model, request.text) if kind == "text" else list(request.token_ids.ids)
        async with aclosing(self._answers(Job(model, token_ids, _sampling(request.params)), caller)) as answers:
            async for answer in answers:
                yield answer

    async def _answers(self, job: Job, caller: Caller) -> AsyncGenerator[_Answer, None]:
        plans = [plan_job(job)]
        account = Account(plans)
        async with aclosing(self._generator.stream(plans, caller)) as pieces:
            async for index, piece in pieces:
                if piece.ending is not None:
                    account.ended(index, piece.ending)
                    yield piece.text, piece.ending.reason, _usage(account.usage)
                elif piece.text:
                    yield piece.text, None, None

    async def _guarded(
        self, answers: AsyncGenerator[_Answer, None], name: str, caller: Caller, context: Context
    ) -> AsyncGenerator[_Answer, None]:
        """The answers; a failure ends the call with its status. Counts the outcome."""
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
                outcome[0] = error.reason.name.lower()
                await abort(context, error)
            except Exception as error:
                outcome[0] = "internal"
                _LOG.exception("%s failed", name)
                await abort(context, StatusError(Reason.INTERNAL, f"the gateway failed: {type(error).__name__}"))

    @contextmanager
    def _counted(self, name: str, caller: Caller) -> Iterator[list[str]]:
        """Count a call under the outcome that is left in the list; calls that are cut off are cancelled."""
        outcome = ["cancelled"]
        span = serving_span(f"{SERVICE_NAME}/{name.removeprefix('grpc_').title()}", caller.traceparent)
        span.set({"rpc.system": "grpc", "headrace.request_id": caller.request_id})
        self._metrics.in_flight.inc()
        try:
            yield outcome
        finally:
            span.set({"headrace.outcome": outcome[0]})
            span.end()
            self._metrics.in_flight.dec()
            self._metrics.request_ended(name, outcome[0], time.monotonic() - caller.arrived_s)


# text, finish reason and usage; the last two on the last one only
_Answer = tuple[str, str | None, TextUsage | None]


def _caller(context: Context) -> Caller:
    metadata = {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    request_id = metadata.get("x-request-id", "")
    if not _REQUEST_ID.fullmatch(request_id):
        request_id = f"req_{secrets.token_hex(16)}"
    return Caller(request_id, metadata.get("traceparent", ""), time.monotonic())


def _conversation(request: TextChatRequest | TokenizeRequest, model: Model) -> Conversation:
    messages = [ChatMessage(role=m.role, content=m.content, name=m.name or None) for m in request.messages]
    variables: dict[str, Any] = {}
    if isinstance(request, TextChatRequest) and request.HasField("chat_template_kwargs"):
        variables = MessageToDict(request.chat_template_kwargs)
    return conversation_of(ChatRequest(messages=messages, chat_template_kwargs=variables), model.chat_template())


def _sampling(params: TextParams) -> Sampling:
    def given(name: str) -> Any:
        return getattr(params, name) if params.HasField(name) else None

    return Sampling(
        temperature=given("temperature"),
        top_p=given("top_p"),
        top_k=given("top_k"),
        min_p=given("min_p"),
        seed=given("seed"),
        presence_penalty=given("presence_penalty"),
        frequency_penalty=given("frequency_penalty"),
        repetition_penalty=given("repetition_penalty"),
        logit_bias=dict(params.logit_bias),
        max_tokens=given("max_tokens"),
        min_tokens=given("min_tokens"),
        ignore_eos=params.ignore_eos,
        stop=tuple(params.stop),
        stop_token_ids=tuple(params.stop_token_ids),
    )


def _usage(usage: Usage) -> TextUsage:
    return TextUsage(
        prompt_tokens=usage.num_prompt_tokens,
        completion_tokens=usage.num_generated_tokens,
        cached_tokens=usage.num_cached_tokens,
    )
