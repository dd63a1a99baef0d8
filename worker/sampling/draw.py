"""Draws a token of each row, after temperature, top-n-sigma, top-k, top-p (nucleus) and min-p. Pure, and for all rows
at once.

- **No filter**: draw a run by the sums of the runs, then a token of it.
- **A wide nucleus**: draw as if there were no filter, and accept the token if it is in the nucleus. That is decided by
  the weight of the more probable tokens, without sorting. After three rejections, draw exactly.
- **Anything else**: collect the tokens above a threshold below which the filters leave none, sort them, and draw.

Only runs that can affect the result are read.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.worker.sampling.logits import ranges
from headrace.worker.sampling.reduction import DoubleArray, FloatArray, IndexArray, weights_of
from headrace.worker.sampling.rows import ATTEMPTS, DRAWS, RowParams
from headrace.worker.sampling.runs import Runs

# The least top_p of a wide nucleus.
_WIDE_NUCLEUS = 0.5
# When runs are searched for tokens less probable than a drawn one, the first search reads this many runs. Later ones
# read this many times the number that would be enough if all runs were equal, and some more.
_FIRST_RUNS = 32
_MORE_RUNS = 1.1
_AND_MORE = 16
# The nucleus is first searched among tokens of at least this probability: these are few, and usually enough.
_NUCLEUS_SHARES = (1e-3, 1e-5)
# Lowers thresholds before an exact comparison, so that rounding excludes no token.
_SLACK = 1e-3


def draw(runs: Runs, params: RowParams) -> IndexArray:
    """The token of each row, `[n]`. `runs` has weights at the rows' temperatures, and finite totals."""
    if not params.is_filtered.any():
        return _draw_from_all(runs, params, 0)
    has_sigma = params.top_n_sigma > 0.0
    is_wide = (params.top_p >= _WIDE_NUCLEUS) & (params.top_k == 0) & (params.min_p == 0.0) & ~has_sigma
    chosen = np.empty(len(is_wide), np.intp)
    wide, narrow = np.flatnonzero(is_wide), np.flatnonzero(~is_wide & ~has_sigma)
    if has_sigma.any():
        rows = np.flatnonzero(has_sigma)
        chosen[rows] = _draw_near_the_best(runs.part(rows), params.part(rows))
    for attempt in range(ATTEMPTS):
        if not len(wide):
            break
        part, of_part = runs.part(wide), params.part(wide)
        drawn = _draw_from_all(part, of_part, attempt)
        chosen[wide] = drawn
        wide = wide[~_in_nucleus(part, of_part, drawn)]
    narrow = np.sort(np.concatenate([narrow, wide]))
    if len(narrow):
        chosen[narrow] = _draw_filtered(runs.part(narrow), params.part(narrow))
    return chosen


def draw_among(weights: DoubleArray, params: RowParams, totals: DoubleArray, uniforms: DoubleArray) -> IndexArray:
    """The drawn column of each row of `weights` `[n, columns]`, after top-k, top-p and min-p.

    The largest weight of a row is 1, and columns that pad it have 0. The columns are the most probable tokens of their
    row; `totals` `[n]` are the sums over all of its tokens. `uniforms` `[n]` are in [0, 1).
    """
    rows = np.arange(len(weights))
    if params.is_filtered.any():
        descending = -np.sort(-weights, axis=1)
        reach = np.cumsum(descending, axis=1)
        num_columns = weights.shape[1]
        num_kept = np.where(params.top_k > 0, np.minimum(params.top_k, num_columns), num_columns)
        totals = np.where(params.top_k > 0, reach[rows, num_kept - 1], totals)
        enough = (reach < (params.top_p * totals)[:, None]).sum(axis=1) + 1
        num_kept = np.where(params.top_p < 1.0, np.minimum(enough, num_kept), num_kept)
        edge = descending[rows, num_kept - 1][:, None]
        kept = weights > edge
        # Of equal weights at the edge, those of the lowest ids are kept.
        equal = weights == edge
        kept |= equal & (np.cumsum(equal, axis=1) <= (num_kept - kept.sum(axis=1))[:, None])
        kept &= weights >= params.min_p[:, None]
        weights = np.where(kept, weights, 0.0)
    return _pick(weights, uniforms * weights.sum(axis=1))


