"""Streams in OpenAI's format: server-sent events from prepared bytes (pure).

A chunk is a constant head and tail around one JSON string. Usually only that string is encoded for each chunk:

    data: {"id":…,"choices":[{"index":0,"delta":{  "content":"text"  },"logprobs":null,"finish_reason":null}]}
    `-------------------- head -----------------'                    `------------------ tail ----------------'
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from headrace.gateway.chat.choice import Piece
from headrace.gateway.chat.generation import Usage
from headrace.gateway.chat.logprobs import ChatLogprobs, CompletionLogprobs
from headrace.gateway.chat.output import ChatPiece, ToolCall, new_call_id
from headrace.gateway.chat.output_parsers.output import ArgumentsDelta, CallDelta, ContentDelta, Delta, ReasoningDelta
from headrace.gateway.edge.wire import encode, padding
from headrace.gateway.openai.answers import (
    CompletionChoice,
    Identity,
    LastDelta,
    Shown,
    call_of,
    completion_logprobs_value,
    end_of,
    tokens_of,
    usage_of,
)

DONE = b"data: [DONE]\n\n"
_NO_LOGPROBS = b"null"


class _Events:
    """The parts that all chunks of one stream share."""

    def __init__(self, who: Identity, shown: Shown) -> None:
        self.head = b"data: " + encode(who)[:-1] + b',"choices":['
        self._shown = shown
        self._num_tokens = 0
        self._count()

    def take(self, index: int, piece: Piece | ChatPiece) -> None:
        """Count the tokens of a choice's piece that arrived, and note its time."""
        shown = self._shown
        if shown.running_usage:
            self._num_tokens += len(piece.token_ids)
        if shown.watch is not None:
            shown.watch.tick(piece, index)
        if shown.running_usage or shown.watch is not None:
            self._count()

    def _count(self) -> None:
        """Add the account so far to the end of chunks."""
        shown = self._shown
        close = b',"usage":null}\n\n' if shown.usage else b"}\n\n"
        if shown.running_usage:
            close = b',"usage":' + encode(tokens_of(Usage(shown.num_prompt_tokens, self._num_tokens, 0))) + b"}\n\n"
        self._set_close(self._timings() + close)

    def _timings(self) -> bytes:
        """The member with the times so far; none before the first token."""
        watch = self._shown.watch
        return b"" if watch is None or not watch.first_s else b',"timings":' + encode(self._shown.timings)

    def _set_close(self, close: bytes) -> None:
        self._close = close
        self._plain_tail = b',"logprobs":null,"finish_reason":null}]' + close

    def tail(self, logprobs: bytes = _NO_LOGPROBS, token_ids: Sequence[int] = ()) -> bytes:
        """The end of a chunk, after its text. `logprobs` is encoded JSON; `token_ids` are the chunk's tokens, if
        requested."""
        if logprobs is _NO_LOGPROBS and not token_ids:
            return self._plain_tail
        shown = b',"token_ids":' + encode(list(token_ids)) if token_ids else b""
        return b',"logprobs":' + logprobs + b',"finish_reason":null' + shown + b"}]" + self._close

    def padded(self, event: bytes, num_chars: int) -> bytes:
        """The event of a delta with `num_chars` characters, with padding if that is requested."""
        if not self._shown.pads:
            return event
        return event[:-3] + b',"obfuscation":"%b"}\n\n' % padding(num_chars).encode()

    def last(self, choice: LastDelta | CompletionChoice) -> bytes:
        """The last chunk of a choice."""
        return self.head + encode(choice) + b"]" + self._close

    def end(self, usage: Usage) -> bytes:
        """The last events of the stream."""
        if not self._shown.usage:
            return DONE
        return self.head + b'],"usage":' + encode(usage_of(usage)) + self._timings() + b"}\n\n" + DONE


