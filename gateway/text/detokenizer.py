"""Turns token ids into text, a few at a time (pure).

The pieces together equal the decoding of all tokens' bytes at once: a UTF-8 sequence that spans tokens is held back
until it is complete. Bytes that are not UTF-8 become U+FFFD as with `bytes.decode(errors="replace")`.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

_decoder_of_utf8 = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Decodes one sequence of tokens.

    `token_bytes` are the bytes of each token by id; ids in `skipped_ids`, and ids beyond the end of the table (rows
    that pad a model's vocabulary), have no text.
    """

    __slots__ = ("_decode", "_skipped_ids", "_token_bytes")

    def __init__(self, token_bytes: Sequence[bytes], skipped_ids: frozenset[int] = frozenset()) -> None:
        self._token_bytes = token_bytes
        self._skipped_ids = skipped_ids
        self._decode = _decoder_of_utf8("replace").decode

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a UTF-8 sequence is incomplete."""
        if token_id in self._skipped_ids or token_id >= len(self._token_bytes):
            return ""
        return self._decode(self._token_bytes[token_id])

    def finish(self) -> str:
        """The incomplete rest, as U+FFFD. No push may follow."""
        return self._decode(b"", True)


def detokenize(
    token_ids: Iterable[int], token_bytes: Sequence[bytes], skipped_ids: frozenset[int] = frozenset()
) -> str:
    """The text of all tokens at once."""
    size = len(token_bytes)
    whole = b"".join(token_bytes[i] for i in token_ids if i < size and i not in skipped_ids)
    return whole.decode(errors="replace")