def least_near_the_best(logits: FloatArray, top_n_sigma: DoubleArray) -> FloatArray:
    """The least logit of each row of `logits` `[n, tokens]` that `top_n_sigma` `[n]` keeps. Tokens that are excluded,
    with -inf, do not count.

    Top-n-sigma sampling (Tang et al. 2024), as in llama.cpp: the best logit less n standard deviations of all of them.
    Temperature changes both alike, so it does not matter whether it was applied.
    """
    is_kept = np.isfinite(logits)
    num_kept = is_kept.sum(axis=1)
    values = np.where(is_kept, logits, 0.0).astype(np.float64)
    means = values.sum(axis=1) / num_kept
    deviations = np.where(is_kept, values - means[:, None], 0.0)
    sigmas = np.sqrt((deviations**2).sum(axis=1) / num_kept)
    # Rounded down, so that the best token is always kept.
    least = (logits.max(axis=1) - top_n_sigma * sigmas).astype(np.float32)
    below: FloatArray = np.nextafter(least, np.float32(-np.inf))
    return below


def _draw_near_the_best(runs: Runs, params: RowParams) -> IndexArray:
    """Draw among the tokens that top-n-sigma keeps, with the other filters applied to these."""
    least = least_near_the_best(runs.logits.whole(runs.rows), params.top_n_sigma)
    values, token_ids = runs.above(least)
    weights = weights_of(values, runs.best, params.inverse_temperatures).astype(np.float64)
    columns = draw_among(weights, params, weights.sum(axis=1), params.uniforms[:, DRAWS - 1])
    return token_ids[np.arange(len(columns)), columns]


def _draw_from_all(runs: Runs, params: RowParams, attempt: int) -> IndexArray:
    """Draw a run, then a token of it, with a random number each.

    With one number for both, a small change of any logit would move the bounds of all tokens after it. If all logits
    differ by 2e-5, as they may after a resumption, one draw in 240 would change. With two numbers it is one in 4,200
    (measured with a model's logits at temperature 0.9).
    """
    for_run, for_token = params.uniforms[:, 2 * attempt], params.uniforms[:, 2 * attempt + 1]
    reach = np.cumsum(runs.sums, axis=1, dtype=np.float64)
    run = (reach > (for_run * reach[:, -1])[:, None]).argmax(axis=1)
    weights = weights_of(runs.gather(np.arange(len(run)), run), runs.best, params.inverse_temperatures)
    drawn: IndexArray = run * runs.length + _pick(weights, for_token * weights.sum(axis=1))
    return drawn


def _in_nucleus(runs: Runs, params: RowParams, token_ids: IndexArray) -> npt.NDArray[np.bool_]:
    """Whether each row's token is in the nucleus: whether the tokens before it, which are more probable or as probable
    with a lower id, weigh less than `top_p` of all."""
    values = runs.at(token_ids)
    enough = params.top_p * runs.totals
    # The runs that hold such tokens weigh at least as much as the tokens.
    may_precede = runs.maxima >= values[:, None]
    at_most = np.einsum("ij,ij->i", runs.sums, may_precede, dtype=np.float64)
    is_in: npt.NDArray[np.bool_] = (params.top_p >= 1.0) | (at_most < enough)
    unsure = np.flatnonzero(~is_in)
    row, run = np.nonzero(may_precede[unsure])
    ends = np.searchsorted(row, np.arange(len(unsure)), side="right")
    begins = np.append(0, ends)[:-1]
    # `at_most` includes the less probable tokens of these runs. It is usually enough to read some runs to see that
    # these tokens weigh more than the surplus; the first few runs show how many to read.
    num_runs, num_read = ends - begins, np.zeros(len(unsure), np.intp)
    num_wanted = np.minimum(_FIRST_RUNS, num_runs)
    surplus = (at_most - enough)[unsure]
    behind = np.zeros(len(unsure))
    while len(left := np.flatnonzero(num_wanted)):
        counts = num_wanted[left]
        which = np.repeat(left, counts)
        of_rows, of_runs = unsure[which], run[ranges((begins + num_read)[left], counts)]
        weights = runs.sums[of_rows, of_runs] - _weight_before(runs, params, token_ids, values, of_rows, of_runs)
        behind += np.bincount(which, weights, minlength=len(unsure))
        num_read += num_wanted
        missing = surplus - behind
        # Rounding may make `behind` negative if the token is among the least probable.
        more = _MORE_RUNS * missing * num_read / np.maximum(behind, 0.0) + _AND_MORE
        num_wanted = np.where(missing >= 0, np.fmin(more, num_runs - num_read), 0).astype(np.intp)
    is_in[unsure] = surplus < behind
    return is_in


