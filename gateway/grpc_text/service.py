"""The gateway's gRPC edge: the Text service, over the same generation path as HTTP."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from headrace.gateway.access.caller import Caller
from headrace.gateway.chat.choice import Piece
from headrace.gateway.chat.generation import Account, Plan
from headrace.gateway.checks import invalid
from headrace.gateway.edge.grpc_call import Context, GrpcCalls, caller_of
from headrace.gateway.encoding.planning import EncodingPlan, PairsToScore
from headrace.gateway.encoding.vectors import check_dimensions, floats_of, shortened
from headrace.gateway.grpc_text.encoding import (
    check_response_size,
    embed_response,
    pairs_of_texts,
    pairs_to_score,
    rerank_response,
    score_response,
    texts_to_embed,
)
from headrace.gateway.grpc_text.values import FIELD_NAMES, Answers, chat_request, completion_request, tokenize_request
from headrace.gateway.services import Services
from headrace.gateway.text.detokenizer import detokenize
from headrace.gateway.text.models import ListedModel
from headrace.protos.text_pb2 import ChatRequest as TextChatRequest
from headrace.protos.text_pb2 import (
    ChatResponse,
    CompleteRequest,
    CompleteResponse,
    DetokenizeRequest,
    DetokenizeResponse,
    EmbedRequest,
    EmbedResponse,
    RerankRequest,
    RerankResponse,
    ScoreRequest,
    ScoreResponse,
    TextListModelsRequest,
    TextListModelsResponse,
    TextModel,
    TokenizeRequest,
    TokenizeResponse,
)
from headrace.protos.text_pb2_grpc import TextServicer

SERVICE_NAME = "headrace.v1.Text"


class TextService(TextServicer):
    """Answers for the models. Failures are statuses with google.rpc details, as everywhere in headrace."""

    def __init__(self, services: Services) -> None:
        self._models = services.models
        self._chats = services.chats
        self._generator = services.generator
        self._encodings = services.encodings
        self._encoding_runner = services.encoding_runner
        self.calls = GrpcCalls(SERVICE_NAME, services.metrics)

    async def Chat(self, request: TextChatRequest, context: Context) -> AsyncIterator[ChatResponse]:
        """Stream the answers to a conversation."""
        caller = caller_of(context)
        answers = self._chat(request, caller)
        async with aclosing(self.calls.streamed(answers, "grpc_chat", "Chat", caller, context)) as messages:
            async for message in messages:
                yield message

    async def Complete(self, request: CompleteRequest, context: Context) -> AsyncIterator[CompleteResponse]:
        """Stream the continuations of a text."""
        caller = caller_of(context)
        answers = self._complete(request, caller)
        async with aclosing(self.calls.streamed(answers, "grpc_complete", "Complete", caller, context)) as messages:
            async for message in messages:
                yield message

    async def Tokenize(self, request: TokenizeRequest, context: Context) -> TokenizeResponse:
        """Token ids of a text or a conversation."""

        async def tokenize() -> TokenizeResponse:
            with FIELD_NAMES.in_callers_terms():
                found = await self._chats.tokenize(tokenize_request(request))
            return TokenizeResponse(token_ids=found.shown, max_context_tokens=found.model.card.max_context_tokens)

        return await self.calls.answered(tokenize, "grpc_tokenize", "Tokenize", context)

    async def Detokenize(self, request: DetokenizeRequest, context: Context) -> DetokenizeResponse:
        """Text of token ids, special tokens included."""

        async def text() -> DetokenizeResponse:
            model = await self._models.find(request.model)
            if request.token_ids and max(request.token_ids) >= model.card.vocab_size:
                raise invalid("token_ids", f"token_ids must be below {model.card.vocab_size}")
            return DetokenizeResponse(text=detokenize(request.token_ids, model.text.tokenizer.token_bytes))

        return await self.calls.answered(text, "grpc_detokenize", "Detokenize", context)

    async def Embed(self, request: EmbedRequest, context: Context) -> EmbedResponse:
        """Vectors of texts."""
        caller = caller_of(context)

        async def vectors() -> EmbedResponse:
            plan = await self._encodings.plan(texts_to_embed(request))
            dimensions = request.dimensions if request.HasField("dimensions") else None
            check_dimensions(dimensions, plan.model.card.dimensions)
            check_response_size(len(plan.prompts), dimensions or plan.model.card.dimensions)
            found = await self._encoding_runner.run(plan, caller)
            return embed_response([shortened(vector, dimensions) for vector in found], plan, caller.request_id)

        return await self.calls.answered(vectors, "grpc_embed", "Embed", context)

    async def Rerank(self, request: RerankRequest, context: Context) -> RerankResponse:
        """Documents by their relevance to a query."""
        caller = caller_of(context)

        async def order() -> RerankResponse:
            plan, scores = await self._scored(pairs_to_score(request), caller)
            return rerank_response(request, scores, plan, caller.request_id)

        return await self.calls.answered(order, "grpc_rerank", "Rerank", context)

    async def Score(self, request: ScoreRequest, context: Context) -> ScoreResponse:
        """Scores of pairs of texts."""
        caller = caller_of(context)

        async def scores() -> ScoreResponse:
            plan, found = await self._scored(pairs_of_texts(request), caller)
            return score_response(found, plan, caller.request_id)

        return await self.calls.answered(scores, "grpc_score", "Score", context)

    async def ListModels(self, request: TextListModelsRequest, context: Context) -> TextListModelsResponse:
        """The available models."""

        async def models() -> TextListModelsResponse:
            listed = await self._models.overview()
            found = [
                TextModel(name=one.name, max_context_tokens=_context_of(one), max_images=_max_images_of(one))
                for one in listed
            ]
            return TextListModelsResponse(models=found)

        return await self.calls.answered(models, "grpc_models", "ListModels", context)

    async def _scored(self, pairs: PairsToScore, caller: Caller) -> tuple[EncodingPlan, list[float]]:
        plan = await self._encodings.plan_pairs(pairs)
        return plan, [floats_of(vector)[0] for vector in await self._encoding_runner.run(plan, caller)]

    async def _chat(self, request: TextChatRequest, caller: Caller) -> AsyncGenerator[ChatResponse, None]:
        with FIELD_NAMES.in_callers_terms():
            chat = await self._chats.plan(chat_request(request))
        token_bytes = chat.model.text.tokenizer.token_bytes
        answers = Answers(caller.request_id, request.params, token_bytes, chat.reading.num_id_chars)
        account = Account([chat.plan])
        readers = chat.choices()
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
        """Pieces of the answers. Errors from upstream get this service's field names."""
        with FIELD_NAMES.in_callers_terms():
            async with aclosing(self._generator.stream(plans, caller)) as pieces:
                async for indexed in pieces:
                    yield indexed


def _context_of(model: ListedModel) -> int:
    """Maximum length of prompt and answer; 0 while it is not known."""
    return 0 if model.card is None else model.card.max_context_tokens


def _max_images_of(model: ListedModel) -> int:
    return 0 if model.card is None else model.card.images.max_images
