"""The numbers of sampling: rows of logits to drawn tokens, and to log-probabilities. Pure, and for all rows at once.

Rows come as runs with their maxima and sums, see `logits`; only runs that can matter are looked into.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.sampling.logits import DoubleArray, FloatArray, IndexArray, Runs, all_of

# Quantiles that a draw may need. From a nucleus of at least `_WIDE_NUCLEUS` of all, tokens are drawn from everything
# until one is inside, the last time from the nucleus itself, which costs more.
_ATTEMPTS = 3
DRAWS = 2 * _ATTEMPTS + 1
_WIDE_NUCLEUS = 0.5
# Of the runs that may hold tokens before a drawn one, so many are looked at first; then so many times what were enough
# if all held the same, and so many more.
_FIRST_RUNS = 32
_MORE_RUNS, _AND_MORE = 1.1, 16
# Logits that are weighed at a time, about as many as the second-level cache holds.
_AT_ONCE = 1 << 18
# Tokens with at least this part of all probability are looked at first for the nucleus: few, and mostly enough.
_NUCLEUS_SHARES = (1e-3, 1e-5)
# Taken off a threshold that an exact comparison follows, so that rounding leaves nothing out.
_SLACK = 1e-3


class Filters(NamedTuple):
    """How each of n rows is drawn, arrays of `[n]`: 1 / temperature; `top_k`, 0 for all; `top_p`; `min_p`."""

    inverse_temperatures: FloatArray
    top_k: npt.NDArray[np.int64]
    top_p: DoubleArray
    min_p: DoubleArray

    def of(self, rows: IndexArray) -> Filters:
        """Those of some of the rows, in ascending order."""
        if len(rows) == len(self.top_k):
            return self
        return Filters(self.inverse_temperatures[rows], self.top_k[rows], self.top_p[rows], self.min_p[rows])

    @property
    def any(self) -> npt.NDArray[np.bool_]:
        """`[n]`: whether a filter leaves out tokens of the row."""
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> DoubleArray:
    """`[n, DRAWS]` numbers in [0, 1) with 53 random bits that depend on seed and position alone, so that a draw is the
    same in every batch, and again after a resumption. Two rounds of the SplitMix64 finaliser (Steele, Lea, Flood
    2014)."""
    counters = positions[:, None] * np.uint64(DRAWS) + np.arange(1, DRAWS + 1, dtype=np.uint64)
    weyl = np.multiply(counters, np.uint64(0x9E3779B97F4A7C15), dtype=np.uint64)
    state = _mixed(_mixed(seeds[:, None] + weyl) + np.uint64(0xD1B54A32D192ED03))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def best_of(runs: Runs) -> IndexArray:
    """The best token of each row, the lowest id among equals."""
    run = runs.maxima.argmax(axis=1)
    best: IndexArray = run * runs.length + runs.gather(np.arange(len(run)), run).argmax(axis=1)
    return best


def draw(runs: Runs, filters: Filters, quantiles: DoubleArray) -> IndexArray:
    """The token of each row from the row's filtered distribution. Of `quantiles` `[n, DRAWS]`, the first one that gives
    a token that the filters leave decides. `runs` has weights at the filters' temperatures; its sums are finite."""
    if not filters.any.any():
        return _draw_from_all(runs, filters, quantiles[:, 0], quantiles[:, 1])
    is_wide = (filters.top_p >= _WIDE_NUCLEUS) & (filters.top_k == 0) & (filters.min_p == 0.0)
    chosen = np.empty(len(quantiles), np.intp)
    wide, narrow = np.flatnonzero(is_wide), np.flatnonzero(~is_wide)
    for attempt in range(_ATTEMPTS):
        if not len(wide):
            break
        part, of_part = runs.of(wide), filters.of(wide)
        drawn = _draw_from_all(part, of_part, quantiles[wide, 2 * attempt], quantiles[wide, 2 * attempt + 1])
        chosen[wide] = drawn
        wide = wide[~_in_nucleus(part, of_part, drawn)]
    narrow = np.sort(np.concatenate([narrow, wide]))
    if len(narrow):
        chosen[narrow] = _draw_filtered(runs.of(narrow), filters.of(narrow), quantiles[narrow, DRAWS - 1])
    return chosen


