"""What requests change in their rows of logits before a token is chosen: penalties, biases, bans, and what a constraint
forbids.

Rows are changed in place, for a copy of a batch costs as much as reading it; where log-probabilities of the model's own
distribution are wanted, `Edits` notes what was there and puts it back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from headrace.worker.distribution import FloatArray, IndexArray
from headrace.worker.grammar import LookAhead, Matcher
from headrace.worker.request import Request


class TokenCounts:
    """How often each token was generated, as arrays that grow with the distinct tokens. With `prompt_token_ids`, those
    are there too, as often as they were generated."""

    __slots__ = ("_counts", "_index", "_length", "_num_counted", "_token_ids")

    def __init__(self, prompt_token_ids: Sequence[int] = ()) -> None:
        prompt_ids = np.unique(np.asarray(prompt_token_ids, np.int64))
        self._length = len(prompt_ids)
        self._token_ids = np.concatenate([prompt_ids, np.zeros(16, np.int64)])
        self._counts = np.zeros(len(self._token_ids), np.float32)
        self._num_counted = 0
        self._index = {token_id: slot for slot, token_id in enumerate(prompt_ids.tolist())}

    def count(self, request: Request) -> None:
        """Take in the request's generated tokens that were not counted yet."""
        for token_id in request.token_ids[request.num_prompt_tokens + self._num_counted :]:
            slot = self._index.get(token_id)
            if slot is None:
                slot = self._index[token_id] = self._length
                self._length += 1
                if slot == len(self._token_ids):
                    self._token_ids = np.concatenate([self._token_ids, np.zeros_like(self._token_ids)])
                    self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
                self._token_ids[slot] = token_id
            self._counts[slot] += 1
            self._num_counted += 1

    @property
    def seen(self) -> tuple[npt.NDArray[np.int64], FloatArray]:
        """Distinct tokens and their counts."""
        return self._token_ids[: self._length], self._counts[: self._length]


class Edits:
    """The changes of one batch of rows, which can be put back if `keep`. `few` has, by row, the tokens to choose from
    where a constraint leaves few of them."""

    def __init__(self, logits: FloatArray, *, keep: bool) -> None:
        self.any = False
        self.few: dict[int, IndexArray] = {}
        self._logits = logits
        self._keep = keep
        self._kept: list[tuple[Any, FloatArray]] = []

    def set(self, where: Any, values: Any) -> None:
        """Change the logits at an index of the batch."""
        self.any = True
        if self._keep:
            self._kept.append((where, self._logits[where].copy()))
        self._logits[where] = values

    def put_back(self) -> None:
        """Undo all changes, the last one first."""
        for where, values in reversed(self._kept):
            self._logits[where] = values


class LogitEditor:
    """Keeps token counts for requests with penalties, and matchers for those with a constraint, for as long as they
    live."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Request, TokenCounts] = WeakKeyDictionary()
        self._matchers: WeakKeyDictionary[Request, Matcher] = WeakKeyDictionary()
        self._look_ahead = LookAhead()

    def edit(self, requests: Sequence[Request], logits: FloatArray, *, keep: bool) -> Edits:
        """Change rows `[len(requests), vocab]` as their requests want it."""
        edits = Edits(logits, keep=keep)
        penalised = [row for row, request in enumerate(requests) if request.sampling.has_penalties]
        if penalised:
            self._penalise(requests, penalised, logits, edits)
        for row, request in enumerate(requests):
            if request.sampling.has_edits:
                self._edit_row(request, logits, row, edits)
        return edits

    def begin_look_ahead(self, requests: Sequence[Request], token_ids: Sequence[int]) -> None:
        """Let the matchers of requests that go on follow the tokens that were chosen for them."""
        if not self._matchers:
            return
        steps = []
        for request, token_id in zip(requests, token_ids, strict=True):
            matcher = self._matchers.get(request)
            if matcher is not None and token_id >= 0 and token_id not in request.sampling.stop_token_ids:
                steps.append((matcher, token_id))
        if steps:
            self._look_ahead.begin(steps)

    def _penalise(self, requests: Sequence[Request], rows: Sequence[int], logits: FloatArray, edits: Edits) -> None:
        """Take penalties off the tokens that were seen, in all of `rows` at once."""
        seen = []
        for row in rows:
            request = requests[row]
            counts = self._counts.get(request)
            if counts is None:
                repeats = request.sampling.repetition_penalty != 1.0
                counts = self._counts[request] = TokenCounts(request.prompt_token_ids if repeats else ())
            counts.count(request)
            seen.append(counts.seen)
        lengths = [len(token_ids) for token_ids, _ in seen]
        where = (np.repeat(rows, lengths), np.concatenate([token_ids for token_ids, _ in seen]))
        occurrences = np.concatenate([counts for _, counts in seen])
        of_rows = [requests[row].sampling for row in rows]
        presence = np.repeat([s.presence_penalty for s in of_rows], lengths)
        frequency = np.repeat([s.frequency_penalty for s in of_rows], lengths)
        repetition = np.repeat([s.repetition_penalty for s in of_rows], lengths)
        values = logits[where]
        values = np.where(values > 0, values / repetition, values * repetition)
        edits.set(where, values - np.where(occurrences > 0, presence + frequency * occurrences, 0.0))

    def _edit_row(self, request: Request, logits: FloatArray, row: int, edits: Edits) -> None:
        sampling = request.sampling
        if sampling.logit_bias:
            token_ids = [token_id for token_id, _ in sampling.logit_bias]
            biases = np.array([bias for _, bias in sampling.logit_bias], np.float32)
            edits.set((row, token_ids), logits[row, token_ids] + biases)
        if sampling.allowed_token_ids:
            allowed_ids = np.asarray(sampling.allowed_token_ids)
            kept = logits[row, allowed_ids]
            edits.set(row, -np.inf)
            edits.set((row, allowed_ids), kept)
        if sampling.constraint is not None:
            self._constrain(request, logits, row, edits)
        banned = _banned(request)
        if banned:
            kept = logits[row, banned]
            edits.set((row, banned), -np.inf)
            # A constraint goes before: where it allows only banned tokens, they stay.
            allowed = logits[row, edits.few[row]] if row in edits.few else logits[row]
            if sampling.constraint is not None and np.all(np.isneginf(allowed)):
                edits.set((row, banned), kept)

    def _constrain(self, request: Request, logits: FloatArray, row: int, edits: Edits) -> None:
        """Take out what the request's constraint forbids, or note the few tokens that it allows."""
        assert request.sampling.constraint is not None
        self._look_ahead.finish()
        matcher = self._matchers.get(request)
        if matcher is None:
            matcher = self._matchers[request] = request.sampling.constraint.begin()
        few, bias = matcher.allowed(request.token_ids[request.num_prompt_tokens :])
        if few is not None:
            edits.few[row] = few
        if bias is not None:
            edits.set(row, logits[row] + bias)


def _banned(request: Request) -> list[int]:
    """Tokens that bad words and minimum length forbid."""
    sampling = request.sampling
    banned = []
    for word in sampling.bad_words:
        begun = len(word) - 1
        if begun == 0 or tuple(request.token_ids[-begun:]) == word[:-1]:
            banned.append(word[-1])
    if request.num_generated_tokens < sampling.min_tokens:
        banned.extend(sampling.stop_token_ids)
    return banned
