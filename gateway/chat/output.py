"""Splits the text of a chat's choice into reasoning, content and tool calls (pure).

    Piece -> OutputParser -> ChatPiece

One instance reads one choice, for streams and whole answers alike.
"""

from __future__ import annotations

import secrets
from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from headrace.gateway.chat.choice import Ending, Piece, TokenLogprob
from headrace.gateway.chat.custom_input import CustomInput
from headrace.gateway.chat.formats import ModelFormat
from headrace.gateway.chat.output_parsers.families import OutputFormat, OutputParser
from headrace.gateway.chat.output_parsers.output import ArgumentsDelta, CallDelta, ContentDelta, Delta, ReasoningDelta
from headrace.gateway.chat.tool_grammar import tool_structure
from headrace.gateway.chat.tools import ToolUse
from headrace.gateway.checks import unsupported
from headrace.gateway.structure.fields import Structure


class ChatPiece(msgspec.Struct, frozen=True):
    """The next part of a chat's choice. Only the last piece has an ending."""

    deltas: Sequence[Delta]
    logprobs: Sequence[TokenLogprob]
    ending: Ending | None
    token_ids: Sequence[int] = ()
    prompt_logprobs: Sequence[TokenLogprob] = ()
    num_cached_tokens: int = 0
    """With the first piece: prompt tokens that were cached."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The settings for parsing the answers of one request."""

    output: OutputFormat
    use: ToolUse
    inside_reasoning: bool
    shown_ids: frozenset[int]
    """Special tokens that are markup to the parser."""
    structure: Structure | None = None
    """The constraint of the answer, with that of its calls of tools."""

    @property
    def num_id_chars(self) -> int:
        """Length of the ids of calls, without their prefix."""
        return 24 if self.output.tools is None else self.output.tools.num_id_chars

    def choice(self) -> ChatChoice:
        """The reader of one choice."""
        if not self.use.schemas and self.output.reasoning is None and not self.output.is_harmony:
            return ChatChoice(None)
        parser = OutputParser(
            self.output, self.use.schemas, inside_reasoning=self.inside_reasoning, custom=self.use.custom
        )
        return ChatChoice(parser, self.use)


def reading_of(
    form: ModelFormat, use: ToolUse, prompt_ending: str, goes_on: bool, content: Structure | None = None
) -> Reading:
    """How to constrain and read the answers to a prompt with this end.

    `goes_on`: the prompt ends within the final message. `content` is the constraint of an answer without calls.
    Raises `StatusError` if there are tools and the model's format of calls is unknown, or if the request cannot be
    enforced for it.
    """
    output = form.output
    if use.schemas and output.tools is None:
        raise unsupported(
            "tools", "tools is not supported: the model's format of tool calls is unknown (--tool-parser)"
        )
    parses_tools = bool(use.schemas) or output.is_harmony
    formats = [one for one in (output.tools if parses_tools else None, output.reasoning) if one is not None]
    markers = {marker for one in formats for marker in one.markers}
    inside = False
    if output.reasoning is not None and output.reasoning.tags is not None and (content is None or use.schemas):
        opening, closing = output.reasoning.tags
        end = prompt_ending.rstrip()
        inside = end.endswith(opening) or (output.reasoning.is_open and not end.endswith(closing))
        if goes_on:
            inside = prompt_ending.rfind(opening) > prompt_ending.rfind(closing)
    shown = frozenset(token_id for marker, token_id in form.marker_ids.items() if marker in markers)
    return Reading(output, use, inside, shown, tool_structure(form, use, prompt_ending, inside, content))


