"""Texts at which the beams of a search end (pure).

A beam keeps the end of its text, which may be the beginning of a stop text. Texts are compared as UTF-8: bytes that are
one of these texts are so after decoding too, whatever comes before them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class StopTexts:
    """The stop texts of one search, over the bytes of the model's tokens."""

    __slots__ = ("_hidden_ids", "_num_kept", "_stops", "_token_bytes")

    def __init__(self, stops: Sequence[str], token_bytes: Sequence[bytes], hidden_ids: Collection[int]) -> None:
        """`token_bytes[id]` are the bytes of a token. Tokens in `hidden_ids`, and rows of the model that are not
        tokens, have no text."""
        assert all(stops), "an empty text would end every beam"
        self._stops = tuple(stop.encode() for stop in stops)
        self._num_kept = max(map(len, self._stops)) - 1
        self._token_bytes = token_bytes
        self._hidden_ids = hidden_ids

    def after(self, end: bytes, token_id: int) -> bytes | None:
        """The end of a text after this token, given the `end` before it; b"" at first. None if the token completes a
        stop text."""
        if token_id in self._hidden_ids or token_id >= len(self._token_bytes):
            return end
        text = end + self._token_bytes[token_id]
        if any(stop in text for stop in self._stops):
            return None
        return text[max(len(text) - self._num_kept, 0) :]
