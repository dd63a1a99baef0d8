"""Finds the sequence breakers of DRY: tokens that contain a text, or that begin a text which the next tokens complete
(pure). As in llama.cpp, a token with the whole text is a breaker by itself. A token that ends with a prefix of the text
is a breaker together with the tokens of the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

MAX_TAIL_TOKENS = 20


class Breakers(NamedTuple):
    """Single tokens, and sequences of several."""

    token_ids: tuple[int, ...] = ()
    sequences: tuple[tuple[int, ...], ...] = ()


NO_BREAKERS = Breakers()


def breakers_of(texts: Sequence[str], token_bytes: Sequence[bytes], encode: Callable[[str], Sequence[int]]) -> Breakers:
    """The tokens of a vocabulary at which any of the texts occurs. `encode` tokenizes the rest of a text."""
    single: set[int] = set()
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        if not text:
            continue
        raw = text.encode()
        single.update(token_id for token_id, word in enumerate(token_bytes) if raw in word)
        for length in range(1, len(raw)):
            beginning = raw[:length]
            heads = [token_id for token_id, word in enumerate(token_bytes) if word.endswith(beginning)]
            try:
                rest = raw[length:].decode()
            except UnicodeDecodeError:  # inside of a character, at which tokens rarely end
                continue
            tail = tuple(encode(rest))[:MAX_TAIL_TOKENS] if heads else ()
            found.update(((head, *tail), None) for head in heads if tail)
    return Breakers(tuple(sorted(single)), tuple(one for one in found if one[0] not in single))
