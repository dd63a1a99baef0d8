"""A response whose model may call tools of MCP servers: the gateway calls them, and the model continues with the
results.

    lists of tools, calls that the caller has approved,
    { the model writes; its calls of MCP tools are made } until it calls none of them

A response ends before that when the model calls a tool of the caller, or one that the caller must approve. Each round
computes only what the one before has added to the prompt.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from headrace.gateway.access.caller import Caller
from headrace.gateway.chat.generation import Account, Generator, Usage
from headrace.gateway.chat.planning import ChatPlan
from headrace.gateway.checks import invalid
from headrace.gateway.edge.failures import HttpError
from headrace.gateway.mcp.servers import McpServers
from headrace.gateway.mcp.values import CONNECTION_LOST, INVALID_PARAMS, McpError, McpTool
from headrace.gateway.responses.answers import ResponseAnswer
from headrace.gateway.responses.items import APPROVAL
from headrace.gateway.responses.mcp_tools import McpOffer, listed_in, mcp_offers
from headrace.gateway.responses.response import (
    CustomToolCall,
    FunctionCall,
    McpApprovalRequest,
    McpCall,
    McpHttpError,
    McpProtocolError,
    McpToolExecutionError,
)
from headrace.gateway.responses.tools import CallName, Offer
from headrace.gateway.responses.types import ResponsesRequest
from headrace.protos.status import Reason, StatusError

_OF_CALLER = (FunctionCall, CustomToolCall, McpApprovalRequest)


class PlanNext(Protocol):
    """Plans a round."""

    def __call__(
        self, output: Sequence[dict[str, Any]], offer: Offer, max_output_tokens: int | None
    ) -> Awaitable[ChatPlan]:
        """The plan for the next round, whose prompt includes `output`, the items so far. Raises `StatusError`."""


class McpUse:
    """The MCP servers of one response, with a session for each."""

    def __init__(self, servers: McpServers, offers: Sequence[McpOffer], known: Mapping[str, Sequence[McpTool]]) -> None:
        """`known` are tools that the conversation has listed before, by server."""
        self._servers = servers
        self._offers = offers
        self._known = known
        self._sessions = servers.sessions()
        self.tools: dict[str, Sequence[McpTool]] = {}
        """The tools that the model gets, by server; after `list_tools`."""
        self.new_lists: list[tuple[str, Sequence[McpTool]]] = []
        """Those of servers that the conversation has not listed before."""
        self.max_calls = servers.max_calls
        """The operator's bound of calls."""

    @property
    def needs_approval(self) -> dict[CallName, bool]:
        """The offered tools, and whether the caller must approve their calls."""
        return {
            CallName(offer.label, tool.name): offer.needs_approval(tool)
            for offer in self._offers
            for tool in self.tools.get(offer.label, ())
        }

    async def list_tools(self) -> None:
        """Request the tools of the servers. Raises `HttpError` if a server does not list them."""
        for offer in self._offers:
            tools = self._known.get(offer.label)
            if tools is None:
                try:
                    tools = await self._sessions.tools(offer.label)
                except McpError as error:
                    where = f"{offer.place}.server_label"
                    message = f"{where}: the tools of '{offer.label}' could not be listed: {error.message}"
                    raise HttpError(424, "mcp_list_tools_failed", message, param=where) from error
                self.new_lists.append((offer.label, offer.offered(tools)))
            self.tools[offer.label] = offer.offered(tools)

    async def call(self, call: McpCall) -> None:
        """Call a tool, and give the call its output or its error. It never fails, but may be cancelled."""
        try:
            arguments = _arguments_of(call)
            result = await self._sessions.call(call.server_label, call.name, arguments)
        except McpError as error:
            kind = McpHttpError if error.is_http else McpProtocolError
            _fail(call, kind(code=error.code, message=error.message))
            return
        except asyncio.CancelledError:
            call.status = "incomplete"
            raise
        if result.is_error:
            _fail(call, McpToolExecutionError(content=[*result.content]))
        else:
            call.output, call.status = result.text, "completed"

    def close(self) -> None:
        """End the sessions."""
        self._sessions.close()


def mcp_use_of(
    servers: McpServers, request: ResponsesRequest, conversation: Sequence[Mapping[str, Any]]
) -> McpUse | None:
    """The MCP servers that a request offers; None if it offers none. Raises `StatusError`."""
    offers = mcp_offers(request.tools or (), servers.names)
    return McpUse(servers, offers, listed_in(conversation)) if offers else None


