"""Answers of the Responses API: the items of a response, and the events of its stream (pure).

    ChatPiece -> items: reasoning | message | function_call | custom_tool_call | mcp_call | mcp_approval_request,
                 in the order of the model's text

One instance makes one response, streamed or not, so that a stream adds up to the whole answer. Events are numbered from
0 without gaps:

    created, in_progress,
    { output_item.added, [content_part.added,] deltas, done, [content_part.done,] output_item.done } for each item,
    completed | incomplete | failed
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET, UnsetType

from headrace.gateway.chat.choice import Ending
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import ChatLogprobs, ChosenToken
from headrace.gateway.chat.output import ChatPiece, new_call_id
from headrace.gateway.chat.output_parsers.output import ArgumentsDelta, CallDelta, ContentDelta, Delta, ReasoningDelta
from headrace.gateway.chat.sampling import shortest
from headrace.gateway.edge.failures import OPENAI_ERRORS, ErrorShape, Failure
from headrace.gateway.edge.wire import encode, padding
from headrace.gateway.mcp.values import McpTool
from headrace.gateway.responses.references import new_output_id
from headrace.gateway.responses.response import (
    CompactionItem,
    ConversationName,
    CustomToolCall,
    FunctionCall,
    IncompleteDetails,
    InputTokensDetails,
    Item,
    McpApprovalRequest,
    McpCall,
    McpListedTool,
    McpListTools,
    MessageItem,
    OutputText,
    OutputTokensDetails,
    ReasoningItem,
    ReasoningText,
    Response,
    ResponseError,
    ResponseEvent,
    ResponseReasoning,
    ResponseText,
    ResponseUsage,
    Status,
)
from headrace.gateway.responses.tools import CallName
from headrace.gateway.responses.types import ENCRYPTED_REASONING, ResponsesRequest, TextFields
from headrace.gateway.text.seals import COMPACTION, REASONING
from headrace.protos.inference_pb2 import SamplingParams

_ERROR_CODES = {"rate_limit_error": "rate_limit_exceeded", "invalid_request_error": "invalid_prompt"}


def response_head(request: ResponsesRequest, response_id: str, model: str, params: SamplingParams) -> Response:
    """The fields of a response that are known before it is generated."""
    reasoning = request.reasoning
    text = request.text or TextFields()
    conversation_id = request.conversation_id
    tools = [
        {"strict": False, "parameters": None, "description": None, **tool} if tool.get("type") == "function" else tool
        for tool in request.tools or ()
    ]

    def number(name: str, default: float) -> float:
        """A number of the sampling: the caller's, else the model's, else the default of workers."""
        given = getattr(request, name)
        if given is not None:
            return float(given)
        return shortest(getattr(params, name)) if params.HasField(name) else default

    return Response(
        id=response_id,
        created_at=int(time.time()),
        background=bool(request.background),
        conversation=None if conversation_id is None else ConversationName(conversation_id),
        frequency_penalty=number("frequency_penalty", 0.0),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=model,
        output=[],
        parallel_tool_calls=request.parallel_tool_calls is not False,
        presence_penalty=number("presence_penalty", 0.0),
        previous_response_id=request.previous_response_id,
        prompt_cache_key=request.prompt_cache_key,
        reasoning=ResponseReasoning(None if reasoning is None else reasoning.effort),
        safety_identifier=request.safety_identifier,
        store=request.store is not False,
        temperature=number("temperature", 1.0),
        text=ResponseText(_format_value(text.format), text.verbosity or "medium"),
        tool_choice=request.tool_choice or "auto",
        tools=tools,
        top_logprobs=request.top_logprobs or 0,
        top_p=number("top_p", 1.0),
        truncation=request.truncation or "disabled",
        user=request.user,
    )


def _format_value(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """The format of the text, with all required fields. A JSON schema is always enforced, even without `strict`."""
    if given is None:
        return {"type": "text"}
    if given.get("type") != "json_schema":
        return dict(given)
    return {**given, "description": given.get("description"), "strict": given.get("strict") is not False}


def usage_of(usage: Usage) -> ResponseUsage:
    """The `usage` object of a response."""
    return ResponseUsage(
        input_tokens=usage.num_prompt_tokens,
        input_tokens_details=InputTokensDetails(usage.num_cached_tokens, image_tokens=usage.num_image_tokens or UNSET),
        output_tokens=usage.num_generated_tokens,
        output_tokens_details=OutputTokensDetails(usage.num_reasoning_tokens),
        total_tokens=usage.num_prompt_tokens + usage.num_generated_tokens,
    )


@dataclass(slots=True)
class _OpenItem:
    """The item that is being written."""

    kind: str
    item_id: str
    index: int
    texts: list[str] = field(default_factory=list)
    logprobs: list[ChosenToken] = field(default_factory=list)
    name: CallName | None = None
    call_id: str = ""

    @property
    def is_call(self) -> bool:
        return self.kind in _CALLS

    @property
    def text(self) -> str:
        return "".join(self.texts)


# kind of item -> prefix of its id, and name of the events of its text
_KINDS = {
    "reasoning": ("rs", "response.reasoning_text"),
    "message": ("msg", "response.output_text"),
    "function_call": ("fc", "response.function_call_arguments"),
    "custom_tool_call": ("ctc", "response.custom_tool_call_input"),
    "mcp_call": ("mcp", "response.mcp_call_arguments"),
    "mcp_approval_request": ("mcpr", ""),
}
_CALLS = ("function_call", "custom_tool_call", "mcp_call", "mcp_approval_request")


class ResponseAnswer(ErrorShape):
    """Makes one response. Push every piece, as `piece` or as `push`; then `finish` and `end`."""

    def __init__(
        self,
        response: Response,
        include: Sequence[str],
        logprobs: ChatLogprobs | None,
        num_id_chars: int,
        streams: bool,
        keeps_events: bool = False,
        pads: bool = False,
        names: Mapping[str, CallName] | None = None,
        needs_approval: Mapping[CallName, bool] | None = None,
    ) -> None:
        """`num_id_chars` is the length of the ids of calls; without `streams` no events are made. `names` are those of
        the caller's tools, by the names that the model knows. `needs_approval` has the tools of MCP servers, and
        whether the caller must approve their calls.

        With `pads`, events of deltas have padding that hides the length of their text.
        """
        self._pads = pads
        self._names = names or {}
        self._needs_approval = needs_approval or {}
        self.response = response
        """The response so far."""
        self._seals = ENCRYPTED_REASONING in include
        self._logprobs = logprobs
        self._num_id_chars = num_id_chars
        self._streams = streams
        self._keeps_events = keeps_events
        self._num_events = 0
        self.events: list[bytes] = []
        """If events are kept: all events so far, except the last one of the response. The number of each is its
        index."""
        self._open: _OpenItem | None = None
        self._early_logprobs: list[ChosenToken] = []
        self._ending: Ending | None = None

    # --- AnswerStream and WholeAnswer -------------------------------------------------------------------------------

    def begin(self) -> bytes:
        """The first events; empty if they were already returned."""
        if self._num_events or not self._streams:
            return b""
        kinds = ("response.created", "response.in_progress")
        return b"".join(self._event(ResponseEvent(type=kind, response=self.response)) for kind in kinds)

    def piece(self, index: int, piece: ChatPiece) -> bytes:
        """Events for a piece."""
        events = self.begin()
        if self._logprobs is not None and piece.logprobs:
            self._early_logprobs += self._logprobs.tokens(piece.logprobs)
        for delta in piece.deltas:
            events += self._delta(delta)
        if self._early_logprobs and self._open is not None and self._open.kind == "message":
            events += self._text(self._open, "")
        if piece.ending is not None:
            self._ending = piece.ending
            if not self.response.output and self._open is None:
                events += self._add("message")  # an empty answer is a message too
            events += self._close("incomplete" if piece.ending.reason == "length" else "completed")
        return events

    def push(self, piece: ChatPiece) -> None:
        """Add the next piece of an answer that is not streamed."""
        self.piece(0, piece)

    def compacted(self, summary: str) -> bytes:
        """The only item is a compaction with this summary."""
        events = self.begin()
        item = compaction_item(summary, self.response.id)
        self.response.output.append(item)
        if not self._streams:
            return b""
        for what in ("added", "done"):
            events += self._event(ResponseEvent(type=f"response.output_item.{what}", output_index=0, item=item))
        return events

    def finish(self, usage: Usage) -> None:
        """Complete the response."""
        cut_off = self.is_cut_off
        self.response.status = "incomplete" if cut_off else "completed"
        self.response.incomplete_details = IncompleteDetails("max_output_tokens") if cut_off else None
        self.response.completed_at = None if cut_off else int(time.time())
        self.response.usage = usage_of(usage)

    def end(self, usage: Usage) -> bytes:
        """The last event. Call `finish` before."""
        return self.last_event()

    def last_event(self) -> bytes:
        """The event for the end of the response, by its status."""
        return ending_event(self.response, self._num_events)

    # --- tools of MCP servers ---------------------------------------------------------------------------------------

    def listed(self, server: str, tools: Sequence[McpTool]) -> bytes:
        """Events for the list of a server's tools, which precedes the answer."""
        events = self.begin()
        shown = [
            McpListedTool(
                name=tool.name,
                description=tool.description,
                input_schema={**tool.input_schema},
                annotations=None if tool.annotations is None else {**tool.annotations},
            )
            for tool in tools
        ]
        item_id, index = new_output_id("mcpl", self.response.id), len(self.response.output)
        item = McpListTools(id=item_id, server_label=server, tools=shown)
        self.response.output.append(item)
        if not self._streams:
            return b""
        events += self._item_event("added", index, McpListTools(id=item_id, server_label=server, tools=[]))
        for what in ("in_progress", "completed"):
            events += self._progress(f"mcp_list_tools.{what}", item_id, index)
        return events + self._item_event("done", index, item)

    def approved(self, request: McpApprovalRequest) -> tuple[McpCall, bytes]:
        """A call that the caller has approved, and the events for its begin."""
        events = self.begin()
        call = McpCall(
            id=new_output_id("mcp", self.response.id),
            status="in_progress",
            server_label=request.server_label,
            name=request.name,
            arguments=request.arguments,
            approval_request_id=request.id,
        )
        index = len(self.response.output)
        self.response.output.append(call)
        if self._streams:
            events += self._item_event("added", index, call) + self._progress("mcp_call.in_progress", call.id, index)
        return call, events

    @property
    def open_calls(self) -> Sequence[McpCall]:
        """The calls of MCP tools that the model has written, and that have no output yet."""
        return [item for item in self.response.output if isinstance(item, McpCall) and item.status == "in_progress"]

    def called(self, call: McpCall) -> bytes:
        """Events for the end of a call, which has its output or an error."""
        if not self._streams:
            return b""
        index = self.response.output.index(call)
        return self._progress(f"mcp_call.{call.status}", call.id, index) + self._item_event("done", index, call)

    @property
    def is_cut_off(self) -> bool:
        """Whether the answer ended at its limit of tokens."""
        return self._ending is not None and self._ending.reason == "length"

    def cut_off(self) -> None:
        """The limit of tokens is reached between two rounds."""
        assert self._ending is not None
        self._ending = replace(self._ending, reason="length")

    def _progress(self, what: str, item_id: str, index: int) -> bytes:
        return self._event(ResponseEvent(type=f"response.{what}", item_id=item_id, output_index=index))

    def _item_event(self, what: str, index: int, item: Item) -> bytes:
        return self._event(ResponseEvent(type=f"response.output_item.{what}", output_index=index, item=item))

    # --- failures ---------------------------------------------------------------------------------------------------

    def whole(self, failure: Failure) -> bytes:
        """The error of a response that has not begun."""
        return OPENAI_ERRORS.whole(failure)

    def event(self, failure: Failure) -> bytes:
        """The last event of a response that failed while it was streamed."""
        events = self.begin()
        self.fail(failure)
        return events + self.last_event()

    def fail(self, failure: Failure) -> None:
        """Mark the response as failed, with this error."""
        self.response.status = "failed"
        code = _ERROR_CODES.get(failure.kind, "server_error")
        self.response.error = ResponseError(code, failure.message)

    # --- items ------------------------------------------------------------------------------------------------------

    def _delta(self, delta: Delta) -> bytes:
        match delta:
            case ReasoningDelta(text):
                return self._into("reasoning") + self._text(self._the_open, text)
            case ContentDelta(text):
                return self._into("message") + self._text(self._the_open, text)
            case CallDelta(_, name, is_custom):
                called = self._names.get(name) or CallName(None, name)
                kind = "custom_tool_call" if is_custom else "function_call"
                if called in self._needs_approval:
                    kind = "mcp_approval_request" if self._needs_approval[called] else "mcp_call"
                return self._close("completed") + self._add(kind, called)
            case ArgumentsDelta(_, text):
                return self._text(self._the_open, text)

    @property
    def _the_open(self) -> _OpenItem:
        assert self._open is not None
        return self._open

    def _into(self, kind: str) -> bytes:
        """Open an item of this kind, unless one is open; another open item is closed first. Returns the events."""
        if self._open is not None and self._open.kind == kind:
            return b""
        return self._close("completed") + self._add(kind)

    def _add(self, kind: str, name: CallName | None = None) -> bytes:
        item_id = new_output_id(_KINDS[kind][0], self.response.id)
        item = self._open = _OpenItem(kind, item_id, len(self.response.output), name=name)
        if item.is_call:
            item.call_id = new_call_id(self._num_id_chars)
        if not self._streams or kind == "mcp_approval_request":
            return b""
        shown = self._item(item, "in_progress")
        if isinstance(shown, MessageItem | ReasoningItem):
            shown.content = []
        events = self._item_event("added", item.index, shown)
        if kind == "mcp_call":
            events += self._progress("mcp_call.in_progress", item.item_id, item.index)
        return events + self._part_event(item, "added")

    def _text(self, item: _OpenItem, text: str) -> bytes:
        """More text of the open item."""
        item.texts.append(text)
        logprobs: list[ChosenToken] | UnsetType = UNSET
        if item.kind == "message":
            logprobs, self._early_logprobs = self._early_logprobs, []
            item.logprobs += logprobs
        if not self._streams or item.kind == "mcp_approval_request":
            return b""
        return self._event(
            ResponseEvent(
                type=f"{_KINDS[item.kind][1]}.delta",
                item_id=item.item_id,
                output_index=item.index,
                content_index=UNSET if item.is_call else 0,
                delta=text,
                logprobs=logprobs,
                obfuscation=padding(len(text)) if self._pads else UNSET,
            )
        )

    def _close(self, status: Status) -> bytes:
        item, self._open = self._open, None
        if item is None:
            return b""
        if item.kind == "mcp_approval_request" and status == "incomplete":
            return b""  # nobody can approve a part of a call
        shown = self._item(item, status)
        self.response.output.append(shown)
        if not self._streams:
            return b""
        if isinstance(shown, McpApprovalRequest):
            return self._item_event("added", item.index, shown) + self._item_event("done", item.index, shown)
        done = ResponseEvent(type=f"{_KINDS[item.kind][1]}.done", item_id=item.item_id, output_index=item.index)
        match shown:
            case FunctionCall():
                done.arguments = item.text
                done.name = shown.name
            case McpCall():
                done.arguments = item.text
                events = self._event(done)
                # A whole call is done when it has its output.
                return events + self._item_event("done", item.index, shown) if status == "incomplete" else events
            case CustomToolCall():
                done.input = item.text
            case _:
                done.text = item.text
                done.content_index = 0
                if item.kind == "message":
                    done.logprobs = item.logprobs
        events = self._event(done) + self._part_event(item, "done")
        return events + self._item_event("done", item.index, shown)

    def _item(self, item: _OpenItem, status: Status) -> Item:
        """The item as the response shows it."""
        if item.name is not None:
            name = item.name.name
            if item.kind in ("mcp_call", "mcp_approval_request"):
                return self._item_of_mcp(item, item.name, status)
            namespace = UNSET if item.name.namespace is None else item.name.namespace
            ids = {"id": item.item_id, "call_id": item.call_id, "name": name}
            if item.kind == "function_call":
                return FunctionCall(**ids, status=status, arguments=item.text, namespace=namespace)
            return CustomToolCall(**ids, status=status, input=item.text, namespace=namespace)
        part = self._part(item)
        if isinstance(part, OutputText):
            return MessageItem(id=item.item_id, status=status, content=[part])
        seal = REASONING.sealed(item.text) if self._seals else UNSET
        return ReasoningItem(id=item.item_id, status=status, content=[part], encrypted_content=seal)

    def _item_of_mcp(self, item: _OpenItem, name: CallName, status: Status) -> McpCall | McpApprovalRequest:
        server = name.namespace or ""
        if item.kind == "mcp_approval_request":
            return McpApprovalRequest(id=item.item_id, server_label=server, name=name.name, arguments=item.text)
        return McpCall(
            id=item.item_id,
            status="incomplete" if status == "incomplete" else "in_progress",
            server_label=server,
            name=name.name,
            arguments=item.text,
        )

    def _part(self, item: _OpenItem) -> OutputText | ReasoningText:
        if item.kind == "reasoning":
            return ReasoningText(text=item.text)
        return OutputText(text=item.text, logprobs=item.logprobs)

    # --- events -----------------------------------------------------------------------------------------------------

    def _part_event(self, item: _OpenItem, what: str) -> bytes:
        """The event that a part of content is `added` or `done`; none for a call, which has no parts."""
        if item.is_call:
            return b""
        return self._event(
            ResponseEvent(
                type=f"response.content_part.{what}",
                item_id=item.item_id,
                output_index=item.index,
                content_index=0,
                part=self._part(item),
            )
        )

    def _event(self, event: ResponseEvent) -> bytes:
        event.sequence_number = self._num_events
        encoded = encoded_event(event)
        self._num_events += 1
        if self._keeps_events:
            self.events.append(encoded)
        return encoded


def compaction_item(summary: str, response_id: str) -> CompactionItem:
    """The item with this summary, in the output of this response."""
    return CompactionItem(id=new_output_id("cmp", response_id), encrypted_content=COMPACTION.sealed(summary))


def ending_event(response: Response, number: int) -> bytes:
    """The last event of a response that has ended, by its status."""
    # The API has no event for a cancelled response: its stream ends as failed.
    status = "failed" if response.status == "cancelled" else response.status
    return encoded_event(ResponseEvent(type=f"response.{status}", sequence_number=number, response=response))


def encoded_event(event: ResponseEvent) -> bytes:
    """The event as it is sent."""
    return b"event: %b\ndata: %b\n\n" % (event.type.encode(), encode(event))
