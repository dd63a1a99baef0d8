"""The numbers of sampling: a row of logits to a drawn token, and to log-probabilities. Pure.

The cost of a row is passes over the vocabulary, 2 to 16 us each at 49k (the exponential is the dear one), so filters
look at few candidates: those above a threshold that is known to keep all that can matter.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.worker.request import SamplingParams, TokenLogprobs

FloatArray = npt.NDArray[np.float32]

_MASK = (1 << 64) - 1
# Length of the runs in which a row is searched: sums or maxima of runs first, then within one.
_RUN = 256
# Tokens with at least this part of all probability are looked at first for the nucleus: few, and mostly enough.
_NUCLEUS_SHARES = (1e-3, 1e-5)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on seed and position alone, so that a draw is the same in
    every batch, and again after a resumption. Two rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014)."""
    state = seed & _MASK
    for step in (0x9E3779B97F4A7C15 * (position + 1), 0xD1B54A32D192ED03):
        state = (state + step) & _MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
        state ^= state >> 31
    return (state >> 11) * 2.0**-53


def draw(row: FloatArray, sampling: SamplingParams, u: float) -> int:
    """The token at quantile `u` of the filtered distribution of `row` `[vocab]`, which is overwritten."""
    row -= row.max()
    if 0 < sampling.top_k < len(row):
        candidates = _largest(row, sampling.top_k)
        weights = np.exp(row[candidates].astype(np.float64) / sampling.temperature)
        return _draw_among(candidates, weights, float(weights.sum()), sampling, u)
    if sampling.temperature != 1.0:
        row *= np.float32(1 / sampling.temperature)
    weights_of_all = np.exp(row, out=row)
    if sampling.top_p < 1.0:
        total = float(weights_of_all.sum())
        candidates = _nucleus_candidates(weights_of_all, total, sampling.top_p)
        return _draw_among(candidates, weights_of_all[candidates], total, sampling, u)
    if sampling.min_p > 0.0:
        candidates = np.flatnonzero(weights_of_all >= sampling.min_p)
        return _pick(candidates, weights_of_all[candidates], u)
    return _pick_from_all(weights_of_all, u)


def _nucleus_candidates(weights: FloatArray, total: float, top_p: float) -> npt.NDArray[np.intp]:
    """Tokens, ascending, among which the nucleus is: the most probable ones with `top_p` of all, and some more."""
    # Tokens less probable than this cannot reach (1 - top_p) even all together, so none is in the nucleus.
    least = (1.0 - top_p) * total / len(weights)
    for share in _NUCLEUS_SHARES:
        if share * total > least:
            candidates = np.flatnonzero(weights >= share * total)
            if weights[candidates].sum(dtype=np.float64) >= top_p * total:
                return candidates
    return np.flatnonzero(weights >= least)


def _draw_among(
    candidates: npt.NDArray[np.intp],
    weights: npt.NDArray[np.floating],
    total: float,
    sampling: SamplingParams,
    u: float,
) -> int:
    """Draw among the most probable candidates whose weights reach top_p of `total`; the best has weight 1."""
    if sampling.top_p < 1.0:
        kept = _nucleus(weights, sampling.top_p * total)
        candidates, weights = candidates[kept], weights[kept]
    if sampling.min_p > 0.0:
        kept = weights >= sampling.min_p
        candidates, weights = candidates[kept], weights[kept]
    return _pick(candidates, weights, u)


def _nucleus(weights: npt.NDArray[np.floating], enough: float) -> npt.NDArray[np.bool_]:
    """Which of the weights are the largest ones that together reach `enough`; the first among equals at the edge.
    Sorting values is ten times quicker than sorting their places."""
    descending = np.sort(weights)[::-1]
    last = min(int(np.searchsorted(np.cumsum(descending, dtype=np.float64), enough)), len(weights) - 1)
    edge = descending[last]
    kept: npt.NDArray[np.bool_] = weights > edge
    kept[np.flatnonzero(weights == edge)[: last + 1 - int(np.count_nonzero(kept))]] = True
    return kept


def _pick(candidates: npt.NDArray[np.intp], weights: npt.NDArray[np.floating], u: float) -> int:
    reach = np.cumsum(weights, dtype=np.float64)
    return int(candidates[min(int(np.searchsorted(reach, u * reach[-1], side="right")), len(candidates) - 1)])


def _pick_from_all(weights: FloatArray, u: float) -> int:
    """As `_pick` over a whole row, by sums of runs first: a running sum over the vocabulary costs four times more."""
    reach = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), _RUN)), dtype=np.float64)
    target = u * reach[-1]
    run = min(int(np.searchsorted(reach, target, side="right")), len(reach) - 1)
    start = run * _RUN
    within = np.cumsum(weights[start : start + _RUN], dtype=np.float64)
    before = reach[run - 1] if run else 0.0
    offset = int(np.searchsorted(within, target - before, side="right"))
    return start + min(offset, int(np.flatnonzero(weights[start : start + _RUN])[-1]))


def _largest(row: FloatArray, k: int) -> npt.NDArray[np.intp]:
    """Indices, ascending, of the `k` largest; the lowest ids among equals at the edge."""
    if k * _RUN >= len(row):
        return np.sort(np.argsort(-row, kind="stable")[:k])
    maxima = np.maximum.reduceat(row, np.arange(0, len(row), _RUN))
    # The k largest lie in runs whose maximum is at least the k-th largest maximum.
    edge = np.partition(maxima, len(maxima) - k)[len(maxima) - k]
    candidates = np.flatnonzero(row >= edge)
    return np.sort(candidates[np.argsort(-row[candidates], kind="stable")[:k]])


def logprobs_of(row: FloatArray, chosen: int, num_top: int) -> TokenLogprobs:
    """Log-probability and rank of `chosen`, and the `num_top` best, under softmax of `row` `[vocab]`."""
    best = row.max()
    weights = row - best
    normaliser = float(best) + float(np.log(float(np.exp(weights, out=weights).sum())))
    logprob = float(row[chosen]) - normaliser
    rank = 1 + int(np.count_nonzero(row > row[chosen]))
    if num_top == 0:
        return TokenLogprobs(logprob, rank, (), ())
    top = _largest(row, min(num_top, len(row)))
    top = top[np.argsort(-row[top], kind="stable")]
    values = row[top].astype(np.float64) - normaliser
    return TokenLogprobs(logprob, rank, tuple(top.tolist()), tuple(values.tolist()))
