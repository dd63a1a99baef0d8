"""The Messages API: messages, and the count of their tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from msgspec import UNSET

from headrace.gateway.anthropic.answers import (
    ANTHROPIC_ERRORS,
    PING,
    Message,
    MessageAnswer,
    OriginalTokens,
    Showing,
    TokenCount,
)
from headrace.gateway.anthropic.fields import COUNT_TOKENS, MESSAGES
from headrace.gateway.anthropic.types import (
    MessagesRequest,
    PromptFields,
    Reasoning,
    chat_of,
    check_messages,
    reasoning_of,
)
from headrace.gateway.chat.request import AnswerFields, Chat
from headrace.gateway.chat.sampling import ContextTooLongError
from headrace.gateway.edge.endpoint import API, EVENTS, Endpoint, Handler, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.requests import request_of
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.field_names import FieldNames
from headrace.gateway.services import Services
from headrace.protos.status import StatusError

_INTERLEAVED = "interleaved-thinking"


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST messages and messages/count_tokens."""
    own = _Messages(services)

    def posted(path: str, name: str, handler: Handler, operation: Operation) -> Endpoint:
        return Endpoint("POST", path, name, handler, operation, ANTHROPIC_ERRORS, request_id_header=b"request-id")

    message = Operation(
        "Answer in the manner of Anthropic's Messages API",
        Message,
        (MessagesRequest, AnswerFields),
        generates=True,
        stream_type=EVENTS,
    )
    count = Operation("Count the tokens of a prompt of the Messages API", TokenCount, (PromptFields,))
    return under(
        API,
        posted("/messages", "messages", own.create, message),
        posted("/messages/count_tokens", "count_tokens", own.count_tokens, count),
    )


class _Messages:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, exchange: Exchange) -> None:
        """POST messages."""
        exchange.keep_alive_event = PING
        body = await exchange.body()
        request = decode_body(body, MessagesRequest)
        given = MESSAGES.check(body)
        # Without the messages, which are most of a body.
        answer_fields = encode({name: given[name] for name in AnswerFields.__struct_fields__ if name in given})
        del body, given  # the answer may take long, and images are large
        exchange.name_request(request.request_id)
        chat_request, names, reasoning = await self._chat(exchange, request, decode_body(answer_fields, AnswerFields))
        request.messages = []  # the chat has them
        with names.in_callers_terms(), _in_providers_words():
            chat = await self._services.chats.plan(chat_request)
            first = chat.plan.requests[0]
            is_shortened = first.sampling.max_tokens < request.max_tokens
            answer = MessageAnswer(
                f"msg_{first.request_id}",
                chat.model.name,
                len(chat.plan.job.token_ids),
                chat.reading.num_id_chars,
                Showing(
                    thoughts=reasoning.is_shown,
                    thinking=request.thinking is None or request.thinking.display != "omitted",
                    anything=request.max_tokens > 0,
                    length_reason="model_context_window_exceeded" if is_shortened else "max_tokens",
                    context_management=request.context_management is not None,
                ),
            )
            answering = self._services.answering
            plans = [chat.plan]
            readers = chat.choices()
            if request.stream:
                await answering.stream(exchange, plans, answer, readers)
            else:
                usage = await answering.gather(exchange.caller, plans, [answer], readers)
                await exchange.respond(answer.whole(usage))

    async def count_tokens(self, exchange: Exchange) -> None:
        """POST messages/count_tokens."""
        request = await request_of(exchange, PromptFields, COUNT_TOKENS)
        chat_request, names, _ = await self._chat(exchange, request)
        with names.in_callers_terms(), _in_providers_words():
            count = await self._services.chats.count(chat_request)
            edited = OriginalTokens(count) if request.context_management else UNSET
            await exchange.respond(encode(TokenCount(count, edited)))

    async def _chat(
        self, exchange: Exchange, request: PromptFields, answer: AnswerFields | None = None
    ) -> tuple[Chat, FieldNames, Reasoning]:
        check_messages(request, interleaves=_INTERLEAVED in exchange.header("anthropic-beta"))
        model = await self._services.models.find(request.model or "")
        template = model.chat_template(request.chat_template)
        reasons = self._services.chats.reasons(model, template)
        reasoning = reasoning_of(request, template, reasons)
        return *chat_of(request, reasoning.effort, answer, reasons=reasons), reasoning


@contextmanager
def _in_providers_words() -> Iterator[None]:
    """Context manager: rewrite the error for a prompt that is too long in the provider's words, because clients look
    for exactly these words to shorten their prompts."""
    try:
        yield
    except ContextTooLongError as error:
        most = error.max_context_tokens - 1
        problem = f"prompt is too long: {error.num_prompt_tokens} tokens > {most} maximum"
        raise StatusError(error.reason, problem) from error
