"""Samples the next token of each request of a step, and reads log-probabilities.

    model's logits --> processors --> runs --> argmax or draw --> token
    (logits.py)        penalties,     (runs.py)   (draw.py)
         |             bias, bans,    the summary of each row
         |             grammar        (reduction.py), corrected for what
         |             (processors.py)  the processors changed
         +--> log-probabilities: of the model's own distribution, read while the next step computes

All rows are sampled together (rows.py has their parameters and random numbers), except those where a grammar allows few
tokens, those that were copied as a whole, and those whose filters form a chain (chain.py). If every request is plainly
greedy, a step is one argmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from headrace.protos.status import Reason, StatusError
from headrace.worker.grammar.constraint import Constraint
from headrace.worker.request.beam_search import Candidates
from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.request.request import Request
from headrace.worker.request.step import Sampled
from headrace.worker.sampling.chain import draw_by_chain
from headrace.worker.sampling.draw import draw, draw_among, least_near_the_best
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.penalties import PenaltyCounter
from headrace.worker.sampling.processors import LogitsProcessors, Processed
from headrace.worker.sampling.reduction import (
    DoubleArray,
    FloatArray,
    IndexArray,
    Reducer,
    Reduction,
    reduce_with_numpy,
    weights_of,
)
from headrace.worker.sampling.rows import DRAWS, RowParams
from headrace.worker.sampling.runs import Runs

NOTHING_ALLOWED = StatusError(
    Reason.INVALID_FIELD,
    "the request's constraint, bad words and allowed tokens leave no token to choose, or the constraint has outgrown "
    "its limits; make them simpler",
    field="sampling",
)

# These replace a token: no token is allowed; the logits are not numbers.
_NOTHING = -1
_NO_NUMBER = -2
# Rows of a prompt that are converted to float32 at a time.
_ROWS_AT_ONCE = 16


class BatchSampler:
    """Samples all rows of a step together."""

    def __init__(self, reducer: Reducer | None = None) -> None:
        """`reducer` summarises rows that the model's graph did not; the default uses numpy."""
        self._reduce = reducer or reduce_with_numpy
        self._penalties = PenaltyCounter()
        self._processors = LogitsProcessors()

    def sample(self, requests: Sequence[Request], logits: Logits, ahead: IndexArray | None = None) -> list[Sampled]:
        """The next token of each request, or -1 with an error. `logits` has a row for each. With `ahead` `[n]`, it is
        the token after this many draft tokens; only rows that do not depend on earlier tokens may have them."""
        if not requests:
            return []
        # Rows without numbers, and rows without an allowed token, are found afterwards.
        with np.errstate(all="ignore"):
            if all(request.sampling.is_plain for request in requests):
                return [_sampled(token_id) for token_id in _argmax(logits).tolist()]
            penalties = self._penalties.penalties(requests, logits.shape[1])
            processed = self._processors.process(requests, logits, penalties)
            token_ids = self._choose(requests, processed, RowParams.of(requests, ahead)).tolist()
        sampled = [_sampled(token_id) for token_id in token_ids]
        self._processors.begin_look_ahead(requests, [entry.token_id for entry in sampled])
        return sampled

    def take_back(self, request: Request, num_tokens: int) -> None:
        """Forget the request's place in its grammar, and its tokens after the first `num_tokens`, which are about to be
        removed from it."""
        self._penalties.take_back(request, num_tokens)
        self._processors.begin_again(request)

    def forced_tokens(self, request: Request) -> Sequence[int]:
        """Tokens that the request's grammar is likely to require next; none without a grammar."""
        return self._processors.forced_tokens(request)

    def num_valid(self, request: Request, token_ids: Sequence[int]) -> int:
        """How many of these tokens, in order, the request's grammar allows next; all of them without a grammar."""
        return self._processors.num_valid(request, token_ids)

    def branch(self, request: Request) -> Constraint | None:
        """The request's grammar after its latest token, for tokens that may be taken back; None without a grammar, or
        if its place is not known."""
        return self._processors.branch(request)

    def logprobs(
        self, requests: Sequence[Request], logits: Logits, sampled: Sequence[Sampled]
    ) -> list[TokenLogprobs | None]:
        """The log-probabilities of sampled tokens, for requests that want them. They are those of the model's own
        distribution at temperature 1."""
        entries: list[TokenLogprobs | None] = [None] * len(requests)
        wanted = [request.sampling.num_logprobs for request in requests]
        rows = [row for row, num_top in enumerate(wanted) if num_top is not None and sampled[row].token_id >= 0]
        if not rows:
            return entries
        token_ids = np.array([sampled[row].token_id for row in rows], np.intp)
        with np.errstate(all="ignore"):
            ones = np.ones(len(logits.values), np.float32)
            runs = self._runs(logits.at_temperature_one(), np.array(rows, np.intp), ones)
            found = row_logprobs(runs, token_ids, [wanted[row] or 0 for row in rows])
        for row, entry in zip(rows, found, strict=True):
            entries[row] = entry
        return entries

    def candidates(self, logits: Logits, num_top: Sequence[int]) -> list[Candidates]:
        """For each row of `logits`, the `num_top[row]` most probable tokens and their log-probabilities at temperature
        1, best first, the lower id first among equals. No tokens if the logits are not numbers."""
        with np.errstate(all="ignore"):
            rows = np.arange(len(logits.values))
            runs = self._runs(logits.at_temperature_one(), rows, np.ones(len(rows), np.float32))
            token_ids, logprobs = most_probable(runs, max(num_top))
        is_sound = np.isfinite(runs.totals) & np.isfinite(runs.best)
        return [
            Candidates(ids[:wanted], top[:wanted]) if sound else Candidates((), ())
            for ids, top, wanted, sound in zip(token_ids, logprobs, num_top, is_sound.tolist(), strict=True)
        ]

    def prompt_logprobs(self, logits: Logits, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        """For each row of `logits`, the log-probability and rank of its token, and of the `num_top` most probable."""
        entries = []
        with np.errstate(all="ignore"):
            for first in range(0, len(token_ids), _ROWS_AT_ONCE):
                chosen = np.asarray(token_ids[first : first + _ROWS_AT_ONCE], np.intp)
                values = logits.whole(first + np.arange(len(chosen)))
                runs = self._read(values, np.ones(len(chosen), np.float32))
                entries += row_logprobs(runs, chosen, [num_top] * len(chosen))
        return entries

    def _choose(self, requests: Sequence[Request], processed: Processed, params: RowParams) -> IndexArray:
        """The token of each row, _NOTHING or _NO_NUMBER."""
        num_rows = len(params.is_greedy)
        few = processed.few
        whole = processed.whole
        chosen = np.empty(num_rows, np.intp)
        chained = {row for row, request in enumerate(requests) if request.sampling.has_chain}
        for row in chained:
            chosen[row] = _choose_by_chain(processed, row, requests[row], params)
        for row, token_ids in few.items():
            if row in chained:
                continue
            chosen[row] = _choose_among(processed.at(row, token_ids), token_ids, params.part(np.array([row])))
        for row, values in whole.items():
            if row not in few and row not in chained:
                part = params.part(np.array([row]))
                chosen[row] = _choose(self._read(values[None], part.inverse_temperatures), part)[0]
        alone = {*few, *whole, *chained}
        rows = np.array([row for row in range(num_rows) if row not in alone], np.intp)
        if len(rows):
            part = params.part(rows)
            is_drawn = not part.is_greedy.all()
            runs = self._runs(processed.logits, rows, params.inverse_temperatures, is_drawn=is_drawn)
            chosen[rows] = _choose(runs, part)
        return chosen

    def _runs(
        self, logits: Logits, rows: IndexArray, inverse_temperatures: FloatArray, *, is_drawn: bool = True
    ) -> Runs:
        """The `rows` of a step, with the changes of logits processors and their summary.

        `inverse_temperatures` are those of all rows of the step. Unless `is_drawn`, the summary may lack sums of
        weights, because greedy rows need maxima only.
        """
        reduction = logits.reduction
        if reduction is None or (is_drawn and not reduction.sums.shape[1]):
            return self._read(logits.whole(rows), inverse_temperatures[rows])
        return Runs.made_of(logits, reduction, inverse_temperatures).part(rows)

    def _read(self, values: FloatArray, inverse_temperatures: FloatArray) -> Runs:
        """Rows `[n, vocab]` that are summarised here."""
        return Runs.made_of(Logits(values), self._reduce(values, inverse_temperatures), inverse_temperatures)


def row_logprobs(runs: Runs, token_ids: IndexArray, num_top: Sequence[int]) -> list[TokenLogprobs]:
    """For each row, the log-probability and rank of its token, and of the `num_top[row]` most probable tokens, the
    lower id first among equals. `runs` has weights at temperature 1."""
    values = runs.at(token_ids)
    row, run = np.nonzero(runs.maxima > values[:, None])
    num_greater = np.count_nonzero(runs.gather(row, run) > values[row, None], axis=1)
    ranks = 1 + np.bincount(row, num_greater, minlength=len(values)).astype(np.int64)
    logprobs = (values - _normalisers(runs)).tolist()
    top_ids, top_logprobs = most_probable(runs, max(num_top))
    return [
        TokenLogprobs(logprob, rank, tuple(ids[:wanted]), tuple(top[:wanted]))
        for logprob, rank, ids, top, wanted in zip(
            logprobs, ranks.tolist(), top_ids, top_logprobs, num_top, strict=True
        )
    ]


def most_probable(runs: Runs, most: int) -> tuple[list[list[int]], list[list[float]]]:
    """For each row, the `most` most probable tokens and their log-probabilities, best first, the lower id first among
    equals. `runs` has weights at temperature 1."""
    most = min(most, runs.logits.shape[1])
    if not most:
        return [[]] * len(runs.rows), [[]] * len(runs.rows)
    # The best tokens lie in runs whose maximum is at least the most-th largest maximum.
    maxima = runs.maxima if most <= runs.maxima.shape[1] else runs.logits.whole(runs.rows)
    values, ids = runs.above(-np.partition(-maxima, most - 1, axis=1)[:, most - 1])
    order = np.argsort(-values, axis=1, kind="stable")[:, :most]
    logprobs = np.take_along_axis(values, order, axis=1) - _normalisers(runs)[:, None]
    return np.take_along_axis(ids, order, axis=1).tolist(), logprobs.tolist()


def _normalisers(runs: Runs) -> DoubleArray:
    """For each row, the logarithm of the sum over all tokens of exp(logit)."""
    normalisers: DoubleArray = np.log(runs.totals) + runs.best
    return normalisers


def _choose(runs: Runs, params: RowParams) -> IndexArray:
    """The token of each row: the best of greedy rows, a drawn one of the others; _NOTHING or _NO_NUMBER if there is
    none."""
    is_empty = runs.best == -np.inf
    is_sound = np.isfinite(runs.totals) & ~is_empty
    if is_sound.all() and not params.is_greedy.any():
        return draw(runs, params)
    chosen = np.where(is_empty, _NOTHING, _NO_NUMBER).astype(np.intp)
    greedy, drawn = np.flatnonzero(is_sound & params.is_greedy), np.flatnonzero(is_sound & ~params.is_greedy)
    if len(greedy):
        chosen[greedy] = _best_of(runs.part(greedy))
    if len(drawn):
        chosen[drawn] = draw(runs.part(drawn), params.part(drawn))
    return chosen


def _choose_among(values: FloatArray, token_ids: IndexArray, params: RowParams) -> int:
    """One of the few tokens of a single row; `values` are their logits."""
    best = int(values.argmax()) if len(values) else -1
    if best < 0 or np.isneginf(values[best]):
        return _NOTHING
    if not math.isfinite(values[best]):
        return _NO_NUMBER
    if not params.is_greedy[0]:
        row = values[None]
        if params.top_n_sigma[0] > 0.0:
            row = np.where(row >= least_near_the_best(row, params.top_n_sigma)[:, None], row, np.float32(-np.inf))
        weights = weights_of(row, row.max(axis=1), params.inverse_temperatures).astype(np.float64)
        best = int(draw_among(weights, params, weights.sum(axis=1), params.uniforms[:, 0])[0])
    return int(token_ids[best])


def _choose_by_chain(processed: Processed, row: int, request: Request, params: RowParams) -> int:
    """The token of a row whose filters form a chain, _NOTHING or _NO_NUMBER."""
    few = processed.few.get(row)
    if few is not None:
        values = processed.at(row, few)
    else:
        whole = processed.whole.get(row)
        values = processed.logits.whole(np.array([row]))[0] if whole is None else whole
    best = values.max() if len(values) else -np.inf
    if np.isneginf(best):
        return _NOTHING
    if not math.isfinite(best):
        return _NO_NUMBER
    states, position = request.mirostat, request.num_generated_tokens
    drawn = draw_by_chain(
        values,
        request.sampling,
        for_draw=float(params.uniforms[row, DRAWS - 1]),
        for_xtc=float(params.uniforms[row, 0]),
        vocab_size=processed.logits.shape[1],
        mu=0.0 if states is None else states.before(position),
    )
    if states is not None:
        states.note(position, drawn.mu)
    return drawn.place if few is None else int(few[drawn.place])


def _argmax(logits: Logits) -> IndexArray:
    """The best token of each row of the model's logits, or _NO_NUMBER."""
    if logits.reduction is not None:
        maxima = logits.reduction.maxima
        return _best_of(Runs.made_of(logits, Reduction(maxima, maxima[:, :0]), maxima[:, 0]))
    values = logits.whole(np.arange(len(logits.values))) if logits.values.dtype == np.uint16 else logits.values
    best: IndexArray = values.argmax(axis=1)
    best[~np.isfinite(values[np.arange(len(best)), best])] = _NO_NUMBER
    return best


def _best_of(runs: Runs) -> IndexArray:
    """The best token of each row, or _NO_NUMBER. A row with a NaN has none: argmax stops at the first NaN."""
    best = runs.argmax()
    best[~np.isfinite(runs.at(best))] = _NO_NUMBER
    return best


def _sampled(token_id: int) -> Sampled:
    if token_id == _NOTHING:
        return Sampled(-1, error=NOTHING_ALLOWED)
    return Sampled(max(token_id, -1))
