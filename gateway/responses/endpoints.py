"""The Responses API: create, retrieve, follow, cancel, delete, list input items."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import ChatLogprobs
from headrace.gateway.chat.planning import ChatPlan
from headrace.gateway.checks import invalid, unsupported
from headrace.gateway.edge.endpoint import API, EVENTS, Endpoint, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.failures import HttpError, failure_of
from headrace.gateway.edge.requests import flag_of, number_of, query_of, request_of
from headrace.gateway.edge.wire import encode
from headrace.gateway.field_names import FieldNames
from headrace.gateway.mcp.servers import McpServers
from headrace.gateway.responses.answers import ResponseAnswer, compaction_item, ending_event, response_head, usage_of
from headrace.gateway.responses.background import ENDED, MAX_ID_CHARS, ResponseRun, ResponseRuns
from headrace.gateway.responses.compaction import Compaction
from headrace.gateway.responses.conversations import Conversations
from headrace.gateway.responses.fields import COMPACT, FIELDS, INPUT_TOKENS
from headrace.gateway.responses.included import INCLUDE, events_with_included, included, shown_item, with_included
from headrace.gateway.responses.items import TRIGGER, Turn, input_items, turns_of
from headrace.gateway.responses.mcp_tools import listed_in
from headrace.gateway.responses.paging import QUERY, page_of
from headrace.gateway.responses.references import resolved
from headrace.gateway.responses.response import (
    CompactedResponse,
    DeletedResponse,
    InputTokens,
    ItemPage,
    Response,
)
from headrace.gateway.responses.rounds import McpUse, Rounds, approved_calls, mcp_use_of
from headrace.gateway.responses.store import StoredResponse, StoreError, TooLargeError, packed, unavailable
from headrace.gateway.responses.tools import Offer, offer_of
from headrace.gateway.responses.types import (
    CompactRequest,
    InputTokensRequest,
    ResponseChat,
    ResponsesRequest,
    chat_of,
    check_response,
)
from headrace.gateway.services import Services
from headrace.protos.status import Reason, StatusError

# How often a gateway checks for the end of another gateway's run, and how long it waits after cancelling one.
POLL_S = 0.25
CANCEL_S = 10.0
_LOG = logging.getLogger(__name__)


def endpoints(
    services: Services, runs: ResponseRuns, conversations: Conversations, servers: McpServers
) -> Sequence[Endpoint]:
    """All endpoints under responses. `runs` are the background responses, with the store of all; `servers` are the MCP
    servers whose tools models may call."""
    own = _Responses(services, runs, conversations, servers)
    one = "/responses/{response_id}"
    create = Operation(
        "Answer in the manner of the Responses API",
        Response,
        (ResponsesRequest,),
        generates=True,
        stream_type=EVENTS,
    )
    retrieve = Operation(
        "Retrieve a response, or follow it",
        Response,
        stream_type=EVENTS,
        query={
            "include": INCLUDE,
            "stream": {"type": "boolean"},
            "starting_after": {"type": "integer", "minimum": 0},
        },
    )
    items = Operation("List what a response answers", ItemPage, query={**QUERY, "include": INCLUDE})
    delete = Operation("Forget a response", DeletedResponse)
    compact = Operation("Sum up a conversation", CompactedResponse, (CompactRequest,), generates=True)
    count = Operation("Count the tokens of an input", InputTokens, (InputTokensRequest,))
    cancel = Operation("Cancel a response", Response)
    return under(
        API,
        Endpoint("POST", "/responses", "responses", own.create, create),
        Endpoint("POST", "/responses/compact", "responses_compact", own.compact, compact),
        Endpoint("POST", "/responses/input_tokens", "responses_input_tokens", own.count, count),
        Endpoint("GET", one, "responses_get", own.retrieve, retrieve),
        Endpoint("DELETE", one, "responses_delete", own.delete, delete),
        # A key whose requests are all running must be able to cancel one.
        Endpoint("POST", f"{one}/cancel", "responses_cancel", own.cancel, cancel, makes_work=False),
        Endpoint("GET", f"{one}/input_items", "responses_input_items", own.list_input_items, items),
    )


@dataclass(frozen=True, slots=True)
class _Planned:
    """A response that was checked."""

    request: ResponsesRequest
    plan: ChatPlan
    names: FieldNames
    answer: ResponseAnswer
    stored: StoredResponse
    new_items: Sequence[dict[str, Any]]
    """The input, without what precedes it."""
    compaction: Compaction | None = None
    """Instead of an answer, a summary."""
    rounds: Rounds | None = None
    """How the answer is generated, if its model may call tools of MCP servers."""

    @property
    def is_stored(self) -> bool:
        return self.request.store is not False


class _Responses:
    def __init__(
        self, services: Services, runs: ResponseRuns, conversations: Conversations, servers: McpServers
    ) -> None:
        self._services = services
        self._servers = servers
        self._conversations = conversations
        self._store = runs.store
        self._runs = runs

    # --- create -----------------------------------------------------------------------------------------------------

    async def create(self, exchange: Exchange) -> None:
        """POST responses."""
        request = await request_of(exchange, ResponsesRequest, FIELDS)
        check_response(request)
        exchange.name_request(request.request_id)
        planned = await self._planned(exchange, request)
        if request.background:
            await self._in_background(exchange, planned)
            return
        with planned.names.in_callers_terms():
            if request.stream:
                exchange.errors = planned.answer
                await self._generate(exchange, planned)
            else:
                plan = planned.plan
                if planned.compaction is not None:
                    summary, usage = await planned.compaction.run(exchange.caller)
                    planned.answer.compacted(summary)
                elif planned.rounds is not None:
                    async with aclosing(planned.rounds.events(exchange.caller)) as events:
                        async for _ in events:
                            pass
                    usage = planned.rounds.usage
                else:
                    usage = await self._services.answering.gather(
                        exchange.caller, [plan.plan], [planned.answer], plan.choices()
                    )
                await self._continue_conversation(planned)
                await self._finish(planned, usage)
                await exchange.respond(encode(planned.answer.response))

    async def _generate(self, sink: Exchange | ResponseRun, planned: _Planned) -> None:
        async def before_end(usage: Usage) -> None:
            try:
                await self._continue_conversation(planned)
            except StatusError as error:
                planned.answer.fail(failure_of(error))  # as the last event says
                return
            if isinstance(sink, ResponseRun):
                planned.answer.finish(usage)  # the run keeps it
            else:
                await self._finish(planned, usage)

        plan, answer = planned.plan, planned.answer
        if planned.rounds is not None:
            await self._generate_in_rounds(sink, planned.rounds, answer, before_end)
            return
        if planned.compaction is None:
            await self._services.answering.stream(sink, [plan.plan], answer, plan.choices(), before_end)
            return
        begun = asyncio.Event()
        begun.set()
        await sink.write(answer.begin())
        keep_alive = asyncio.create_task(sink.keep_alive(begun))
        try:
            summary, usage = await planned.compaction.run(sink.caller)
            events = answer.compacted(summary)
            await before_end(usage)
            await sink.write(events + answer.end(usage), last=True)
        finally:
            keep_alive.cancel()

    async def _generate_in_rounds(
        self,
        sink: Exchange | ResponseRun,
        rounds: Rounds,
        answer: ResponseAnswer,
        before_end: Callable[[Usage], Awaitable[None]],
    ) -> None:
        begun = asyncio.Event()
        keep_alive = asyncio.create_task(sink.keep_alive(begun))
        try:
            async with aclosing(rounds.events(sink.caller)) as groups:
                async for events in groups:
                    if events:
                        begun.set()
                        await sink.write(events)
            await before_end(rounds.usage)
            await sink.write(answer.end(rounds.usage), last=True)
        finally:
            keep_alive.cancel()

    async def compact(self, exchange: Exchange) -> None:
        """POST responses/compact."""
        asked = await request_of(exchange, CompactRequest, COMPACT)
        request = asked.as_response
        exchange.name_request(request.request_id)
        if request.input is None and request.previous_response_id is None:
            raise invalid("input", "input is required")
        earlier, earlier_field, items = await self._items(exchange, request, optional=True)
        compaction, plan, _ = await self._compaction(request, earlier, earlier_field, items)
        summary, usage = await compaction.run(exchange.caller)
        response_id = f"resp_{plan.plan.requests[0].request_id}"
        item = msgspec.to_builtins(compaction_item(summary, response_id))
        output = [*await compaction.kept([*earlier, *items], item), item]
        answer = CompactedResponse(id=response_id, created_at=int(time.time()), output=output, usage=usage_of(usage))
        await exchange.respond(encode(answer))

    async def count(self, exchange: Exchange) -> None:
        """POST responses/input_tokens."""
        asked = await request_of(exchange, InputTokensRequest, INPUT_TOKENS)
        request = asked.as_response
        exchange.name_request(request.request_id)
        if request.input is None and request.previous_response_id is None and request.conversation is None:
            raise invalid("input", "input is required")
        if request.previous_response_id is not None:
            check_response(msgspec.structs.replace(request, input=request.input or ""))
        else:
            check_response(request)
        earlier, earlier_field, items = await self._items(exchange, request, optional=True)
        use = await self._mcp_use(request, [*earlier, *items])
        if use is not None:
            use.close()
        listed = None if use is None else use.tools
        offer = offer_of(request.tools or (), [*earlier, *items], request.tool_choice, listed)
        turns = turns_of(earlier, items, earlier_field)
        if request.truncation == "auto":
            plan, _ = await self._plan(request, turns, offer, is_trial=True)
            num_tokens = len(plan.plan.job.token_ids)
        else:
            chat = chat_of(request, turns, offer)
            with chat.names.in_callers_terms():
                num_tokens = await self._services.chats.count(chat.request)
        await exchange.respond(encode(InputTokens(input_tokens=num_tokens)))

    async def _compaction(
        self,
        request: ResponsesRequest,
        earlier: Sequence[dict[str, Any]],
        earlier_field: str,
        items: Sequence[dict[str, Any]],
    ) -> tuple[Compaction, ChatPlan, FieldNames]:
        """The summary of a conversation, with the plan of its first part."""
        turns = turns_of(earlier, items, earlier_field)
        if not turns:
            raise invalid("input", "input has nothing to sum up")
        conversation = [*earlier, *items]
        offer = offer_of(request.tools or (), conversation, "none", listed_in(conversation))
        compaction = Compaction(self._services, request, turns, offer)
        plan, names = await compaction.begin()
        return compaction, plan, names

    async def _continue_conversation(self, planned: _Planned) -> None:
        """Add the input and the output to the conversation, if there is one. Raises `StatusError`: otherwise the caller
        would continue a conversation that lacks both."""
        conversation_id = planned.request.conversation_id
        if conversation_id is not None:
            new = [*planned.new_items, *planned.answer.response.output_values()]
            owner = planned.stored.owner
            await self._conversations.change(owner, conversation_id, lambda one: one.add("input", new), "conversation")

    async def _finish(self, planned: _Planned, usage: Usage) -> None:
        """Store the generated response, or mark it as not stored."""
        answer = planned.answer
        answer.finish(usage)
        if not planned.is_stored:
            return
        try:
            await self._store.put(answer.response.id, await packed(planned.stored), owner=planned.stored.owner)
        except StoreError as error:
            _LOG.warning("%s is not stored: %s", answer.response.id, error)
            answer.response.store = False

    async def _in_background(self, exchange: Exchange, planned: _Planned) -> None:
        async def generate(run: ResponseRun) -> None:
            with planned.names.in_callers_terms():
                await self._generate(run, planned)

        run = ResponseRun(replace(exchange.caller, deadline_s=None), planned.answer, planned.stored)
        if planned.request.stream:
            planned.stored.events = []
        try:
            await self._runs.start(run, generate)
        except BaseException as error:
            if planned.rounds is not None:
                planned.rounds.close()
            if isinstance(error, TooLargeError):
                problem = "input: the conversation is too large to be kept, as a response in the background is"
                remedy = "leave out images of earlier turns, send smaller ones, or set background to false"
                raise invalid("input", f"{problem}: {remedy}") from error
            if isinstance(error, StoreError):
                raise unavailable(error) from error
            raise
        if planned.request.stream:
            await self._follow(exchange, run, 0)
        else:
            await exchange.respond(encode(run.answer.response))

    async def _planned(self, exchange: Exchange, request: ResponsesRequest) -> _Planned:
        earlier, earlier_field, items = await self._items(exchange, request)
        if items and items[-1]["type"] == TRIGGER:
            items.pop()
            compaction, plan, names = await self._compaction(request, earlier, earlier_field, items)
            answer = _answer_of(request, plan, Offer(), None)
            stored = StoredResponse(exchange.owner, answer.response, [*earlier, *items])
            return _Planned(request, plan, names, answer, stored, items, compaction)
        use = await self._mcp_use(request, [*earlier, *items])
        try:
            listed = None if use is None else use.tools
            offer = offer_of(request.tools or (), [*earlier, *items], request.tool_choice, listed)
            plan, names = await self._plan(request, turns_of(earlier, items, earlier_field), offer)
            answer = _answer_of(request, plan, offer, use)
            stored = StoredResponse(exchange.owner, answer.response, [*earlier, *items])
            planned = _Planned(request, plan, names, answer, stored, items)
            if use is None:
                return planned

            async def plan_next(
                output: Sequence[dict[str, Any]], offer: Offer, max_output_tokens: int | None
            ) -> ChatPlan:
                asked = msgspec.structs.replace(request, max_output_tokens=max_output_tokens)
                return (await self._plan(asked, turns_of(earlier, [*items, *output], earlier_field), offer))[0]

            approved = approved_calls(earlier, items, use.needs_approval)
            rounds = Rounds(self._services.generator, use, answer, request, offer, plan, plan_next, approved)
            return replace(planned, rounds=rounds)
        except BaseException:
            if use is not None:
                use.close()
            raise

    async def _mcp_use(self, request: ResponsesRequest, conversation: Sequence[dict[str, Any]]) -> McpUse | None:
        """The MCP servers of a request, with their tools listed; None if the request offers none. Raises `StatusError`
        or `HttpError`."""
        use = mcp_use_of(self._servers, request, conversation)
        if use is None:
            return None
        try:
            await use.list_tools()
        except BaseException:
            use.close()
            raise
        return use

    async def _items(
        self, exchange: Exchange, request: ResponsesRequest, *, optional: bool = False
    ) -> tuple[list[dict[str, Any]], str, list[dict[str, Any]]]:
        """What precedes the input, the field that names it, and the input. A conversation needs no input if it has
        items; nor does another response if it is `optional`."""

        async def given() -> list[dict[str, Any]]:
            value = [] if request.input is None else request.input
            return input_items(await resolved(value, lambda name: self._runs.stored(exchange.owner, name)))

        if request.conversation_id is not None:
            found = await self._conversations.find(exchange.owner, request.conversation_id, "conversation")
            items = [] if found.items and request.input in (None, []) else await given()
            found.check_new("input", items)
            return found.items, "conversation", items
        earlier: list[dict[str, Any]] = []
        if request.previous_response_id is not None:
            previous = await self._previous(exchange, request.previous_response_id)
            earlier = [*previous.items, *previous.response.output_values()]
        is_empty = optional and bool(earlier) and request.input in (None, [])
        return earlier, "previous_response_id", [] if is_empty else await given()

    async def _plan(
        self, request: ResponsesRequest, turns: Sequence[Turn], offer: Offer, *, is_trial: bool = False
    ) -> tuple[ChatPlan, FieldNames]:
        """The plan. With truncation, it has as much of the end of the conversation as fits beside a whole answer; a
        shorter answer is only for limits that exceed the context by themselves. A trial is not generated."""

        chats = self._services.chats

        async def planned(first: int, shortens: bool, *, is_trial: bool) -> tuple[ChatPlan, ResponseChat]:
            chat = chat_of(request, turns[first:], offer, shortens)
            with chat.names.in_callers_terms():
                return await chats.plan(chat.request, is_trial=is_trial), chat

        if request.truncation != "auto":
            plan, chat = await planned(0, True, is_trial=is_trial)
            return plan, chat.names
        too_long: StatusError | None = None
        for shortens in (False, True):
            # A conversation may begin with any turn of the user. Find the first one that leaves enough room.
            firsts = [i for i, turn in enumerate(turns) if not i or turn.message.role == "user"]
            found: tuple[ChatPlan, ResponseChat] | None = None
            middle = 0
            while firsts:
                try:
                    found = await planned(firsts[middle], shortens, is_trial=True)
                    firsts = firsts[:middle]
                except StatusError as error:
                    if error.reason is not Reason.CONTEXT_TOO_LONG:
                        raise
                    too_long = too_long or error
                    firsts = firsts[middle + 1 :]
                middle = len(firsts) // 2
            if found is not None:
                plan, chat = found
                if not is_trial:
                    chats.offer_copy(chat.request)
                return plan, chat.names
        assert too_long is not None
        raise too_long

    async def _previous(self, exchange: Exchange, response_id: str) -> StoredResponse:
        stored = await self._runs.stored(exchange.owner, response_id)
        if stored is None:
            message = f"there is no response '{response_id[:MAX_ID_CHARS]}' to go on from; was it stored?"
            raise HttpError(400, "previous_response_not_found", message, param="previous_response_id")
        if stored.response.status not in ("completed", "incomplete"):
            message = f"previous_response_id: the response is {stored.response.status}; only a whole one can go on"
            raise invalid("previous_response_id", message)
        return stored

    # --- what is stored ---------------------------------------------------------------------------------------------

    async def retrieve(self, exchange: Exchange) -> None:
        """GET responses/{id}, as JSON or as a stream of its events."""
        query = _query(exchange, ("stream", "starting_after", "include_obfuscation"))
        if flag_of(query, "include_obfuscation"):
            raise unsupported("include_obfuscation", "include_obfuscation is not supported; leave it out")
        streams = flag_of(query, "stream")
        include = included(exchange)
        await exchange.body()
        stored = await self._found(exchange)
        if not streams:
            if "starting_after" in query:
                raise invalid("starting_after", "starting_after needs stream to be true")
            await exchange.respond(encode(with_included(stored.response, include)))
            return
        if stored.events is None:
            raise invalid("stream", "stream: only a response that was created with background and stream has events")
        position = number_of(query, "starting_after", -1, -1, 2**31) + 1
        run = self._runs.get(stored.response.id)
        if run is not None:
            await self._follow(exchange, run, position, include)
        else:
            await self._replay(exchange, stored, position, include)

    async def delete(self, exchange: Exchange) -> None:
        """DELETE responses/{id}."""
        stored = await self._found(exchange)
        response_id = stored.response.id
        if stored.response.status not in ENDED:
            await self._cancelled(exchange, stored)
        try:
            await self._store.delete(response_id, stored.owner)
        except StoreError as error:
            raise unavailable(error) from error
        await exchange.respond(encode(DeletedResponse(id=response_id)))

    async def cancel(self, exchange: Exchange) -> None:
        """POST responses/{id}/cancel."""
        stored = await self._found(exchange)
        if not stored.response.background:
            raise invalid("response_id", "only a response that was created with background can be cancelled")
        if stored.response.status not in ENDED:
            stored = await self._cancelled(exchange, stored)
        await exchange.respond(encode(stored.response))

    async def list_input_items(self, exchange: Exchange) -> None:
        """GET responses/{id}/input_items."""
        query = _query(exchange, ("limit", "order", "after"))
        include = included(exchange)
        answer = page_of((await self._found(exchange)).items, query)
        answer.data = [shown_item(item, include) for item in answer.data]
        await exchange.respond(encode(answer))

    async def _found(self, exchange: Exchange) -> StoredResponse:
        """The response that the path names."""
        response_id = exchange.scope["path_params"]["response_id"]
        stored = await self._runs.stored(exchange.owner, response_id)
        if stored is None:
            message = f"there is no response '{response_id[:MAX_ID_CHARS]}'; was it stored?"
            raise StatusError(Reason.NOT_FOUND, message, field="response_id")
        return stored

    async def _cancelled(self, exchange: Exchange, stored: StoredResponse) -> StoredResponse:
        """The response after it was cancelled, here or by the gateway that runs it."""
        response_id = stored.response.id
        run = self._runs.get(response_id)
        if run is not None:
            await self._runs.cancel(run)
            return run.stored
        try:
            await self._runs.ask_to_cancel(response_id)
            async with asyncio.timeout(CANCEL_S):
                return await self._ended(exchange, response_id)
        except StoreError as error:
            raise unavailable(error) from error
        except TimeoutError as error:
            raise StatusError(Reason.DEADLINE, "the response was not cancelled in time; try again") from error

    async def _ended(self, exchange: Exchange, response_id: str) -> StoredResponse:
        """Wait for the end of a response that another gateway generates."""
        while True:
            stored = await self._runs.stored(exchange.owner, response_id)
            if stored is None:
                raise StatusError(Reason.NOT_FOUND, "the response was deleted", field="response_id")
            if stored.response.status in ENDED:
                return stored
            await asyncio.sleep(POLL_S)

    async def _follow(self, exchange: Exchange, run: ResponseRun, position: int, include: Sequence[str] = ()) -> None:
        keep_alive = asyncio.create_task(exchange.keep_alive())
        try:
            async with aclosing(run.follow(position)) as groups:
                async for events in groups:
                    await exchange.write(events_with_included(events, include))
            await exchange.write(b"", last=True)
        finally:
            keep_alive.cancel()

    async def _replay(self, exchange: Exchange, stored: StoredResponse, position: int, include: Sequence[str]) -> None:
        keep_alive = asyncio.create_task(exchange.keep_alive())
        try:
            if stored.response.status not in ENDED:
                stored = await self._ended(exchange, stored.response.id)
            # The events of a run are stored when it has ended; of one that is lost there is only the end.
            events = stored.events[position:] if stored.events else [ending_event(stored.response, position)]
            await exchange.write(events_with_included(b"".join(events), include), last=True)
        finally:
            keep_alive.cancel()


def _answer_of(request: ResponsesRequest, plan: ChatPlan, offer: Offer, use: McpUse | None) -> ResponseAnswer:
    """The builder of the response of a plan."""
    params = plan.plan.requests[0]
    wants_logprobs = params.sampling.HasField("logprobs")
    return ResponseAnswer(
        response_head(request, f"resp_{params.request_id}", plan.model.name, params.sampling),
        request.include or (),
        ChatLogprobs(plan.model.text.tokenizer.token_bytes) if wants_logprobs else None,
        plan.reading.num_id_chars,
        streams=bool(request.stream),
        keeps_events=bool(request.background),
        pads=request.stream_options is not None and bool(request.stream_options.include_obfuscation),
        names=offer.names,
        needs_approval={} if use is None else use.needs_approval,
    )


def _query(exchange: Exchange, known: Sequence[str]) -> dict[str, str]:
    """The last value of each known parameter of the query."""
    return {name: value for name, value in query_of(exchange).items() if name in known}
