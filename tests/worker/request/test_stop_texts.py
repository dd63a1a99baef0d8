"""Beams end with the token at which the gateway cuts their text."""

from __future__ import annotations

import random

import pytest

from headrace.gateway.text.detokenizer import Detokenizer
from headrace.gateway.text.stop_strings import StopMatcher
from headrace.worker.request.stop_texts import StopTexts
from tests.worker.vocabulary import SPECIAL, TOKEN_BYTES, VOCABULARY

STOPS = [["ab"], ["日é"], ["abca", "b\n"], ["é"], ["<|special|>a"], ["a<|sp"], ["ccc", "aab", "0日0"]]
LIKELY = [*b"abc\n0<", *"é日".encode(), *range(256, len(TOKEN_BYTES)), SPECIAL, 10**6]


@pytest.mark.parametrize("stops", STOPS, ids=" ".join)
@pytest.mark.parametrize("shows_special", [True, False])
def test_the_token_that_completes_a_text_is_the_same_in_gateway_and_worker(
    stops: list[str], shows_special: bool
) -> None:
    hidden = frozenset[int]() if shows_special else VOCABULARY.special_ids
    texts = StopTexts(stops, VOCABULARY.token_bytes, hidden)
    rng = random.Random(repr(stops))
    ends = 0
    for _ in range(300):
        detokenizer, matcher = Detokenizer(VOCABULARY.token_bytes, hidden), StopMatcher(stops)
        end: bytes | None = b""
        for _ in range(30):
            token_id = rng.choice(LIKELY)
            decoded = detokenizer.push(token_id)
            if decoded:
                matcher.push(decoded)
            assert end is not None
            end = texts.after(end, token_id)
            assert (end is None) == (matcher.match is not None)
            if end is None:
                ends += 1
                break
            assert len(end) < max(len(stop.encode()) for stop in stops)
    needs_special = all("<|sp" in stop for stop in stops)
    assert (ends > 0) == (shows_special or not needs_special)
