"""Reads the stream of one answer into its record, as the pieces arrive."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from headrace.bench.apis import Api, error_text
from headrace.bench.connection import ExchangeError
from headrace.bench.record import Record

_MAX_ERROR_BYTES = 4096


class Stream:
    """A listener of one answer. `answered` is called when the record is complete."""

    __slots__ = ("_answered", "_has_prefix", "_marks_end", "_read", "_record", "_refusal", "_rest", "_status")

    def __init__(self, api: Api, record: Record, answered: Callable[[], None]) -> None:
        self._read = api.read
        self._has_prefix = api.has_prefix
        self._marks_end = api.marks_end
        self._record = record
        self._answered = answered
        self._rest = b""
        self._refusal: bytearray | None = None
        self._status = 0

    def began(self, status: int, content_type: str) -> None:
        """Decide what the body is."""
        self._status = status
        if status != 200:
            self._refusal = bytearray()
            self._record.error_kind = f"HTTP {status}"
        elif self._has_prefix and not content_type.startswith("text/event-stream"):
            self._refusal = bytearray()
            self._record.error_kind = "not a stream"

    def received(self, piece: bytes, now_s: float) -> None:
        """Take the events that a piece completes."""
        if self._refusal is not None:
            if len(self._refusal) < _MAX_ERROR_BYTES:
                self._refusal += piece
            return
        if not self._rest and self._has_prefix and piece.startswith(b"data: ") and piece.find(b"\n") == len(piece) - 2:
            self._event(piece[6:-2], now_s)  # one whole event, the usual case
            return
        *lines, self._rest = (self._rest + piece if self._rest else piece).split(b"\n")
        for line in lines:
            if self._has_prefix:
                if line.startswith(b"data:"):
                    self._event(line[5:].strip(), now_s)
            elif line.strip():
                self._event(line, now_s)

    def ended(self, error: ExchangeError | None) -> None:
        """Complete the record after the last byte. An answer that breaks off is an error."""
        record = self._record
        if error is not None:
            if not record.error_kind:
                record.error_kind, record.error = error.kind, str(error)
        elif self._refusal is not None:
            record.error = error_text(bytes(self._refusal))
        elif self._marks_end and not record.error_kind and not (record.is_finished or record.finish_reason):
            record.error_kind, record.error = "broken off", "the stream ended without the end of an answer"
        self._answered()

    def _event(self, payload: bytes, now_s: float) -> None:
        record = self._record
        try:
            piece = self._read(payload)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if not record.error_kind:
                shown = payload[:100].decode(errors="replace")
                record.error_kind, record.error = "malformed", f"an event is not one of this API: {error}: {shown}"
            return
        if isinstance(piece, str):
            record.ended_s = now_s
            record.times.append(now_s)
            record.pieces.append(piece)
            return
        if piece.error:
            record.error_kind, record.error = "error in the stream", piece.error
            return
        if piece.is_of_answer:
            record.ended_s = now_s
            if piece.has_content:
                record.times.append(now_s)
                record.pieces.append(piece.text)
            if piece.finish_reason:
                record.finish_reason = piece.finish_reason
        if piece.is_last:
            record.is_finished = True
        if piece.prompt_tokens is not None:
            record.usage_prompt_tokens = piece.prompt_tokens
        if piece.cached_tokens is not None:
            record.cached_tokens = piece.cached_tokens
        if piece.completion_tokens is not None:
            before = (record.usage_completion_tokens or 0) if piece.counts_itself else 0
            record.usage_completion_tokens = before + piece.completion_tokens
