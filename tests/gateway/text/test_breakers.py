"""Breakers of repetitions in the tokens of a vocabulary."""

from __future__ import annotations

from headrace.gateway.text.breakers import breakers_of

WORDS = [b"a", b"\n", b"a\n", b":", b"::", b"b:\n", b"\nUs", b"er", b"User", b"U", b"ser"]


def encode(text: str) -> list[int]:
    """The longest token first."""
    found = []
    while text:
        best = max((word for word in WORDS if text.encode().startswith(word)), key=len)
        found.append(WORDS.index(best))
        text = text[len(best.decode()) :]
    return found


def test_tokens_that_contain_the_text_are_breakers() -> None:
    assert breakers_of(["\n"], WORDS, encode) == ((1, 2, 5, 6), ())
    assert breakers_of([":", ""], WORDS, encode) == ((3, 4, 5), ())


def test_a_text_may_begin_in_one_token_and_end_in_others() -> None:
    """ "\\nUser" begins in tokens that end with its first characters, of which the longest is "\\nUs"."""
    single, sequences = breakers_of(["\nUser"], WORDS, encode)
    assert single == ()
    assert set(sequences) == {(1, 8), (2, 8), (5, 8), (6, 7)}


def test_what_is_a_breaker_alone_begins_no_other() -> None:
    single, sequences = breakers_of(["\n", "\nUser"], WORDS, encode)
    assert single == (1, 2, 5, 6)
    assert sequences == ()
