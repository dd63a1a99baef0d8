"""The changes of a request's parameters to logits, in the form that every step reads."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np

from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.reduction import FloatArray, IndexArray


class BadWords:
    """Token sequences that an answer must not contain. A step looks only at those whose second to last token is the
    latest token of the answer, and compares all of one length at once."""

    __slots__ = ("_by_latest", "always")

    def __init__(self, words: Sequence[Sequence[int]], max_tokens: int) -> None:
        """The answer has at most `max_tokens` tokens, so longer words cannot occur."""
        self.always = {word[0] for word in words if len(word) == 1}
        """Words of one token."""
        # latest token -> number of tokens before the last -> these tokens -> last tokens
        self._by_latest: dict[int, dict[int, dict[bytes, set[int]]]] = {}
        for word in words:
            if 1 < len(word) <= max_tokens:
                lengths = self._by_latest.setdefault(word[-2], {})
                beginnings = lengths.setdefault(len(word) - 1, {})
                beginnings.setdefault(array("I", word[:-1]).tobytes(), set()).add(word[-1])

    def completing(self, request: Request) -> set[int]:
        """Tokens that would complete a word of several tokens. Only generated tokens can begin a word, not the end of
        the prompt."""
        found: set[int] = set()
        tokens, num_generated = request.token_ids, request.num_generated_tokens
        if num_generated and self._by_latest:
            for length, beginnings in self._by_latest.get(tokens[-1], {}).items():
                if length <= num_generated:
                    found |= beginnings.get(tokens[-length:].tobytes(), set())
        return found


class Edits:
    """The changes of one request. `biases` are added to the logits of `biased_ids`. If there are `allowed_ids`, only
    these may be chosen."""

    __slots__ = ("_always_banned", "_min_tokens", "_stop_ids", "_words", "allowed_ids", "biased_ids", "biases")

    def __init__(self, sampling: SamplingParams) -> None:
        self.biased_ids: IndexArray = np.array([token_id for token_id, _ in sampling.logit_bias], np.intp)
        self.biases: FloatArray = np.array([bias for _, bias in sampling.logit_bias], np.float32)
        self.allowed_ids: IndexArray = np.array(sampling.allowed_token_ids, np.intp)
        self._words = BadWords(sampling.bad_words, sampling.max_tokens)
        self._always_banned = _sorted(self._words.always)
        self._min_tokens, self._stop_ids = sampling.min_tokens, sampling.stop_token_ids

    def banned_ids(self, request: Request) -> IndexArray:
        """Tokens that would complete a bad word, and stop tokens before `min_tokens`; sorted."""
        banned = self._words.completing(request)
        if request.num_generated_tokens < self._min_tokens:
            banned |= self._stop_ids
        return _sorted(banned | self._words.always) if banned else self._always_banned


def _sorted(token_ids: set[int]) -> IndexArray:
    return np.array(sorted(token_ids), np.intp)