class ChatStream:
    """Events of a streamed chat. `num_id_chars` is the length of the ids of tool calls."""

    def __init__(self, who: Identity, logprobs: ChatLogprobs | None, shown: Shown, num_id_chars: int = 24) -> None:
        self._events = _Events(replace(who, object="chat.completion.chunk"), shown)
        self._logprobs = logprobs
        self._shown = shown
        self._num_id_chars = num_id_chars
        self._delta_heads: dict[int, bytes] = {}

    def piece(self, index: int, piece: ChatPiece) -> bytes:
        """Events for a piece of a choice; none if it shows nothing. The first ones of a choice begin with its role."""
        events = b""
        head = self._delta_heads.get(index)
        if head is None:
            head = self._delta_heads[index] = self._events.head + b'{"index":%d,"delta":{' % index
            events = self._first(index, head)
        self._events.take(index, piece)
        hidden = () if self._shown.reasoning else (ReasoningDelta,)
        deltas = [self._delta(delta) for delta in piece.deltas if not isinstance(delta, hidden)]
        token_ids = piece.token_ids if self._shown.token_ids else ()
        logprobs = _NO_LOGPROBS
        if self._logprobs is not None and (deltas or piece.logprobs):
            logprobs = encode(self._logprobs.value(piece.logprobs))
        if not deltas and (token_ids or piece.logprobs):
            deltas = [b'"content":""']
        for delta in deltas:
            # The first event has the log-probabilities and tokens of all events.
            events += self._events.padded(head + delta + b"}" + self._events.tail(logprobs, token_ids), len(delta))
            logprobs = _NO_LOGPROBS
            token_ids = ()
        if piece.ending is None:
            return events
        return events + self._events.last(LastDelta(index=index, **end_of(piece.ending)))

    def _first(self, index: int, head: bytes) -> bytes:
        """The event with the role. That of the first choice has the prompt's tokens, if they are shown."""
        event = head + b'"role":"assistant","content":""}' + self._events.tail()
        if not self._shown.token_ids or index:
            return event
        return event[:-3] + b',"prompt_token_ids":' + encode(list(self._shown.prompts[0])) + b"}\n\n"

    def _delta(self, delta: Delta) -> bytes:
        """The members of a delta's JSON object."""
        match delta:
            case ContentDelta(text):
                return b'"content":' + encode(text)
            case ReasoningDelta(text):
                return b'"reasoning_content":' + encode(text)
            case ArgumentsDelta(index, text, is_custom):
                form = (
                    b'"tool_calls":[{"index":%d,"custom":{"input":%b}}]'
                    if is_custom
                    else b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]'
                )
                return form % (index, encode(text))
            case CallDelta(index, name, is_custom):
                call = ToolCall(new_call_id(self._num_id_chars), name, "", is_custom)
                return b'"tool_calls":[{"index":%d,' % index + encode(call_of(call))[1:] + b"]"

    def end(self, usage: Usage) -> bytes:
        """The last events of the stream."""
        return self._events.end(usage)


class CompletionStream:
    """Events of a streamed completion."""

    def __init__(self, who: Identity, logprobs: CompletionLogprobs | None, shown: Shown) -> None:
        self._events = _Events(who, shown)
        self._logprobs = logprobs
        self._shown = shown
        self._begun: set[int] = set()

    def piece(self, index: int, piece: Piece) -> bytes:
        """Events for a piece of a choice; none if it shows nothing. The first one of a choice has the echo."""
        is_first = index not in self._begun
        self._begun.add(index)
        self._events.take(index, piece)
        shown = self._shown
        text = shown.echoes[index] + piece.text if is_first and shown.echoes else piece.text
        token_ids = piece.token_ids if shown.token_ids else ()
        events = b""
        if text or token_ids or piece.logprobs or (is_first and (shown.echoes or shown.token_ids)):
            logprobs = _NO_LOGPROBS
            if self._logprobs is not None:
                logprobs = encode(completion_logprobs_value(self._logprobs, shown, index, piece, is_first))
            prompt = b""
            if is_first and shown.token_ids:
                prompt = b',"prompt_token_ids":' + encode(list(shown.prompts[index]))
            events = self._events.head + b'{"index":%d,"text":%b%b' % (index, encode(text), prompt)
            events = self._events.padded(events + self._events.tail(logprobs, token_ids), len(text))
        if piece.ending is None:
            return events
        return events + self._events.last(CompletionChoice(index=index, text="", logprobs=None, **end_of(piece.ending)))

    def end(self, usage: Usage) -> bytes:
        """The last events of the stream."""
        return self._events.end(usage)
