"""Choosing tokens from logits.

Order of what is applied to a row: repetition penalty, presence and frequency penalties, bias, allowed tokens, the
constraint, bad words and minimum length (on logits); temperature; top_k; top_p over what top_k left; min_p relative to
the best. Bad words and minimum length give way where they would leave none of the tokens that the constraint allows.
Reported log-probabilities are of the model's own distribution, before any of it.

A row at a time, because a row of 49k to 152k float32 fits the second-level cache and a batch of them does not. A
request that needs nothing special is one row of one argmax over the batch. Where a constraint allows few tokens, only
those are looked at; what it allows behind a chosen token is computed in another thread, while the kernels run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt

from headrace.protos.status import Reason, StatusError
from headrace.worker.distribution import FloatArray, draw, logprobs_of, uniform
from headrace.worker.grammar import LookAhead, Matcher
from headrace.worker.request import Request, SamplingParams
from headrace.worker.scheduler import Sampled

NOTHING_ALLOWED = StatusError(
    Reason.INVALID_FIELD,
    "the request's constraint, bad words and allowed tokens leave no token to choose, or the constraint has outgrown "
    "its limits; make them simpler",
    field="sampling",
)


class TokenCounts:
    """How often each token was generated, as arrays that grow with the distinct tokens."""

    __slots__ = ("_index", "_length", "counts", "num_counted", "prompt_ids", "token_ids")

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.prompt_ids = np.unique(np.asarray(prompt_token_ids, np.int64))
        self.token_ids = np.zeros(16, np.int64)
        self.counts = np.zeros(16, np.float32)
        self.num_counted = 0
        self._length = 0
        self._index: dict[int, int] = {}

    def count(self, generated: Sequence[int]) -> None:
        """Take in the generated tokens that were not counted yet."""
        for token_id in generated[self.num_counted :]:
            slot = self._index.get(token_id)
            if slot is None:
                slot = self._index[token_id] = self._length
                self._length += 1
                if slot == len(self.token_ids):
                    self.token_ids = np.concatenate([self.token_ids, np.zeros_like(self.token_ids)])
                    self.counts = np.concatenate([self.counts, np.zeros_like(self.counts)])
                self.token_ids[slot] = token_id
            self.counts[slot] += 1
        self.num_counted = len(generated)

    @property
    def seen(self) -> tuple[npt.NDArray[np.int64], FloatArray]:
        """Distinct generated tokens and their counts."""
        return self.token_ids[: self._length], self.counts[: self._length]


class BatchSampler:
    """Samples the rows of a step. Keeps token counts for requests with penalties, and matchers for those with a
    constraint, for as long as they live."""

    def __init__(self) -> None:
        self._counts: WeakKeyDictionary[Request, TokenCounts] = WeakKeyDictionary()
        self._matchers: WeakKeyDictionary[Request, Matcher] = WeakKeyDictionary()
        self._look_ahead = LookAhead()

    def sample(self, requests: Sequence[Request], logits: FloatArray) -> list[Sampled]:
        """The next token of each request. `logits` `[len(requests), vocab]` may be overwritten. -1 for a row that
        has no number to choose by."""
        if not requests:
            return []
        if all(request.sampling.is_plain for request in requests):
            return [Sampled(_greedy(row)) for row in logits]
        sampled = [self._sample_row(request, row) for request, row in zip(requests, logits, strict=True)]
        if self._matchers:
            self._begin_look_ahead(requests, sampled)
        return sampled

    def _begin_look_ahead(self, requests: Sequence[Request], sampled: Sequence[Sampled]) -> None:
        """Let the matchers of requests that go on follow the tokens that were chosen for them."""
        steps = []
        for request, entry in zip(requests, sampled, strict=True):
            matcher = self._matchers.get(request)
            if matcher is not None and entry.token_id >= 0 and entry.token_id not in request.sampling.stop_token_ids:
                steps.append((matcher, entry.token_id))
        if steps:
            self._look_ahead.begin(steps)

    def _sample_row(self, request: Request, row: FloatArray) -> Sampled:
        sampling = request.sampling
        best = _greedy(row)
        if best < 0 or sampling.is_plain:
            return Sampled(best)
        overwritten = sampling.changes_logits or not sampling.is_greedy
        original = row.copy() if sampling.num_logprobs is not None and overwritten else row
        few = None
        if sampling.changes_logits:
            few = self._change_logits(request, row)
            row = row if few is None else row[few]
            best = _greedy(row) if len(row) else -1
            if best < 0:
                return Sampled(-1, error=NOTHING_ALLOWED)
        if sampling.is_greedy or len(row) == 1:
            chosen = best
        else:
            chosen = draw(row, sampling, uniform(sampling.seed, request.num_generated_tokens))
        if few is not None:
            chosen = int(few[chosen])
        if sampling.num_logprobs is None:
            return Sampled(chosen)
        return Sampled(chosen, logprobs_of(original, chosen, sampling.num_logprobs))

    def _change_logits(self, request: Request, row: FloatArray) -> npt.NDArray[np.intp] | None:
        """Change a row as the request wants it. Gives the tokens to choose from if they are few."""
        sampling = request.sampling
        generated = request.token_ids[request.num_prompt_tokens :]
        if sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0:
            counts = self._counts.get(request)
            if counts is None:
                counts = self._counts[request] = TokenCounts(request.prompt_token_ids)
            counts.count(generated)
            _penalise(row, counts, sampling)
        for token_id, bias in sampling.logit_bias:
            row[token_id] += bias
        if sampling.allowed_token_ids:
            allowed_ids = np.asarray(sampling.allowed_token_ids)
            kept = row[allowed_ids]
            row.fill(-np.inf)
            row[allowed_ids] = kept
        few = self._constrain(request, generated, row)
        banned = _banned(request, len(generated))
        if banned:
            kept = row[banned]
            row[banned] = -np.inf
            if sampling.constraint is not None and np.all(np.isneginf(row if few is None else row[few])):
                row[banned] = kept
        return few

    def _constrain(self, request: Request, generated: Sequence[int], row: FloatArray) -> npt.NDArray[np.intp] | None:
        """Take out what the request's constraint forbids, or give the few tokens that it allows."""
        if request.sampling.constraint is None:
            return None
        self._look_ahead.finish()
        matcher = self._matchers.get(request)
        if matcher is None:
            matcher = self._matchers[request] = request.sampling.constraint.begin()
        few, bias = matcher.allowed(generated)
        if bias is not None:
            row += bias
        return few


def _banned(request: Request, num_generated: int) -> list[int]:
    """Tokens that bad words and minimum length forbid."""
    sampling = request.sampling
    banned = []
    for word in sampling.bad_words:
        begun = len(word) - 1
        if begun == 0 or tuple(request.token_ids[-begun:]) == word[:-1]:
            banned.append(word[-1])
    if num_generated < sampling.min_tokens:
        banned.extend(sampling.stop_token_ids)
    return banned


def _greedy(row: FloatArray) -> int:
    """The best token, or -1 if there is none: argmax stops at the first NaN."""
    best = int(row.argmax())
    return best if math.isfinite(row[best]) else -1


def _penalise(row: FloatArray, counts: TokenCounts, sampling: SamplingParams) -> None:
    token_ids, occurrences = counts.seen
    if sampling.repetition_penalty != 1.0:
        seen = np.union1d(counts.prompt_ids, token_ids)
        values = row[seen]
        row[seen] = np.where(values > 0, values / sampling.repetition_penalty, values * sampling.repetition_penalty)
    row[token_ids] -= sampling.presence_penalty + sampling.frequency_penalty * occurrences
