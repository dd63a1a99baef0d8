"""A vocabulary for the fake model: single bytes, some longer tokens, special ones, rows that are no token."""

from __future__ import annotations

from headrace.worker.grammar.compiler import Grammars, Vocabulary
from tests.worker.conftest import VOCAB_SIZE

EOS = 996
SPECIAL = 900
LONGER = [b"ab", b"abc", b'{"', b'":', b'",', b'"}', b"true", b"name", b" the", "é".encode(), "日".encode(), b"00"]
TOKEN_BYTES = [bytes([i]) for i in range(256)] + LONGER
VOCABULARY = Vocabulary(
    TOKEN_BYTES + [b""] * (SPECIAL - len(TOKEN_BYTES)) + [b"<|special|>"] + [b""] * (EOS - SPECIAL - 1) + [b"<|end|>"],
    frozenset({SPECIAL}),
)


def grammars() -> Grammars:
    """Over this vocabulary; nothing is compiled yet."""
    return Grammars(lambda: VOCABULARY, VOCAB_SIZE, [EOS])


def text_of(token_ids: list[int]) -> bytes:
    """The text of an answer, without its end."""
    return b"".join(VOCABULARY.token_bytes[token_id] for token_id in token_ids if token_id != EOS)