def approved_calls(
    earlier: Sequence[Mapping[str, Any]], items: Sequence[Mapping[str, Any]], offered: Mapping[CallName, bool]
) -> list[McpApprovalRequest]:
    """The calls that the input approves and that were not made yet. Raises `StatusError` for an approval of nothing,
    and for calls of tools that are not offered any more."""
    whole = [*earlier, *items]
    requests = {item["id"]: item for item in whole if item["type"] == "mcp_approval_request"}
    made = {item.get("approval_request_id") for item in whole if item["type"] == "mcp_call"}
    found: dict[str, McpApprovalRequest] = {}
    for position, item in enumerate(items):
        if item["type"] != APPROVAL:
            continue
        where = f"input[{position}].approval_request_id"
        request = requests.get(item["approval_request_id"])
        if request is None:
            raise invalid(where, f"{where}: there is no such request in the conversation")
        if not item["approve"] or request["id"] in made:
            continue
        texts = {name: request.get(name) for name in ("server_label", "name", "arguments")}
        name = CallName(str(texts["server_label"]), str(texts["name"]))
        if name not in offered:
            raise invalid(where, f"{where}: its tool is not among those of the MCP servers in tools; offer it again")
        known = {key: str(value or "") for key, value in texts.items()}
        found[request["id"]] = McpApprovalRequest(id=request["id"], **known)
    return [*found.values()]


class Rounds:
    """Generates one response. Iterate over `events` once."""

    def __init__(
        self,
        generator: Generator,
        use: McpUse,
        answer: ResponseAnswer,
        request: ResponsesRequest,
        offer: Offer,
        first: ChatPlan,
        plan_next: PlanNext,
        approved: Sequence[McpApprovalRequest],
    ) -> None:
        """`first` is the plan of the first round, if no `approved` call precedes it."""
        self._generator = generator
        self._use = use
        self._answer = answer
        self._request = request
        self._offer = offer
        self._first: ChatPlan | None = None if approved else first
        self._plan_next = plan_next
        self._approved = approved
        self._calls_left = min(use.max_calls, request.max_tool_calls or use.max_calls)
        self.usage = Usage(0, 0, 0)
        """Of all rounds so far."""

    def close(self) -> None:
        """End the sessions with the servers; `events` does so at its end."""
        self._use.close()

    async def events(self, caller: Caller) -> AsyncGenerator[bytes, None]:
        """The events of its stream up to the end of the last item; empty if it is not streamed. Raises
        `StatusError`."""
        answer = self._answer
        try:
            events = b"".join(answer.listed(server, tools) for server, tools in self._use.new_lists)
            for request in self._approved:
                call, begun = answer.approved(request)
                yield events + begun
                events = await self._made(call, caller)
            while (plan := await self._next()) is not None:
                num_items = len(answer.response.output)
                account = Account([plan.plan])
                (reader,) = plan.choices()
                async with aclosing(self._generator.stream([plan.plan], caller)) as pieces:
                    async for _, piece in pieces:
                        read = reader.push(piece)
                        events += answer.piece(0, read)
                        if read.ending is not None:
                            account.ended(0, read.ending)
                            break
                        if events:
                            yield events
                            events = b""
                self.usage = self.usage.plus(account.usage)
                calls = answer.open_calls
                for call in calls:
                    yield events
                    events = await self._made(call, caller)
                yield events
                events = b""
                written = answer.response.output[num_items:]
                if not calls or answer.is_cut_off or any(isinstance(item, _OF_CALLER) for item in written):
                    return
        finally:
            self._use.close()

    async def _next(self) -> ChatPlan | None:
        """The plan of the next round; None if the response has all of its tokens."""
        first, self._first = self._first, None
        if first is not None:
            return first
        most = self._request.max_output_tokens
        left = None if most is None else most - self.usage.num_generated_tokens
        if left is not None and left <= 0:
            self._answer.cut_off()
            return None
        offer = self._offer
        if self.usage.num_generated_tokens:
            offer = offer.after_a_call
        if self._calls_left <= 0:
            offer = offer.without(self._use.needs_approval.keys())
        return await self._plan_next(self._answer.response.output_values(), offer, left)

    async def _made(self, call: McpCall, caller: Caller) -> bytes:
        """Make a call. Returns its events."""
        if self._calls_left <= 0:
            problem = "not called: the response has its maximum of calls"
            _fail(call, McpProtocolError(code=CONNECTION_LOST, message=problem))
            return self._answer.called(call)
        self._calls_left -= 1
        left_s = None if caller.deadline_s is None else caller.deadline_s - time.monotonic()
        timeout = asyncio.timeout(left_s)
        try:
            async with timeout:
                await self._use.call(call)
        except TimeoutError:
            raise StatusError(Reason.DEADLINE, "the time limit of the request has passed during a call") from None
        return self._answer.called(call)


def _arguments_of(call: McpCall) -> dict[str, Any]:
    try:
        arguments = msgspec.json.decode(call.arguments or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise McpError("not called: the arguments are not a JSON object", INVALID_PARAMS)
    return arguments


def _fail(call: McpCall, error: McpProtocolError | McpHttpError | McpToolExecutionError) -> None:
    call.error, call.status = error, "failed"
