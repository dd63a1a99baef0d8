"""Presence, frequency and repetition penalties: lower the logits of tokens that have occurred."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import numpy as np

from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.logits import Changes, Logits, Places
from headrace.worker.sampling.reduction import FloatArray, IndexArray

# Half the largest float32, so that no other change of a logit makes it infinite.
_LARGEST = np.float32(np.finfo(np.float32).max / 2)


class Penalties(NamedTuple):
    """The effect of penalties on the logits of a step, known before there are logits. At each of `places`, the logit is
    divided by `repetition` if it is positive and multiplied otherwise; then `subtracted` is subtracted."""

    places: Places
    repetition: FloatArray
    subtracted: FloatArray

    def apply(self, logits: Logits) -> Logits:
        """The logits of the step with the penalties applied. Earlier changes are replaced, so penalties must be the
        first."""
        before = logits.at(self.places.rows, self.places.token_ids)
        values = before
        if np.any(self.repetition != 1.0):
            # A repetition near 0 makes the largest logits infinite, and several infinite ones cannot be compared.
            values = np.minimum(np.where(values > 0, values / self.repetition, values * self.repetition), _LARGEST)
        return logits.with_changes(Changes(self.places, before, values - self.subtracted))


class SeenTokens:
    """The distinct tokens of a request, and the amount that presence and frequency penalty subtract from each, as
    growing arrays.

    `prompt_token_ids` are among the tokens, for the repetition penalty; the other two only count generated tokens.
    """

    __slots__ = (
        "_counts",
        "_frequency",
        "_num_counted",
        "_num_of_prompt",
        "_penalties",
        "_presence",
        "_slots",
        "_token_ids",
    )

    def __init__(self, sampling: SamplingParams, prompt_token_ids: Sequence[int] = ()) -> None:
        prompt_ids = np.unique(np.asarray(prompt_token_ids, np.intp))
        prompt_ids = prompt_ids[prompt_ids < FIRST_PSEUDO_TOKEN]  # images are none of the vocabulary
        self._slots = {token_id: slot for slot, token_id in enumerate(prompt_ids.tolist())}
        self._counts = [0] * len(prompt_ids)
        self._token_ids = np.concatenate([prompt_ids, np.zeros(16, np.intp)])
        self._penalties = np.zeros(len(self._token_ids), np.float32)
        self._presence = sampling.presence_penalty
        self._frequency = sampling.frequency_penalty
        self._num_of_prompt = len(prompt_ids)
        self._num_counted = 0

    def count(self, request: Request) -> None:
        """Add the tokens that `request` has generated since the last call. Takes time for these only."""
        tokens = request.token_ids
        for position in range(request.num_prompt_tokens + self._num_counted, len(tokens)):
            token_id = tokens[position]
            slot = self._slots.get(token_id)
            if slot is None:
                slot = self._add(token_id)
            self._counts[slot] += 1
            self._penalties[slot] = self._presence + self._frequency * self._counts[slot]
            self._num_counted += 1

    def take_back(self, request: Request, num_tokens: int) -> None:
        """Remove the request's tokens after the first `num_tokens`, which it still has. The latest goes first, so
        a token that occurs only among them has the last slot when it is removed."""
        first = request.num_prompt_tokens
        for position in range(first + self._num_counted - 1, num_tokens - 1, -1):
            token_id = request.token_ids[position]
            slot = self._slots[token_id]
            self._counts[slot] -= 1
            self._num_counted -= 1
            if self._counts[slot]:
                self._penalties[slot] = self._presence + self._frequency * self._counts[slot]
            elif slot < self._num_of_prompt:
                self._penalties[slot] = 0.0
            else:
                del self._slots[token_id]
                self._counts.pop()

    def _add(self, token_id: int) -> int:
        slot = self._slots[token_id] = len(self._counts)
        self._counts.append(0)
        if slot == len(self._token_ids):
            self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
            self._penalties = np.concatenate([self._penalties, np.zeros_like(self._penalties)])
        self._token_ids[slot] = token_id
        return slot

    @property
    def token_ids(self) -> IndexArray:
        """The distinct tokens `[n]`: first those of the prompt, then generated ones in the order of their first use."""
        return self._token_ids[: len(self._counts)]

    @property
    def penalties(self) -> FloatArray:
        """The amounts `[n]` to subtract from the logits of `token_ids`: 0 for tokens that are only in the prompt."""
        return self._penalties[: len(self._counts)]


class PenaltyCounter:
    """Counts the tokens of requests with penalties, for as long as the requests live."""

    def __init__(self) -> None:
        self._seen: WeakKeyDictionary[Request, SeenTokens] = WeakKeyDictionary()

    def penalties(self, requests: Sequence[Request], vocab_size: int) -> Penalties | None:
        """The penalties of the next token of each request, whose logits are in rows in this order. None if no request
        has penalties."""
        rows = [row for row, request in enumerate(requests) if request.sampling.has_penalties]
        if not rows:
            return None
        seen = [self._seen_by(requests[row]) for row in rows]
        lengths = [len(of_row.token_ids) for of_row in seen]
        if not any(lengths):
            return None
        places = Places(
            (len(requests), vocab_size),
            np.repeat(np.array(rows), lengths),
            np.concatenate([of_row.token_ids for of_row in seen]),
        )
        repetition = np.array([requests[row].sampling.repetition_penalty for row in rows], np.float32)
        subtracted = np.concatenate([of_row.penalties for of_row in seen])
        return Penalties(places, np.repeat(repetition, lengths)[places.order], subtracted[places.order])

    def take_back(self, request: Request, num_tokens: int) -> None:
        """Forget the tokens after the first `num_tokens` of the request, prompt included, because they are about to be
        removed from it."""
        seen = self._seen.get(request)
        if seen is not None:
            seen.take_back(request, num_tokens)

    def _seen_by(self, request: Request) -> SeenTokens:
        seen = self._seen.get(request)
        if seen is None:
            repeats = request.sampling.repetition_penalty != 1.0
            seen = SeenTokens(request.sampling, request.prompt_token_ids if repeats else ())
            self._seen[request] = seen
        seen.count(request)
        return seen
