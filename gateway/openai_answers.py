"""Answers on the OpenAI wire: whole ones, and streams of server-sent events from prepared bytes (pure).

A chunk of a stream is a constant head and tail around one JSON string; only that string is encoded per chunk:

    data: {"id":…,"choices":[{"index":0,"delta":{  "content":"text"  },"logprobs":null,"finish_reason":null}]}
    `-------------------- head -----------------'                    `------------------ tail ----------------'

The concatenation of a stream equals the whole answer: both are made of the same pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from headrace.gateway.chat_output import ChatPiece, WholeChat, new_call_id
from headrace.gateway.choice import Ending, Piece, TokenLogprob
from headrace.gateway.failures import Failure
from headrace.gateway.generation import Usage
from headrace.gateway.output_parsers.output import ArgumentsDelta, CallDelta, ContentDelta, Delta, ReasoningDelta
from headrace.protos.worker_pb2 import ModelCard

DONE = b"data: [DONE]\n\n"
LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

encode = msgspec.json.encode


class Identity(msgspec.Struct, frozen=True):
    """What all chunks of an answer have in common."""

    id: str
    created: int
    model: str
    system_fingerprint: str


def identity(kind: str, request_id: str, created_s: int, card: ModelCard) -> Identity:
    """Identity of an answer; `kind` is `chatcmpl` or `cmpl`."""
    return Identity(f"{kind}-{request_id}", created_s, card.name, f"fp_{card.fingerprint[:12]}")


def usage_value(usage: Usage) -> dict[str, Any]:
    """The `usage` object."""
    return {
        "prompt_tokens": usage.num_prompt_tokens,
        "completion_tokens": usage.num_generated_tokens,
        "total_tokens": usage.num_prompt_tokens + usage.num_generated_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.num_reasoning_tokens},
    }


class _OpenAiErrors:
    """The one shape of all errors of OpenAI's protocol."""

    def whole(self, failure: Failure) -> bytes:
        """The error object."""
        error = {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.code}
        return encode({"error": error})

    def event(self, failure: Failure) -> bytes:
        """The event that ends a stream which failed: no chunk and no [DONE] may follow."""
        return b"data: " + self.whole(failure) + b"\n\n"


OPENAI_ERRORS = _OpenAiErrors()


class ChatLogprobs:
    """The `logprobs` of a chat choice."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes

    def value(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The object for some tokens of a choice; those of later tokens are appended to its `content`."""
        content = []
        for one in logprobs:
            top = [self._token(token_id, logprob) for token_id, logprob in one.top]
            content.append({**self._token(one.token_id, one.logprob), "top_logprobs": top})
        return {"content": content, "refusal": None}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = token_bytes_of(self._token_bytes, token_id)
        return {
            "token": raw.decode(errors="replace"),
            "logprob": max(logprob, LEAST_LOGPROB),
            "bytes": list(raw),
        }


class CompletionLogprobs:
    """The `logprobs` of a completion choice."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        self._token_bytes = token_bytes

    def value(self, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The object for some tokens of a choice; those of later tokens are appended to each of its lists."""
        ones = list(logprobs)
        return {
            "tokens": [self._text(one.token_id) for one in ones],
            "token_logprobs": [max(one.logprob, LEAST_LOGPROB) for one in ones],
            "top_logprobs": [
                {self._text(token_id): max(logprob, LEAST_LOGPROB) for token_id, logprob in reversed(one.top)}
                for one in ones
            ],
            "text_offset": [one.offset for one in ones],
        }

    def _text(self, token_id: int) -> str:
        return token_bytes_of(self._token_bytes, token_id).decode(errors="replace")


def token_bytes_of(token_bytes: Sequence[bytes], token_id: int) -> bytes:
    """Bytes of a token; none for rows that a model's vocabulary is padded with."""
    return token_bytes[token_id] if token_id < len(token_bytes) else b""


class ChatStream:
    """Events of a streamed chat. `num_id_chars` is the length of the ids of tool calls."""

    def __init__(self, who: Identity, logprobs: ChatLogprobs | None, with_usage: bool, num_id_chars: int = 24) -> None:
        self._head = _chunk_head(who, "chat.completion.chunk")
        self._null_usage = b',"usage":null' if with_usage else b""
        self._tail = b'},"logprobs":null,"finish_reason":null}]' + self._null_usage + b"}\n\n"
        self._logprobs = logprobs
        self._num_id_chars = num_id_chars
        self._delta_heads: dict[int, bytes] = {}
        self._with_usage = with_usage

    def piece(self, index: int, piece: ChatPiece) -> bytes:
        """Events for a piece of a choice; none if it shows nothing. The first ones of a choice begin with its role."""
        events = b""
        head = self._delta_heads.get(index)
        if head is None:
            head = self._delta_heads[index] = self._head + b'{"index":%d,"delta":{' % index
            events = head + b'"role":"assistant","content":""' + self._tail
        deltas = [self._delta(delta) for delta in piece.deltas]
        tail = self._tail
        if self._logprobs is not None and (deltas or piece.logprobs):
            shown = encode(self._logprobs.value(piece.logprobs))
            tail = b'},"logprobs":' + shown + b',"finish_reason":null}]' + self._null_usage + b"}\n\n"
            deltas = deltas or [b'"content":""']
        for delta in deltas:
            events += head + delta + tail
            tail = self._tail  # the first event has the log-probabilities of all
        return events if piece.ending is None else events + self._last(index, piece.ending)

    def _delta(self, delta: Delta) -> bytes:
        """The inside of a delta's JSON object."""
        match delta:
            case ContentDelta(text):
                return b'"content":' + encode(text)
            case ReasoningDelta(text):
                return b'"reasoning_content":' + encode(text)
            case ArgumentsDelta(index, text):
                return b'"tool_calls":[{"index":%d,"function":{"arguments":%b}}]' % (index, encode(text))
            case CallDelta(index, name):
                function = {"name": name, "arguments": ""}
                call = {"index": index, "id": new_call_id(self._num_id_chars), "type": "function", "function": function}
                return b'"tool_calls":[' + encode(call) + b"]"

    def _last(self, index: int, ending: Ending) -> bytes:
        choice = {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": ending.reason,
            "stop_reason": ending.stop_reason,
        }
        return self._head + encode(choice) + b"]" + self._null_usage + b"}\n\n"

    def end(self, usage: Usage) -> bytes:
        """The last events of the stream."""
        return _end(self._head, usage if self._with_usage else None)