def _in_nucleus(runs: Runs, filters: Filters, token_ids: IndexArray) -> npt.NDArray[np.bool_]:
    """Whether the tokens that go before each row's token, more probable or equal with a lower id, have less than
    `top_p` of all weight together."""
    values = runs.at(token_ids)
    enough = filters.top_p * runs.totals
    # All of the runs that hold such tokens is more than those tokens are.
    may_precede = runs.maxima >= values[:, None]
    at_most = np.einsum("ij,ij->i", runs.sums, may_precede, dtype=np.float64)
    is_in: npt.NDArray[np.bool_] = (filters.top_p >= 1.0) | (at_most < enough)
    unsure = np.flatnonzero(~is_in)
    row, run = np.nonzero(may_precede[unsure])
    ends = np.searchsorted(row, np.arange(len(unsure)), side="right")
    begins = np.append(0, ends)[:-1]
    # Most rows are decided by what some of these runs hold behind the token: the first few tell how many it takes.
    num_runs, num_read = ends - begins, np.zeros(len(unsure), np.intp)
    num_wanted = np.minimum(_FIRST_RUNS, num_runs)
    surplus = (at_most - enough)[unsure]
    behind = np.zeros(len(unsure))
    while len(left := np.flatnonzero(num_wanted)):
        counts = num_wanted[left]
        which = np.repeat(left, counts)
        of_rows, of_runs = unsure[which], run[all_of((begins + num_read)[left], counts)]
        weights = runs.sums[of_rows, of_runs] - _weight_before(runs, filters, token_ids, values, of_rows, of_runs)
        behind += np.bincount(which, weights, minlength=len(unsure))
        num_read += num_wanted
        missing = surplus - behind
        # Behind a row's last tokens there is nothing but rounding, which may be negative.
        more = _MORE_RUNS * missing * num_read / np.maximum(behind, 0.0) + _AND_MORE
        num_wanted = np.where(missing >= 0, np.fmin(more, num_runs - num_read), 0).astype(np.intp)
    is_in[unsure] = surplus < behind
    return is_in


def _weight_before(
    runs: Runs, filters: Filters, token_ids: IndexArray, values: FloatArray, which: IndexArray, run: IndexArray
) -> FloatArray:
    """Weight of the tokens that go before the token of row `which`, in each of some runs."""
    before = np.empty(len(which), np.float32)
    own_run, own_offset = np.divmod(token_ids[which], runs.length)
    limits = values[which]
    # Of equals, those with a lower id go before.
    limits = np.where(run < own_run, np.nextafter(limits, np.float32(-np.inf)), limits)
    at_once = _AT_ONCE // runs.length
    for first in range(0, len(which), at_once):
        part = slice(first, first + at_once)
        row = which[part]
        gathered = runs.gather(row, run[part])
        precedes = gathered > limits[part, None]
        own = np.flatnonzero(run[part] == own_run[part])
        lower = np.arange(runs.length) < own_offset[part][own][:, None]
        precedes[own] |= (gathered[own] == limits[part][own][:, None]) & lower
        gathered -= runs.best[row][:, None]
        gathered *= filters.inverse_temperatures[row][:, None]
        before[part] = np.einsum("ij,ij->i", np.exp(gathered, out=gathered), precedes)
    return before


def _draw_from_all(
    runs: Runs, filters: Filters, run_quantiles: DoubleArray, token_quantiles: DoubleArray
) -> IndexArray:
    """A run at its quantile, and in it a token at another. With one quantile for both, each logit would move the bounds
    of all tokens behind it: where all differ by 2e-5, as they may after a resumption, one draw in 240 came out
    differently, and so it is one in 4,200 (of a model's logits at temperature 0.9)."""
    reach = np.cumsum(runs.sums, axis=1, dtype=np.float64)
    run = (reach > (run_quantiles * reach[:, -1])[:, None]).argmax(axis=1)
    weights = _weights(runs.gather(np.arange(len(run)), run), runs.best, filters.inverse_temperatures)
    drawn: IndexArray = run * runs.length + _pick(weights, token_quantiles * weights.sum(axis=1))
    return drawn


def _draw_filtered(runs: Runs, filters: Filters, quantiles: DoubleArray) -> IndexArray:
    """Draw among the tokens above a threshold that keeps all that the filters can leave."""
    totals = runs.totals
    chosen = np.empty(len(quantiles), np.intp)
    exact = _thresholds(runs, filters)
    by_nucleus = (filters.top_p < 1.0) & (filters.top_k == 0)
    # Tokens less probable than this cannot reach (1 - top_p) even all together, so none is in the nucleus.
    least = (1.0 - filters.top_p) * totals / runs.logits.shape[1]
    left = np.arange(len(quantiles))
    for share in (*_NUCLEUS_SHARES, 0.0):
        part, of_part = runs.of(left), filters.of(left)
        wanted = np.minimum(np.maximum(share * totals[left], least[left]), 1.0)
        nucleus = part.best + np.log(wanted) / of_part.inverse_temperatures - _SLACK
        thresholds = np.where(by_nucleus[left], np.maximum(nucleus, exact[left]), exact[left])
        values, token_ids = part.above(thresholds.astype(np.float32))
        weights = _weights(values, part.best, of_part.inverse_temperatures).astype(np.float64)
        columns = choose(weights, of_part, totals[left], quantiles[left])
        enough = weights.sum(axis=1) >= of_part.top_p * totals[left]
        done = enough | (thresholds <= exact[left]) | (share * totals[left] <= least[left])
        chosen[left[done]] = token_ids[np.arange(len(left)), columns][done]
        left = left[~done]
        if not len(left):
            break
    return chosen