class ChatChoice:
    """One choice as it comes in. Push every piece; after one with an ending nothing may be pushed."""

    def __init__(self, parser: OutputParser | None, use: ToolUse | None = None) -> None:
        self._parser = parser
        self._use = use or ToolUse()
        self._token_offsets = array("q")
        self._inputs: dict[int, CustomInput] = {}
        """Of the calls of custom tools that are not complete, by index."""

    def push(self, piece: Piece) -> ChatPiece:
        """The next piece of the chat."""
        parser = self._parser
        if parser is None:
            return _chat_piece((ContentDelta(piece.text),) if piece.text else (), piece, piece.ending)
        self._token_offsets.extend(piece.token_offsets)
        deltas = parser.push(piece.text)
        if piece.ending is None:
            return _chat_piece(self._wanted(deltas), piece, None)
        deltas += parser.finish()
        wanted = [*self._wanted(deltas), *self._rest_of_inputs()]
        return _chat_piece(wanted, piece, self._ending(piece.ending))

    def _wanted(self, deltas: list[Delta]) -> Sequence[Delta]:
        """Keep the first call only, unless calls may be parallel. With a required call, content is cut-off markup."""
        if self._use.required:
            deltas = [delta for delta in deltas if not isinstance(delta, ContentDelta)]
        if not self._use.parallel:
            deltas = [delta for delta in deltas if not isinstance(delta, CallDelta | ArgumentsDelta) or not delta.index]
        return [own for delta in deltas for own in self._of_kind(delta)] if self._use.custom else deltas

    def _of_kind(self, delta: Delta) -> Iterator[Delta]:
        """Yield the delta. For a call of a custom tool, yield its text instead of its arguments."""
        if isinstance(delta, CallDelta):
            yield from self._rest_of_inputs()
            if delta.name in self._use.custom:
                self._inputs[delta.index] = CustomInput()
                delta = CallDelta(delta.index, delta.name, is_custom=True)
        elif isinstance(delta, ArgumentsDelta) and delta.index in self._inputs:
            text = self._inputs[delta.index].push(delta.text)
            if not text:
                return
            delta = ArgumentsDelta(delta.index, text, is_custom=True)
        yield delta

    def _rest_of_inputs(self) -> Iterator[Delta]:
        """Yield the remaining text of custom calls, because the calls so far are complete."""
        for index, custom in self._inputs.items():
            if text := custom.finish():
                yield ArgumentsDelta(index, text, is_custom=True)
        self._inputs.clear()

    def _ending(self, ending: Ending) -> Ending:
        assert self._parser is not None
        num_reasoning = 0
        for begin, end in self._parser.reasoning_spans:
            num_reasoning += bisect_left(self._token_offsets, end) - bisect_left(self._token_offsets, begin)
        reason = ending.reason
        if reason == "stop" and self._parser.num_calls and not self._use.named:
            reason = "tool_calls"
        return replace(ending, reason=reason, num_reasoning_tokens=num_reasoning)


def _chat_piece(deltas: Sequence[Delta], piece: Piece, ending: Ending | None) -> ChatPiece:
    return ChatPiece(deltas, piece.logprobs, ending, piece.token_ids, piece.prompt_logprobs, piece.num_cached_tokens)


@dataclass(slots=True)
class ToolCall:
    """A call of a whole answer."""

    call_id: str
    name: str
    arguments: str
    """JSON; any text of a custom tool."""
    is_custom: bool = False


class WholeChat:
    """Gathers the pieces of one choice for an answer that is not streamed."""

    def __init__(self, num_id_chars: int) -> None:
        self._num_id_chars = num_id_chars
        self._contents: list[str] = []
        self._reasonings: list[str] = []
        self._arguments: list[list[str]] = []
        self._calls: list[tuple[str, str, bool]] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.token_ids: list[int] = []
        self.ending: Ending | None = None

    def push(self, piece: ChatPiece) -> None:
        """Parse the next piece."""
        for delta in piece.deltas:
            match delta:
                case ContentDelta(text):
                    self._contents.append(text)
                case ReasoningDelta(text):
                    self._reasonings.append(text)
                case CallDelta(_, name, is_custom):
                    self._calls.append((new_call_id(self._num_id_chars), name, is_custom))
                    self._arguments.append([])
                case ArgumentsDelta(index, text):
                    self._arguments[index].append(text)
        self.logprobs.extend(piece.logprobs)
        self.prompt_logprobs.extend(piece.prompt_logprobs)
        self.token_ids.extend(piece.token_ids)
        self.ending = piece.ending

    @property
    def content(self) -> str:
        """The text so far."""
        return "".join(self._contents)

    @property
    def reasoning(self) -> str:
        """The reasoning so far."""
        return "".join(self._reasonings)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls so far."""
        return [
            ToolCall(call_id, name, "".join(parts), is_custom)
            for (call_id, name, is_custom), parts in zip(self._calls, self._arguments, strict=True)
        ]


def new_call_id(num_chars: int) -> str:
    """A fresh id for a call. Short ids have no prefix: templates that want them accept only letters and digits."""
    token = secrets.token_hex(num_chars // 2 + 1)[:num_chars]
    return f"call_{token}" if num_chars >= 24 else token
