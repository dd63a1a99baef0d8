"""Compaction: the model summarises a conversation, and the conversation continues from the summary.

    messages of user, system and developer, and all else   ->   these messages, and an item `compaction`

The item has the summary in an opaque form. It is the caller's own text: whoever makes one up says no more than in a
message, and as the user, so that it needs no signature. Items before it have no effect, except for the messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from headrace.gateway.access.caller import Caller
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.output import ChatPiece
from headrace.gateway.chat.output_parsers.output import ContentDelta
from headrace.gateway.chat.planning import ChatPlan
from headrace.gateway.chat.request import ChatMessage
from headrace.gateway.field_names import FieldNames
from headrace.gateway.responses.items import SUMMARY, Turn, is_kept, turns_of
from headrace.gateway.responses.tools import Offer
from headrace.gateway.responses.types import SUMMARY_TOKENS, ResponsesRequest, chat_of
from headrace.gateway.services import Services
from headrace.protos.cache_eviction import longest_context
from headrace.protos.status import Reason, StatusError

MAX_PASSES = 8
_PROMPT = """\
Write a summary from which this conversation can go on. Whoever reads it sees none of your messages, tool calls and \
their results, only the summary. Put down:
- the task, and what the user and the instructions demand;
- what was done and found, with names of files, commands, values and errors exactly as they are;
- decisions, and why they were made;
- what is not finished, and the next step.
Leave out what no longer matters. Write only the summary, and call no tool."""


@dataclass(frozen=True, slots=True)
class _Pass:
    """A pass: the summary of the first `num_turns` of the remaining turns."""

    plan: ChatPlan
    names: FieldNames
    num_turns: int


@dataclass(slots=True)
class _Text:
    """The text of an answer, without reasoning and calls."""

    texts: list[str] = field(default_factory=list)

    def push(self, piece: ChatPiece) -> None:
        """As `WholeAnswer.push`."""
        self.texts += [delta.text for delta in piece.deltas if isinstance(delta, ContentDelta)]


class Compaction:
    """The summary of a conversation. If the conversation is longer than the context, it is read in parts, each with the
    summary of those before."""

    def __init__(self, services: Services, request: ResponsesRequest, turns: Sequence[Turn], offer: Offer) -> None:
        """`offer` has the tools that the conversation knows. The prompt lists them at the same place as before, so that
        it is cached, but the model must not call them."""
        self._services = services
        self._request = msgspec.structs.replace(
            request, tool_choice=None, text=None, include=None, top_logprobs=None, truncation=None, stream=None
        )
        self._turns = turns
        self._offer = replace(offer, choice=None)
        self._next: _Pass | None = None

    async def begin(self) -> tuple[ChatPlan, FieldNames]:
        """Check the request. Returns the plan of the first part, and the caller's names of its fields. Raises
        `StatusError`."""
        model = await self._services.models.find(self._request.model or "")
        if self._request.max_output_tokens is None:
            num_tokens = min(SUMMARY_TOKENS, max(1, longest_context(model.card, None) // 4))
            self._request = msgspec.structs.replace(self._request, max_output_tokens=num_tokens)
        self._next = await self._pass(self._turns, self._offer)
        return self._next.plan, self._next.names

    async def run(self, caller: Caller) -> tuple[str, Usage]:
        """Write the summary. Call `begin` before. Raises `StatusError`."""
        assert self._next is not None
        now, left = self._next, self._turns
        usage = Usage(0, 0, 0)
        for _ in range(MAX_PASSES):
            summary, spent = await self._written(now, caller)
            usage = usage.plus(spent)
            if not summary and self._offer.tools:
                # The model called a tool instead.
                now = await self._pass(left, Offer(), least=min(len(left), now.num_turns))
                summary, spent = await self._written(now, caller)
                usage = usage.plus(spent)
            if not summary:
                raise StatusError(Reason.INTERNAL, "the model wrote no summary; try again, or send a shorter input")
            left = left[now.num_turns :]
            if not left:
                return summary, usage
            left = [Turn(ChatMessage(role="user", content=SUMMARY + summary), left[0].place), *left]
            now = await self._pass(left, self._offer, least=2)
        raise StatusError(
            Reason.CONTEXT_TOO_LONG, f"the input has more than {MAX_PASSES} times what a context takes", field="input"
        )

    async def kept(self, items: Sequence[dict[str, Any]], summary: dict[str, Any]) -> list[dict[str, Any]]:
        """The items that are shown before the summary: messages of the user, system and developer. If they fill more
        than half of the context with it, the oldest ones of the user are left to the summary."""
        messages = [item for item in items if is_kept(item)]
        model = await self._services.models.find(self._request.model or "")
        most = longest_context(model.card, None) // 2
        users = [position for position, item in enumerate(messages) if item["role"] == "user"]

        def without(num_dropped: int) -> list[dict[str, Any]]:
            dropped = {*users[:num_dropped]}
            return [item for position, item in enumerate(messages) if position not in dropped]

        async def fits(num_dropped: int) -> bool:
            chat = chat_of(self._request, turns_of((), [*without(num_dropped), summary]), Offer())
            try:
                with chat.names.in_callers_terms():
                    return await self._services.chats.count(chat.request) <= most
            except StatusError as error:
                if error.reason is not Reason.CONTEXT_TOO_LONG:
                    raise
                return False

        least, greatest = 0, len(users)
        while least < greatest:
            middle = (least + greatest) // 2
            if await fits(middle):
                greatest = middle
            else:
                least = middle + 1
        return without(least)

    async def _written(self, now: _Pass, caller: Caller) -> tuple[str, Usage]:
        text = _Text()
        with now.names.in_callers_terms():
            usage = await self._services.answering.gather(caller, [now.plan.plan], [text], now.plan.choices())
        return "".join(text.texts).strip(), usage

    async def _pass(self, turns: Sequence[Turn], offer: Offer, least: int = 1) -> _Pass:
        """Plan the summary of as many turns as fit into the context beside it. Raises `StatusError` if fewer than
        `least` fit."""
        # A part ends before any turn that is not the result of a call before it.
        ends = [i for i in range(least, len(turns)) if turns[i].message.role != "tool"] + [len(turns)]
        found: _Pass | None = None
        position = len(ends) - 1
        too_long: StatusError | None = None
        while ends:
            try:
                found = await self._planned(turns[: ends[position]], offer)
                ends = ends[position + 1 :]
            except StatusError as error:
                if error.reason is not Reason.CONTEXT_TOO_LONG:
                    raise
                too_long = too_long or error
                ends = ends[:position]
            position = len(ends) // 2
        if found is None:
            assert too_long is not None
            raise too_long
        return found

    async def _planned(self, turns: Sequence[Turn], offer: Offer) -> _Pass:
        asked = Turn(ChatMessage(role="user", content=_PROMPT), turns[-1].place)
        chat = chat_of(self._request, [*turns, asked], offer, shortens=False)
        with chat.names.in_callers_terms():
            plan = await self._services.chats.plan(chat.request, is_trial=True)
        return _Pass(plan, chat.names, len(turns))