def _weight_before(
    runs: Runs, params: RowParams, token_ids: IndexArray, values: FloatArray, which: IndexArray, run: IndexArray
) -> FloatArray:
    """For pairs of a row (`which`) and one of its runs: weight of the run's tokens that come before the row's token."""
    own_run, own_offset = (part[which] for part in np.divmod(token_ids, runs.length))
    # Of equal logits, those with a lower id come before.
    limits = np.where(run < own_run, np.nextafter(values, np.float32(-np.inf))[which], values[which])
    gathered = runs.gather(which, run)
    precedes = gathered > limits[:, None]
    own = np.flatnonzero(run == own_run)
    lower = np.arange(runs.length) < own_offset[own, None]
    precedes[own] |= (gathered[own] == limits[own, None]) & lower
    weights = weights_of(gathered, runs.best[which], params.inverse_temperatures[which])
    before: FloatArray = np.einsum("ij,ij->i", weights, precedes)
    return before


def _draw_filtered(runs: Runs, params: RowParams) -> IndexArray:
    """Collect the tokens that the filters can keep, and draw among them."""
    totals, uniforms = runs.totals, params.uniforms[:, DRAWS - 1]
    chosen = np.empty(len(totals), np.intp)
    exact = _thresholds(runs, params)
    by_nucleus = (params.top_p < 1.0) & (params.top_k == 0)
    # Even all tokens less probable than this together do not reach 1 - top_p, so none of them is in the nucleus.
    least = (1.0 - params.top_p) * totals / runs.logits.shape[1]
    left = np.arange(len(totals))
    for share in (*_NUCLEUS_SHARES, 0.0):
        part, of_part = runs.part(left), params.part(left)
        wanted = np.minimum(np.maximum(share * totals[left], least[left]), 1.0)
        nucleus = part.best + np.log(wanted) / of_part.inverse_temperatures - _SLACK
        thresholds = np.where(by_nucleus[left], np.maximum(nucleus, exact[left]), exact[left])
        values, token_ids = part.above(thresholds.astype(np.float32))
        weights = weights_of(values, part.best, of_part.inverse_temperatures).astype(np.float64)
        columns = draw_among(weights, of_part, totals[left], uniforms[left])
        enough = weights.sum(axis=1) >= of_part.top_p * totals[left]
        done = enough | (thresholds <= exact[left]) | (share * totals[left] <= least[left])
        chosen[left[done]] = token_ids[np.arange(len(left)), columns][done]
        left = left[~done]
        if not len(left):
            break
    return chosen


def _thresholds(runs: Runs, params: RowParams) -> DoubleArray:
    """A logit for each row: all tokens that `top_k` and `min_p` can keep are above it.

    With both `top_k` and `top_p`, the nucleus is a share of the sum over the `top_k` best tokens, so all of these are
    needed, however many `min_p` keeps.
    """
    num_runs = runs.maxima.shape[1]
    min_p = np.where((params.top_k > 0) & (params.top_p < 1.0), 0.0, params.min_p)
    thresholds: DoubleArray = runs.best + np.log(min_p) / params.inverse_temperatures - _SLACK
    for top_k in np.unique(params.top_k[params.top_k > 0]):
        which = np.flatnonzero(params.top_k == top_k)
        # The k largest logits lie in runs whose maximum is at least the k-th largest maximum.
        values = runs.maxima[which] if top_k <= num_runs else runs.logits.whole(runs.rows[which])
        last = min(int(top_k), values.shape[1]) - 1
        thresholds[which] = np.maximum(thresholds[which], -np.partition(-values, last, axis=1)[:, last])
    return thresholds


def _pick(weights: npt.NDArray[np.floating], targets: DoubleArray) -> IndexArray:
    """The first column of each row at which the cumulative sum exceeds the target; at most the last with a weight."""
    reach = np.cumsum(weights, axis=1, dtype=np.float64)
    column: IndexArray = (reach > targets[:, None]).argmax(axis=1)
    beyond = np.flatnonzero(reach[:, -1] <= targets)
    if len(beyond):
        column[beyond] = weights.shape[1] - 1 - (weights[beyond, ::-1] > 0).argmax(axis=1)
    return column
