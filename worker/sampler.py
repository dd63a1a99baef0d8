"""Sampling of a step's rows: the next token of each request, and log-probabilities where they are wanted.

Logits are first changed as a request asks (penalties, biases, bans, what its constraint forbids), then drawn from
after temperature and filters. Reported log-probabilities are of the model's own distribution, before any of it.

A request that needs nothing special is one row of one argmax. All others go through `distribution` together, in two
groups at most: with log-probabilities and without. Where a constraint allows few tokens, only those are looked at; what
it allows behind a chosen token is computed in another thread, while the kernels run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headrace.protos.status import Reason, StatusError
from headrace.worker.distribution import (
    DoubleArray,
    Filters,
    FloatArray,
    IndexArray,
    NumpyReducer,
    Reducer,
    RowLogprobs,
    Runs,
    best_of,
    choose,
    draw,
    inverse_temperature,
    uniforms,
    weights_of,
)
from headrace.worker.logit_editor import LogitEditor
from headrace.worker.request import Request, SamplingParams, TokenLogprobs
from headrace.worker.scheduler import Sampled

NOTHING_ALLOWED = StatusError(
    Reason.INVALID_FIELD,
    "the request's constraint, bad words and allowed tokens leave no token to choose, or the constraint has outgrown "
    "its limits; make them simpler",
    field="sampling",
)


# In the place of a token: none is allowed; the logits are not numbers.
_NOTHING, _NO_NUMBER = -1, -2
_SEED_MASK = (1 << 64) - 1


class BatchSampler:
    """Samples the rows of a step."""

    def __init__(self, reducer: Reducer | None = None) -> None:
        """Without a `reducer` whole rows are read with numpy."""
        self._reducer = reducer or NumpyReducer()
        self._editor = LogitEditor()

    def sample(self, requests: Sequence[Request], logits: FloatArray) -> list[Sampled]:
        """The next token of each request. `logits` `[len(requests), vocab]` may be overwritten. -1 for a row that
        has no number to choose by."""
        if all(request.sampling.is_plain for request in requests):
            return _greedy(logits) if requests else []
        sampled: dict[int, Sampled] = {}
        groups: dict[bool, list[int]] = {}
        for row, request in enumerate(requests):
            if request.sampling.is_plain:
                sampled.update(zip([row], _greedy(logits[row : row + 1]), strict=True))
            else:
                groups.setdefault(request.sampling.num_logprobs is not None, []).append(row)
        for rows in groups.values():
            is_all = len(rows) == len(requests)
            of_group = self._sample_group([requests[row] for row in rows], logits if is_all else logits[rows])
            sampled.update(zip(rows, of_group, strict=True))
        entries = [sampled[row] for row in range(len(requests))]
        self._editor.begin_look_ahead(requests, [entry.token_id for entry in entries])
        return entries

    def logprobs(self, logits: FloatArray, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """For each row of `logits` the log-probability and rank of its token, and the `num_top` best."""
        with np.errstate(all="ignore"):
            runs = self._reducer.reduce(logits, np.ones(len(logits), np.float32))
            return RowLogprobs(runs, num_top).of(np.asarray(token_ids, np.intp), [num_top] * len(logits))

    def _sample_group(self, requests: Sequence[Request], logits: FloatArray) -> list[Sampled]:
        """Sample rows of which all or none report log-probabilities."""
        samplings = [request.sampling for request in requests]
        filters = _filters(samplings)
        wants_logprobs = samplings[0].num_logprobs is not None
        num_top = [sampling.num_logprobs or 0 for sampling in samplings]
        # Rows without numbers, or without any token that may be chosen, are found afterwards.
        with np.errstate(all="ignore"):
            runs = logprobs = None
            if wants_logprobs:
                runs = self._reducer.reduce(logits, np.ones(len(logits), np.float32))
                logprobs = RowLogprobs(runs, max(num_top))
            edits = self._editor.edit(requests, logits, keep=wants_logprobs)
            if runs is None or edits.any or np.any(filters.inverse_temperatures != 1.0):
                runs = self._reducer.reduce(logits, filters.inverse_temperatures)
            chosen = _choose(requests, runs, filters, edits.few)
            edits.put_back()
            if logprobs is None:
                return [_sampled(token_id) for token_id in chosen.tolist()]
            reported = logprobs.of(np.maximum(chosen, 0), num_top)
        return [_sampled(token_id, entry) for token_id, entry in zip(chosen.tolist(), reported, strict=True)]


def _filters(samplings: Sequence[SamplingParams]) -> Filters:
    """What the rows of these parameters are drawn with. Greedy rows are not drawn; theirs has no meaning."""
    return Filters(
        np.array([inverse_temperature(sampling.temperature) for sampling in samplings], np.float32),
        np.array([sampling.top_k for sampling in samplings], np.int64),
        np.array([sampling.top_p for sampling in samplings], np.float64),
        np.array([sampling.min_p for sampling in samplings], np.float64),
    )


def _choose(requests: Sequence[Request], runs: Runs, filters: Filters, few: dict[int, IndexArray]) -> IndexArray:
    """The token of each row: the best of greedy ones, a drawn one of the others. _NOTHING or _NO_NUMBER for a row that
    has nothing to choose from."""
    samplings = [request.sampling for request in requests]
    is_greedy = np.array([sampling.is_greedy for sampling in samplings])
    quantiles = uniforms(
        np.array([sampling.seed & _SEED_MASK for sampling in samplings], np.uint64),
        np.array([request.num_generated_tokens for request in requests], np.uint64),
    )
    is_whole = np.ones(len(requests), bool)
    is_whole[list(few)] = False
    is_empty = np.isneginf(runs.best)
    is_sound = ~is_empty & np.isfinite(runs.sums.sum(axis=1, dtype=np.float64))
    chosen = np.where(is_empty, _NOTHING, _NO_NUMBER).astype(np.intp)
    best, drawn = np.flatnonzero(is_whole & is_sound & is_greedy), np.flatnonzero(is_whole & is_sound & ~is_greedy)
    if len(best):
        chosen[best] = best_of(runs.of(best))
    if len(drawn):
        chosen[drawn] = draw(runs.of(drawn), filters.of(drawn), quantiles[drawn])
    for row, token_ids in few.items():
        values = runs.logits[row, token_ids]
        chosen[row] = _choose_among(
            values, token_ids, filters.of(np.array([row])), quantiles[[row], 0], is_greedy=is_greedy[row]
        )
    return chosen


def _choose_among(
    values: FloatArray, token_ids: IndexArray, filters: Filters, quantile: DoubleArray, *, is_greedy: bool
) -> int:
    """One of a row's few tokens, whose logits are `values`."""
    best = int(values.argmax()) if len(values) else -1
    if best < 0 or np.isneginf(values[best]):
        return _NOTHING
    if not math.isfinite(values[best]):
        return _NO_NUMBER
    if not is_greedy:
        weights = weights_of(values[None], filters.inverse_temperatures)
        best = int(choose(weights, filters, weights.sum(axis=1), quantile)[0])
    return int(token_ids[best])


def _sampled(token_id: int, logprobs: TokenLogprobs | None = None) -> Sampled:
    if token_id == _NOTHING:
        return Sampled(-1, error=NOTHING_ALLOWED)
    return Sampled(-1) if token_id == _NO_NUMBER else Sampled(token_id, logprobs)


def _greedy(logits: FloatArray) -> list[Sampled]:
    """The best token of each row, or -1 if there is none: argmax stops at the first NaN."""
    best = logits.argmax(axis=1)
    is_number = np.isfinite(logits[np.arange(len(logits)), best])
    return [Sampled(token_id) for token_id in np.where(is_number, best, -1).tolist()]
