"""Deltas of reasoning, content and tool calls found in a model's text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import msgspec

from headrace.gateway.chat.output_parsers.source import SPACE, MismatchError, Source, Steps
from headrace.gateway.chat.output_parsers.wrapping import Wrapping

CUSTOM_INPUT = "input"
"""The only argument of a custom tool, which takes a text."""
Tools: TypeAlias = Mapping[str, Mapping[str, Any]]
"""The tools that were offered: the JSON schema of the parameters by name."""


class ContentDelta(msgspec.Struct, frozen=True):
    """More of the answer's text."""

    text: str


class ReasoningDelta(msgspec.Struct, frozen=True):
    """More of the reasoning."""

    text: str


class CallDelta(msgspec.Struct, frozen=True):
    """A tool call begins; its arguments follow."""

    index: int
    name: str
    is_custom: bool = False
    """It is the call of a custom tool."""


class ArgumentsDelta(msgspec.Struct, frozen=True):
    """The next part of a call's arguments.

    All parts of a call together are a JSON object, which is incomplete if the answer was cut off. For a custom tool
    they are any text.
    """

    index: int
    text: str
    is_custom: bool = False


Delta: TypeAlias = ContentDelta | ReasoningDelta | CallDelta | ArgumentsDelta


class Output:
    """Gathers deltas. Strips white space around content if there is reasoning or a call, and keeps it otherwise."""

    __slots__ = (
        "_argued",
        "_begun",
        "_reasoned",
        "_reasoning_space",
        "_space",
        "_trim",
        "_wrapping",
        "custom",
        "deltas",
        "num_calls",
        "spans",
    )

    def __init__(self, custom: frozenset[str] = frozenset(), around_answer: Sequence[tuple[str, str]] = ()) -> None:
        """`around_answer` are pairs of tags that the model may write around its content."""
        self.custom = custom
        """Names of custom tools."""
        self._wrapping = Wrapping(around_answer)
        self.deltas: list[Delta] = []
        """The deltas since the last call."""
        self.num_calls = 0
        self.spans: list[tuple[int, int]] = []
        """The spans of reasoning in the text, without markup: begins and ends, in characters."""
        self._space = ""
        self._begun = False
        self._trim = False
        self._reasoned = False
        self._reasoning_space = ""

    def content(self, text: str) -> None:
        """Add content. White space is held back until more content follows it."""
        text = self._wrapping.push(text)
        self._trim = self._trim or self._wrapping.is_found
        self._add(text)

    def _add(self, text: str) -> None:
        words = text.rstrip(SPACE)
        if not words:
            self._space += text
            return
        if not self._begun and self._trim:
            self._show(ContentDelta, words.lstrip(SPACE))
        else:
            self._show(ContentDelta, self._space + words)
        self._begun = True
        self._space = text[len(words) :]

    def reasoning(self, text: str) -> None:
        """Add reasoning. White space around it is removed."""
        self._trim = True
        words = text.rstrip(SPACE)
        if not words:
            self._reasoning_space += text
            return
        self._show(ReasoningDelta, self._reasoning_space + words if self._reasoned else words.lstrip(SPACE))
        self._reasoned = True
        self._reasoning_space = text[len(words) :]

    def separate(self) -> None:
        """The model has begun a new message: further content or reasoning starts on a new line."""
        if self._begun and not self._space.endswith("\n"):
            self._space += "\n"
        if self._reasoned and not self._reasoning_space.endswith("\n"):
            self._reasoning_space += "\n"

    def call(self, name: str) -> None:
        """Begin a call. The arguments that follow belong to it."""
        self._add(self._wrapping.finish())
        self._trim = True
        self.deltas.append(CallDelta(self.num_calls, name))
        self.num_calls += 1

    def arguments(self, text: str) -> None:
        """Add arguments to the last call."""
        index = self.num_calls - 1
        last = self.deltas[-1] if self.deltas else None
        if isinstance(last, ArgumentsDelta) and last.index == index:
            self.deltas[-1] = ArgumentsDelta(index, last.text + text)
        else:
            self.deltas.append(ArgumentsDelta(index, text))

    def finish(self) -> None:
        """End the text."""
        self._add(self._wrapping.finish())
        if self._space and not self._trim:
            self._show(ContentDelta, self._space)

    def take(self) -> list[Delta]:
        """Return the deltas since the last call."""
        taken, self.deltas = self.deltas, []
        return taken

    def _show(self, kind: type[ContentDelta] | type[ReasoningDelta], text: str) -> None:
        last = self.deltas[-1] if self.deltas else None
        if isinstance(last, kind):
            self.deltas[-1] = kind(last.text + text)
        else:
            self.deltas.append(kind(text))


def attempt(source: Source, output: Output, steps: Steps[None]) -> Steps[bool]:
    """Take steps that read a tool call. Returns whether they succeeded.

    If they fail before the call is shown, their text only looks like a call, and is content. If they fail later, the
    shown part of the call stays, and the rest is dropped.
    """
    shown = output.num_calls
    source.mark()
    try:
        yield from steps
    except MismatchError:
        cut_off = source.closed
        if output.num_calls == shown:
            if cut_off:
                source.pos = len(source.text)
            output.content(source.unmark())
        else:
            source.unmark()
            if cut_off:
                source.pos = len(source.text)
        return False
    source.unmark()
    return True
