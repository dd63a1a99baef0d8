"""Other shapes of a conversation, for chat templates that refuse it as it is (pure).

    one system turn   system turns at the head become one; later ones go into the next turn of the user
    no system turn    the system's text goes to the head of the first turn of the user
    joined            neighbours of one role become one turn, their texts joined by a blank line
    one call a turn   a turn with several tool calls becomes one turn for each, followed by its result

No text is lost or changed; only its place changes. Messages are in the form that templates expect.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Any

from headrace.gateway.text.content import Content
from headrace.gateway.text.content import joined as joined_contents

Message = Mapping[str, Any]

_SYSTEM = ("system", "developer")
_JOINABLE = (*_SYSTEM, "user", "assistant")
# What a message of the system may have besides its text if the text alone can go to another turn.
_TEXT_ONLY = frozenset({"role", "content", "name"})
AS_IS, ONE_SYSTEM_TURN, NO_SYSTEM_TURN = range(3)


@dataclass(frozen=True, slots=True)
class Shape:
    """The changes to make to a conversation before it is rendered. By default none."""

    systems: int = AS_IS
    joins: bool = False
    splits_calls: bool = False

    def of(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages in this shape; the same object if there is nothing to do."""
        if self.splits_calls:
            messages = with_one_call_a_turn(messages)
        if self.systems != AS_IS:
            messages = with_system_folded(messages, keeps_head=self.systems == ONE_SYSTEM_TURN)
        return joined(messages) if self.joins else messages

    def __str__(self) -> str:
        words = {ONE_SYSTEM_TURN: "later system turns folded into the user's", NO_SYSTEM_TURN: "the system turn folded"}
        told = [words[self.systems]] if self.systems else []
        told += ["equal roles joined"] if self.joins else []
        told += ["one tool call a turn"] if self.splits_calls else []
        return ", ".join(told) or "as it is"


_SHAPES = tuple(
    Shape(systems, joins, splits)
    for splits, joins, systems in product((False, True), (False, True), (AS_IS, ONE_SYSTEM_TURN, NO_SYSTEM_TURN))
)


def shapes_of(messages: Sequence[Message]) -> Iterator[tuple[Shape, Sequence[Message]]]:
    """The shapes to try after a refusal, those that change least first. No two give the same messages."""
    known: list[Sequence[Message]] = [messages]
    for shape in _SHAPES:
        shaped = shape.of(messages)
        if not any(shaped is other or shaped == other for other in known):
            known.append(shaped)
            yield shape, shaped


def traits_of(messages: Sequence[Message]) -> Hashable:
    """A key of the properties of a conversation for which templates may refuse it, independent of its texts and its
    length."""
    roles = ["system" if message["role"] in _SYSTEM else message["role"] for message in messages]
    num_leading = next((i for i, role in enumerate(roles) if role != "system"), len(roles))
    rest = roles[num_leading:]
    return (
        min(num_leading, 2),
        "developer" in (message["role"] for message in messages),
        "system" in rest,
        frozenset(before for before, role in pairwise(rest) if before == role),
        (*rest[:1], *rest[-1:]),
        "tool" in rest,
        any(len(message.get("tool_calls") or ()) > 1 for message in messages),
    )


def skeleton_of(messages: Sequence[Message]) -> list[Message]:
    """The conversation with each text replaced by a fixed one."""
    return [{**message, "content": "text"} if message.get("content") else message for message in messages]


def with_system_folded(messages: Sequence[Message], *, keeps_head: bool) -> Sequence[Message]:
    """The messages with the system's texts in the next turn of the user, or in a turn of their own. `keeps_head` leaves
    one turn of the system at the head, if there is one."""
    systems = [message for message in messages if message["role"] in _SYSTEM]
    if not systems or any(message.keys() - _TEXT_ONLY for message in systems[keeps_head:]):
        return messages
    num_leading = next((i for i, message in enumerate(messages) if message["role"] not in _SYSTEM), len(messages))
    leading, rest = messages[:num_leading], messages[num_leading:]
    if keeps_head and len(systems) == 1 and leading:
        return messages
    found: list[Message] = []
    waiting: list[Content | None] = [message["content"] for message in leading]
    if keeps_head and leading:
        found, waiting = [{**leading[0], "content": _text(waiting)}], []
    for message in rest:
        if message["role"] in _SYSTEM:
            waiting.append(message["content"])
        elif waiting and message["role"] == "user":
            found.append({**message, "content": _text([*waiting, message["content"]])})
            waiting = []
        else:
            if waiting and message["role"] != "tool":  # nothing may come between a call and its result
                _add_said(found, waiting)
                waiting = []
            found.append(message)
    if waiting:
        _add_said(found, waiting)
    return found


def _add_said(found: list[Message], texts: Sequence[Content | None]) -> None:
    """Add texts to the last turn if it is the user's, or else as a turn of the user."""
    if found and found[-1]["role"] == "user":
        found[-1] = {**found[-1], "content": _text([found[-1]["content"], *texts])}
    else:
        found.append({"role": "user", "content": _text(texts)})


def joined(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with neighbours of one role as one. Results of tools stay apart."""
    runs: list[list[Message]] = []
    for message in messages:
        if runs and message["role"] in _JOINABLE and _kind(message) == _kind(runs[-1][0]):
            runs[-1].append(message)
        else:
            runs.append([message])
    return messages if len(runs) == len(messages) else [run[0] if len(run) == 1 else _one_of(run) for run in runs]


def _kind(message: Message) -> str:
    return "system" if message["role"] in _SYSTEM else str(message["role"])


def _one_of(run: Sequence[Message]) -> Message:
    """One message of several of one role. A field that texts can have is joined, others are those of the last."""
    found: dict[str, Any] = {}
    for message in run:
        found.update(message)
    found["role"] = run[0]["role"]
    for name in ("content", "reasoning_content", "thinking"):
        if name in found:
            found[name] = _text([message.get(name) for message in run])
    if calls := [call for message in run for call in message.get("tool_calls") or ()]:
        found["tool_calls"] = calls
    return found


def with_one_call_a_turn(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages with each tool call in a turn of its own, followed by its result."""
    if not any(len(message.get("tool_calls") or ()) > 1 for message in messages):
        return messages
    found: list[Message] = []
    position = 0
    while position < len(messages):
        message = messages[position]
        position += 1
        calls = message.get("tool_calls") or ()
        if len(calls) < 2:
            found.append(message)
            continue
        results: list[Message] = []
        while position < len(messages) and messages[position]["role"] == "tool":
            results.append(messages[position])
            position += 1
        found += _turns_of(message, calls, results)
    return found


def _turns_of(message: Message, calls: Sequence[Message], results: list[Message]) -> list[Message]:
    """A turn for each call, each followed by the result with its id, or by the next one without a call's id."""
    ids = {call.get("id") for call in calls} - {None}
    named: dict[Any, list[Message]] = {}
    unnamed: list[Message] = []
    for result in results:
        name = result.get("tool_call_id")
        (named.setdefault(name, []) if name in ids else unnamed).append(result)
    later = {"role": message["role"], "content": None if message.get("content") is None else ""}
    found: list[Message] = []
    for number, call in enumerate(calls):
        found.append({**(message if number == 0 else later), "tool_calls": [call]})
        own = named.pop(call.get("id"), [])
        if not own and unnamed:
            own = [unnamed.pop(0)]
        found += own
    return [*found, *unnamed]


def _text(contents: Sequence[Content | None]) -> Content:
    """The contents, joined by blank lines. Empty ones are left out."""
    return joined_contents(contents, "\n\n")