class CompletionStream:
    """Events of a streamed completion. `echoes` are the prompts that choices begin with, by index; empty for none."""

    def __init__(
        self, who: Identity, logprobs: CompletionLogprobs | None, with_usage: bool, echoes: Sequence[str] = ()
    ) -> None:
        self._head = _chunk_head(who, "text_completion")
        self._null_usage = b',"usage":null' if with_usage else b""
        self._tail = b',"logprobs":null,"finish_reason":null}]' + self._null_usage + b"}\n\n"
        self._logprobs = logprobs
        self._with_usage = with_usage
        self._echoes = dict(enumerate(echoes))

    def piece(self, index: int, piece: Piece) -> bytes:
        """Events for a piece of a choice; none if it shows nothing."""
        text = self._echoes.pop(index) + piece.text if index in self._echoes else piece.text
        events = b""
        if text or piece.logprobs:
            events = self._head + b'{"index":%d,"text":' % index + encode(text)
            if self._logprobs is None:
                events += self._tail
            else:
                shown = encode(self._logprobs.value(piece.logprobs))
                events += b',"logprobs":' + shown + b',"finish_reason":null}]' + self._null_usage + b"}\n\n"
        return events if piece.ending is None else events + self._last(index, piece.ending)

    def _last(self, index: int, ending: Ending) -> bytes:
        choice = {
            "index": index,
            "text": "",
            "logprobs": None,
            "finish_reason": ending.reason,
            "stop_reason": ending.stop_reason,
        }
        return self._head + encode(choice) + b"]" + self._null_usage + b"}\n\n"

    def end(self, usage: Usage) -> bytes:
        """The last events of the stream."""
        return _end(self._head, usage if self._with_usage else None)


def _chunk_head(who: Identity, kind: str) -> bytes:
    common = {
        "id": who.id,
        "object": kind,
        "created": who.created,
        "model": who.model,
        "system_fingerprint": who.system_fingerprint,
    }
    return b"data: " + encode(common)[:-1] + b',"choices":['


def _end(head: bytes, usage: Usage | None) -> bytes:
    if usage is None:
        return DONE
    return head + b'],"usage":' + encode(usage_value(usage)) + b"}\n\n" + DONE


class WholeChoice:
    """Gathers the pieces of one completion for an answer that is not streamed."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self.logprobs: list[TokenLogprob] = []
        self.ending: Ending | None = None

    def push(self, piece: Piece) -> None:
        """Take the next piece."""
        self._texts.append(piece.text)
        self.logprobs.extend(piece.logprobs)
        self.ending = piece.ending

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self._texts)


def whole_chat(who: Identity, choices: Sequence[WholeChat], logprobs: ChatLogprobs | None, usage: Usage) -> bytes:
    """Body of a chat's answer."""
    values = []
    for index, choice in enumerate(choices):
        assert choice.ending is not None
        values.append(
            {
                "index": index,
                "message": message_value(choice),
                "logprobs": None if logprobs is None else logprobs.value(choice.logprobs),
                "finish_reason": choice.ending.reason,
                "stop_reason": choice.ending.stop_reason,
            }
        )
    return _whole(who, "chat.completion", values, usage)


def message_value(choice: WholeChat) -> dict[str, Any]:
    """The message of a chat's choice. Reasoning and calls are there if there were any."""
    calls = [
        {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in choice.calls
    ]
    message: dict[str, Any] = {
        "role": "assistant",
        "content": None if calls and not choice.content else choice.content,
        "refusal": None,
    }
    if choice.reasoning:
        message["reasoning_content"] = choice.reasoning
    if calls:
        message["tool_calls"] = calls
    return message


def whole_completion(
    who: Identity,
    choices: Sequence[WholeChoice],
    logprobs: CompletionLogprobs | None,
    usage: Usage,
    echoes: Sequence[str] = (),
) -> bytes:
    """Body of a completion's answer."""
    values = []
    for index, choice in enumerate(choices):
        assert choice.ending is not None
        values.append(
            {
                "index": index,
                "text": echoes[index] + choice.text if echoes else choice.text,
                "logprobs": None if logprobs is None else logprobs.value(choice.logprobs),
                "finish_reason": choice.ending.reason,
                "stop_reason": choice.ending.stop_reason,
            }
        )
    return _whole(who, "text_completion", values, usage)


def _whole(who: Identity, kind: str, choices: list[dict[str, Any]], usage: Usage) -> bytes:
    return encode(
        {
            "id": who.id,
            "object": kind,
            "created": who.created,
            "model": who.model,
            "system_fingerprint": who.system_fingerprint,
            "choices": choices,
            "usage": usage_value(usage),
        }
    )


def model_value(card: ModelCard) -> dict[str, Any]:
    """A model as GET /v1/models shows it."""
    return {
        "id": card.name,
        "object": "model",
        "created": card.created_s,
        "owned_by": "headrace",
        "root": card.name,
        "parent": None,
        "max_model_len": card.max_context_tokens,
    }
