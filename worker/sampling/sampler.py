"""Sampling of a step's rows: the next token of each request, and log-probabilities where they are wanted.

Logits are first changed as a request asks (penalties, biases, bans, what its constraint forbids), then drawn from
after temperature and filters. Reported log-probabilities are of the model's own distribution, before any of it.

Where nobody needs anything special, a step is one argmax. Else all of its rows go through `distribution` together, from
the sums that were made while the logits were computed, corrected for what was edited. Where a constraint allows few
tokens, only those are looked at; what it allows behind a chosen token is computed in another thread, while the kernels
run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.protos.status import Reason, StatusError
from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import Sampled
from headrace.worker.sampling.distribution import Filters, RowLogprobs, best_of, choose, draw, uniforms, weights_of
from headrace.worker.sampling.edits import Edits, LogitEditor, Penalties
from headrace.worker.sampling.logits import (
    DoubleArray,
    FloatArray,
    IndexArray,
    Logits,
    NumpyReducer,
    Reducer,
    Reduction,
    Runs,
    after_changes,
)

NOTHING_ALLOWED = StatusError(
    Reason.INVALID_FIELD,
    "the request's constraint, bad words and allowed tokens leave no token to choose, or the constraint has outgrown "
    "its limits; make them simpler",
    field="sampling",
)


# In the place of a token: none is allowed; the logits are not numbers.
_NOTHING, _NO_NUMBER = -1, -2
_SEED_MASK = (1 << 64) - 1
# Rows of a prompt that become float32 at a time.
_ROWS_AT_ONCE = 16


class Plan(NamedTuple):
    """What is known of how requests want to be sampled before there are logits."""

    draws: _Draws
    penalties: Penalties | None


class BatchSampler:
    """Samples the rows of a step."""

    def __init__(self, reducer: Reducer | None = None) -> None:
        """`reducer` reads what was not read while the logits were computed; without one, numpy does."""
        self._reducer = reducer or NumpyReducer()
        self._editor = LogitEditor()

    def plan(self, requests: Sequence[Request], vocab_size: int) -> Plan | None:
        """How the next token of each request is to be chosen; None where the best is all that is asked for. Can be made
        while the kernels run."""
        if all(request.sampling.is_plain for request in requests):
            return None
        return Plan(_Draws.of(requests), self._editor.penalties(requests, vocab_size))

    def sample(self, requests: Sequence[Request], logits: Logits, plan: Plan | None) -> list[Sampled]:
        """The next token of each request, for which `plan` was made. `logits` has one row for each. -1 for a row that
        has no number to choose by."""
        if not requests:
            return []
        # Rows without numbers, or without any token that may be chosen, are found afterwards.
        with np.errstate(all="ignore"):
            if plan is None:
                return _greedy(logits)
            edits = self._editor.edit(requests, logits, plan.penalties)
            token_ids = self._choose(plan.draws, edits).tolist()
        sampled = [_sampled(token_id) for token_id in token_ids]
        self._editor.begin_look_ahead(requests, [entry.token_id for entry in sampled])
        return sampled

    def logprobs(
        self, requests: Sequence[Request], logits: Logits, sampled: Sequence[Sampled]
    ) -> list[TokenLogprobs | None]:
        """Of each request that wants them, the log-probabilities with which its token came out of these logits."""
        entries: list[TokenLogprobs | None] = [None] * len(requests)
        wanted = [request.sampling.num_logprobs for request in requests]
        rows = [row for row, num_top in enumerate(wanted) if num_top is not None and sampled[row].token_id >= 0]
        if not rows:
            return entries
        num_top = [wanted[row] or 0 for row in rows]
        with np.errstate(all="ignore"):
            of_rows = RowLogprobs(self._model_runs(logits, np.array(rows, np.intp)), max(num_top))
            chosen = np.array([sampled[row].token_id for row in rows], np.intp)
            for row, entry in zip(rows, of_rows.of(chosen, num_top), strict=True):
                entries[row] = entry
        return entries

    def prompt_logprobs(self, logits: Logits, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """For each row of `logits` the log-probability and rank of its token, and the `num_top` best."""
        entries = []
        with np.errstate(all="ignore"):
            for first in range(0, len(token_ids), _ROWS_AT_ONCE):
                chosen = np.asarray(token_ids[first : first + _ROWS_AT_ONCE], np.intp)
                runs = self._read(logits, first + np.arange(len(chosen)), np.ones(len(chosen), np.float32))
                entries += RowLogprobs(runs, num_top).of(chosen, [num_top] * len(chosen))
        return entries

    def _choose(self, draws: _Draws, edits: Edits) -> IndexArray:
        """The token of each row, _NOTHING or _NO_NUMBER."""
        num_rows = len(draws.is_greedy)
        if not edits.few and not edits.whole:
            return _choose(self._runs(edits.logits, np.arange(num_rows), draws, draws), draws)
        chosen = np.empty(num_rows, np.intp)
        for row, token_ids in edits.few.items():
            chosen[row] = _choose_among(edits.values(row, token_ids), token_ids, draws.part(np.array([row])))
        for row, values in edits.whole.items():
            if row not in edits.few:
                part = draws.part(np.array([row]))
                runs = self._read(Logits(values[None]), np.array([0]), part.filters.inverse_temperatures)
                chosen[row] = _choose(runs, part)[0]
        rows = np.array([row for row in range(num_rows) if row not in edits.few and row not in edits.whole], int)
        if len(rows):
            part = draws.part(rows)
            chosen[rows] = _choose(self._runs(edits.logits, rows, draws, part), part)
        return chosen

    def _runs(self, logits: Logits, rows: IndexArray, draws: _Draws, part: _Draws) -> Runs:
        """Some rows with their changes; `part` is that of `draws`."""
        reduction = logits.reduction
        if reduction is None or not (part.is_greedy.all() or reduction.sums.shape[1]):
            return self._read(logits, rows, part.filters.inverse_temperatures)
        inverse_temperatures = draws.filters.inverse_temperatures
        some_top_k = bool((part.filters.top_k > 0).any())
        reduction = after_changes(logits, reduction, inverse_temperatures, all_maxima=some_top_k)
        return Runs.made_of(logits, reduction, inverse_temperatures).of(rows)

    def _model_runs(self, logits: Logits, rows: IndexArray) -> Runs:
        """Some rows at temperature 1, as the model gave them."""
        ones = np.ones(len(logits.values), np.float32)
        if logits.reduction is None or not logits.reduction.sums.shape[1]:
            return self._read(logits, rows, ones[rows])
        sums = logits.reduction.sums if logits.model_sums is None else logits.model_sums
        return Runs.made_of(logits, Reduction(logits.reduction.maxima, sums), ones).of(rows)

    def _read(self, logits: Logits, rows: IndexArray, inverse_temperatures: FloatArray) -> Runs:
        """Some rows, read as a whole."""
        values = logits.whole(rows)
        return Runs.made_of(Logits(values), self._reducer.reduce(values, inverse_temperatures), inverse_temperatures)


class _Draws(NamedTuple):
    """How each of n rows is chosen from."""

    filters: Filters
    is_greedy: npt.NDArray[np.bool_]
    quantiles: DoubleArray

    @classmethod
    def of(cls, requests: Sequence[Request]) -> _Draws:
        samplings = [request.sampling for request in requests]
        quantiles = uniforms(
            np.array([sampling.seed & _SEED_MASK for sampling in samplings], np.uint64),
            np.array([request.num_generated_tokens for request in requests], np.uint64),
        )
        return cls(_filters(samplings), np.array([sampling.is_greedy for sampling in samplings]), quantiles)

    def part(self, rows: IndexArray) -> _Draws:
        """Those of some of the rows."""
        if len(rows) == len(self.is_greedy):
            return self
        return _Draws(self.filters.of(rows), self.is_greedy[rows], self.quantiles[rows])


def _filters(samplings: Sequence[SamplingParams]) -> Filters:
    """What the rows of these parameters are drawn with. Greedy rows are not drawn; theirs has no meaning."""
    return Filters(
        np.array([sampling.inverse_temperature for sampling in samplings], np.float32),
        np.array([sampling.top_k for sampling in samplings], np.int64),
        np.array([sampling.top_p for sampling in samplings], np.float64),
        np.array([sampling.min_p for sampling in samplings], np.float64),
    )


def _choose(runs: Runs, draws: _Draws) -> IndexArray:
    """The token of each row: the best of greedy ones, a drawn one of the others. _NOTHING or _NO_NUMBER for a row that
    has nothing to choose from."""
    is_empty = runs.best == -np.inf
    is_sound = np.isfinite(runs.totals) & ~is_empty
    if is_sound.all() and not draws.is_greedy.any():
        return draw(runs, draws.filters, draws.quantiles)
    chosen = np.where(is_empty, _NOTHING, _NO_NUMBER).astype(np.intp)
    best, drawn = np.flatnonzero(is_sound & draws.is_greedy), np.flatnonzero(is_sound & ~draws.is_greedy)
    if len(best):
        chosen[best] = _best_of(runs.of(best))
    if len(drawn):
        part = draws.part(drawn)
        chosen[drawn] = draw(runs.of(drawn), part.filters, part.quantiles)
    return chosen


def _choose_among(values: FloatArray, token_ids: IndexArray, draws: _Draws) -> int:
    """One of a row's few tokens, whose logits are `values`."""
    best = int(values.argmax()) if len(values) else -1
    if best < 0 or np.isneginf(values[best]):
        return _NOTHING
    if not math.isfinite(values[best]):
        return _NO_NUMBER
    if not draws.is_greedy[0]:
        weights = weights_of(values[None], draws.filters.inverse_temperatures)
        best = int(choose(weights, draws.filters, weights.sum(axis=1), draws.quantiles[:, 0])[0])
    return int(token_ids[best])


def _sampled(token_id: int) -> Sampled:
    if token_id == _NOTHING:
        return Sampled(-1, error=NOTHING_ALLOWED)
    return Sampled(max(token_id, -1))


def _greedy(logits: Logits) -> list[Sampled]:
    """The best token of each row, or -1 if there is none."""
    if logits.reduction is not None:
        maxima = logits.reduction.maxima
        best = _best_of(Runs.made_of(logits, Reduction(maxima, maxima[:, :0]), maxima[:, 0]))
    else:
        values = logits.whole(np.arange(len(logits.values))) if logits.values.dtype == np.uint16 else logits.values
        best = values.argmax(axis=1)
        best[~np.isfinite(values[np.arange(len(best)), best])] = _NO_NUMBER
    return [_sampled(token_id) for token_id in best.tolist()]


def _best_of(runs: Runs) -> IndexArray:
    """The best token of each row, or _NO_NUMBER: argmax stops at the first NaN."""
    best = best_of(runs)
    best[~np.isfinite(runs.at(best))] = _NO_NUMBER
    return best