def _thresholds(runs: Runs, filters: Filters) -> DoubleArray:
    """The logit of each row above which are all tokens that `top_k` and `min_p` can leave, and all of which the nucleus
    is a part: that of the `top_k` best is a part of their sum, whatever `min_p` leaves of them."""
    num_runs = runs.maxima.shape[1]
    min_p = np.where((filters.top_k > 0) & (filters.top_p < 1.0), 0.0, filters.min_p)
    thresholds: DoubleArray = runs.best + np.log(min_p) / filters.inverse_temperatures - _SLACK
    for top_k in np.unique(filters.top_k[filters.top_k > 0]):
        which = np.flatnonzero(filters.top_k == top_k)
        # The k largest lie in runs whose maximum is at least the k-th largest maximum.
        values = runs.maxima[which] if top_k <= num_runs else runs.logits.whole(runs.rows[which])
        last = min(int(top_k), values.shape[1]) - 1
        thresholds[which] = np.maximum(thresholds[which], -np.partition(-values, last, axis=1)[:, last])
    return thresholds


def choose(weights: DoubleArray, filters: Filters, totals: DoubleArray, quantiles: DoubleArray) -> IndexArray:
    """The column of each row of `weights` `[n, columns]` at its quantile of what the filters leave. The best weight is
    1, columns that pad a row have 0, and `totals` are the sums of all weights of which these are the largest."""
    rows = np.arange(len(weights))
    if filters.any.any():
        descending = -np.sort(-weights, axis=1)
        reach = np.cumsum(descending, axis=1)
        num_columns = weights.shape[1]
        num_kept = np.where(filters.top_k > 0, np.minimum(filters.top_k, num_columns), num_columns)
        totals = np.where(filters.top_k > 0, reach[rows, num_kept - 1], totals)
        enough = (reach < (filters.top_p * totals)[:, None]).sum(axis=1) + 1
        num_kept = np.where(filters.top_p < 1.0, np.minimum(enough, num_kept), num_kept)
        edge = descending[rows, num_kept - 1][:, None]
        kept = weights > edge
        # Of equals at the edge, the lowest ids stay.
        equal = weights == edge
        kept |= equal & (np.cumsum(equal, axis=1) <= (num_kept - kept.sum(axis=1))[:, None])
        kept &= weights >= filters.min_p[:, None]
        weights = np.where(kept, weights, 0.0)
    return _pick(weights, quantiles * weights.sum(axis=1))


def _pick(weights: npt.NDArray[np.floating], targets: DoubleArray) -> IndexArray:
    """The first column of each row at which the running sum is over the target; the last with weight at the most."""
    reach = np.cumsum(weights, axis=1, dtype=np.float64)
    column: IndexArray = (reach > targets[:, None]).argmax(axis=1)
    beyond = np.flatnonzero(reach[:, -1] <= targets)
    if len(beyond):
        column[beyond] = weights.shape[1] - 1 - (weights[beyond, ::-1] > 0).argmax(axis=1)
    return column


def _weights(values: FloatArray, best: FloatArray, inverse_temperatures: FloatArray) -> FloatArray:
    exponents: FloatArray = values - best[:, None]
    exponents *= inverse_temperatures[:, None]
    return np.exp(exponents, out=exponents)


def weights_of(values: FloatArray, inverse_temperatures: FloatArray) -> DoubleArray:
    """Weights of `values` `[n, columns]`, 1 for the best of each row. Rows are padded with minus infinity."""
    return _weights(values, values.max(axis=1), inverse_temperatures).astype(np.float64)


class RowLogprobs:
    """Log-probabilities of rows under their softmax, and of the `num_top` best tokens of each, best first and the lower
    id first among equals. Reads the rows when it is made and again in `of`: they must be the same then."""

    def __init__(self, runs: Runs, num_top: int) -> None:
        """`runs` has weights at temperature 1."""
        self._runs = runs
        self._normalisers = runs.best + np.log(runs.totals)
        self._top_ids: list[list[int]] = [[]] * len(runs.rows)
        self._top_logprobs: list[list[float]] = [[]] * len(runs.rows)
        num_top = min(num_top, runs.logits.shape[1])
        if num_top:
            maxima = runs.maxima if num_top <= runs.maxima.shape[1] else runs.logits.whole(runs.rows)
            values, token_ids = runs.above(-np.partition(-maxima, num_top - 1, axis=1)[:, num_top - 1])
            order = np.argsort(-values, axis=1, kind="stable")[:, :num_top]
            self._top_ids = np.take_along_axis(token_ids, order, axis=1).tolist()
            logprobs = np.take_along_axis(values, order, axis=1) - self._normalisers[:, None]
            self._top_logprobs = logprobs.tolist()

    def of(self, token_ids: IndexArray, num_top: Sequence[int]) -> list[TokenLogprobs]:
        """For each row the log-probability and rank of its token, and as many of the best as it wants."""
        runs = self._runs
        values = runs.at(token_ids)
        row, run = np.nonzero(runs.maxima > values[:, None])
        num_greater = runs.logits.count_above(runs.rows[row], run, values[row])
        ranks = 1 + np.bincount(row, num_greater, minlength=len(values)).astype(np.int64)
        logprobs = (values - self._normalisers).tolist()
        return [
            TokenLogprobs(logprob, rank, tuple(ids[:wanted]), tuple(top[:wanted]))
            for logprob, rank, ids, top, wanted in zip(
                logprobs, ranks.tolist(), self._top_ids, self._top_logprobs, num_top, strict=True
            )
        ]
