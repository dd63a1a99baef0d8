"""DRY ("don't repeat yourself"): lowers the logit of tokens that would continue a repetition. As in llama.cpp.

    tokens     a b c d x a b c          lag 5: the last 3 tokens are those that ended 5 tokens earlier
               \\___/     \\___/           so d would make it 4, and loses multiplier * base ^ (3 - allowed length)

A repetition counts only back to the latest breaker, such as the end of a line. Lengths of repetitions are kept for all
lags, and a new token changes each of them at once: it makes them longer by one, or 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.reduction import FloatArray, IndexArray

# The natural logarithm of the largest float32.
_LARGEST_EXPONENT = 88.7228391
_NONE: tuple[IndexArray, FloatArray] = (np.zeros(0, np.intp), np.zeros(0, np.float32))


class DryPenalty:
    """The repetitions of one request. Everything follows from its tokens, so a resumed request has the same ones."""

    def __init__(self, sampling: SamplingParams) -> None:
        self._multiplier, self._base = sampling.dry_multiplier, sampling.dry_base
        self._allowed = sampling.dry_allowed_length
        self._most_tokens = sampling.dry_penalty_last_n
        self._breakers = sampling.dry_breakers
        largest = math.log(self._base)
        self._most_exponent = int(_LARGEST_EXPONENT / largest) if self._base > 1.000001 else 0
        self._tokens = np.zeros(0, np.uint32)
        self._num_tokens = 0
        self._lengths: npt.NDArray[np.int32] = np.zeros(0, np.int32)
        """At i: how many tokens before the last one's end repeat those that ended at lag i + 1."""
        self._breaker_head = self._breaker_end = -1
        """Where the latest breaker begins, and its last token."""

    def penalties(self, request: Request) -> tuple[IndexArray, FloatArray]:
        """Tokens `[n]`, and the amounts to subtract from their logits."""
        self._count(request)
        size = self._num_tokens
        window = size if self._most_tokens < 0 else min(size, self._most_tokens)
        longest = window
        if self._breaker_head >= size - window:
            longest = size - 1 - self._breaker_end
        if window <= self._allowed or longest < self._allowed:
            return _NONE
        lags = np.arange(1, window)
        lengths = np.minimum(np.minimum(self._lengths[: window - 1], window - lags), longest)
        lags = lags[lengths >= self._allowed]
        if not len(lags):
            return _NONE
        # The token behind the repeated ones.
        following = self._tokens[size - lags]
        token_ids, which = np.unique(following, return_inverse=True)
        most = np.zeros(len(token_ids), np.int32)
        np.maximum.at(most, which, lengths[lags - 1])
        is_text = token_ids < FIRST_PSEUDO_TOKEN
        exponents = (most - self._allowed).astype(np.float64)
        if self._most_exponent:
            exponents = np.minimum(exponents, self._most_exponent)
        lost = np.minimum(self._multiplier * self._base**exponents, np.finfo(np.float32).max / 4)
        return token_ids[is_text].astype(np.intp), lost[is_text].astype(np.float32)

    def _count(self, request: Request) -> None:
        """Add the tokens that the request has got since the last call."""
        tokens = request.token_ids
        if len(tokens) < self._num_tokens or self._num_tokens == 0:
            self._begin(tokens)
            return
        for place in range(self._num_tokens, len(tokens)):
            token_id = tokens[place]
            if place == len(self._tokens):
                self._tokens = np.concatenate([self._tokens, np.zeros(max(64, place), np.uint32)])
                self._lengths = np.concatenate([self._lengths, np.zeros(max(64, place), np.int32)])
            lengths = self._lengths[:place]
            # The token at each lag is the one before, read backwards.
            np.multiply(lengths + 1, self._tokens[:place][::-1] == token_id, out=lengths)
            self._tokens[place] = token_id
            self._num_tokens = place + 1
            self._note_breaker(tokens, place)

    def _begin(self, tokens: Sequence[int]) -> None:
        """Count all tokens at once: the lengths are those of a Z array of the reversed tokens."""
        size = self._num_tokens = len(tokens)
        self._tokens = np.array(tokens, np.uint32)
        self._lengths = np.zeros(size, np.int32)
        backwards = list(tokens)[::-1]
        left = right = 0
        lengths = [0] * size
        for lag in range(1, size):
            length = min(right - lag, lengths[lag - left]) if lag < right else 0
            while lag + length < size and backwards[length] == backwards[lag + length]:
                length += 1
            lengths[lag] = length
            if lag + length > right:
                left, right = lag, lag + length
        self._lengths[: size - 1] = lengths[1:]
        self._breaker_head = self._breaker_end = -1
        for place in range(size):
            self._note_breaker(tokens, place)

    def _note_breaker(self, tokens: Sequence[int], place: int) -> None:
        """Note the breaker that ends with the token at `place`, unless a later one is known. Of those that begin with
        the same token, the longest counts."""
        head = self._breakers.head_of(tokens, place)
        if head is not None and head >= self._breaker_head:
            self._breaker_head, self._breaker_end = head, place
