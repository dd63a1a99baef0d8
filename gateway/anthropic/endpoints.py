"""The Messages API: messages, and the count of their tokens."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.anthropic.answers import ANTHROPIC_ERRORS, PING, MessageAnswer
from headrace.gateway.anthropic.types import FIELDS, MessagesRequest, PromptFields, chat_of, check_messages, effort_of
from headrace.gateway.chat.request import AnswerFields, Chat
from headrace.gateway.edge.endpoint import Endpoint, Handler, at_api
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import decode_body, encode
from headrace.gateway.field_names import FieldNames
from headrace.gateway.services import Services


def endpoints(services: Services) -> Sequence[Endpoint]:
    """POST messages and messages/count_tokens."""
    own = _Messages(services)
    return [
        *_at_api("/messages", "messages", own.create),
        *_at_api("/messages/count_tokens", "count_tokens", own.count_tokens),
    ]


def _at_api(path: str, name: str, handler: Handler) -> Sequence[Endpoint]:
    return at_api("POST", path, name, handler, ANTHROPIC_ERRORS, request_id_header=b"request-id")


class _Messages:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def create(self, exchange: Exchange) -> None:
        """POST messages."""
        exchange.keep_alive_event = PING
        body = await exchange.body()
        request = decode_body(body, MessagesRequest)
        FIELDS.check(body)
        exchange.name_request(request.request_id)
        chat_request, names = await self._chat(request, decode_body(body, AnswerFields))
        with names.in_callers_terms():
            chat = await self._services.chats.plan(chat_request)
            first = chat.plan.requests[0]
            answer = MessageAnswer(
                f"msg_{first.request_id}",
                chat.model.name,
                len(chat.plan.job.token_ids),
                chat.reading.num_id_chars,
                shows_thinking=request.thinking is None or request.thinking.display != "omitted",
            )
            answering, plans, readers = self._services.answering, [chat.plan], chat.choices()
            if request.stream:
                await answering.stream(exchange, plans, answer, readers)
            else:
                usage = await answering.gather(exchange.caller, plans, [answer], readers)
                await exchange.respond(answer.whole(usage))

    async def count_tokens(self, exchange: Exchange) -> None:
        """POST messages/count_tokens."""
        request = decode_body(await exchange.body(), PromptFields)
        chat_request, names = await self._chat(request)
        with names.in_callers_terms():
            await exchange.respond(encode({"input_tokens": await self._services.chats.count(chat_request)}))

    async def _chat(self, request: PromptFields, answer: AnswerFields | None = None) -> tuple[Chat, FieldNames]:
        check_messages(request)
        model = await self._services.models.find(request.model or "")
        effort = effort_of(request, model.chat_template(), self._services.chats.reasons(model))
        return chat_of(request, effort, answer)
