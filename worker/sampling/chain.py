"""Draws from one row by a chain of filters, one after the other: for requests with a filter that `draw` does not know,
or with an order of their own. Pure. The definitions are those of llama.cpp.

- **Temperature**, if dynamic: it depends on the entropy of the tokens, as a share of the largest possible one.
- **Locally typical** (Meister et al. 2023): keeps the tokens whose information is closest to the entropy.
- **XTC**: by chance, leaves out all top choices but the least probable one.
- **Mirostat** (Basu et al. 2021): instead of all other filters, keeps the tokens whose surprise is at most mu bits, and
  moves mu after each token towards the target. Version 1 estimates their number from the slope of the best tokens.

A chain reads the whole row, so it takes some milliseconds for a large vocabulary. Numbers are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.protos.sampling_fields import FILTERS
from headrace.worker.request.params import SamplingParams
from headrace.worker.sampling.draw import least_near_the_best
from headrace.worker.sampling.reduction import DoubleArray, FloatArray, IndexArray

# The number of most probable tokens from which mirostat 1 estimates the slope.
_NUM_FOR_SLOPE = 100
# Lower temperatures keep the most probable token.
_LEAST_TEMPERATURE = 1e-6
_Kept = npt.NDArray[np.bool_]


class Drawn(NamedTuple):
    """The index of the drawn token among the values, and mirostat's state after it."""

    place: int
    mu: float


def draw_by_chain(
    values: FloatArray,
    sampling: SamplingParams,
    *,
    for_draw: float,
    for_xtc: float,
    vocab_size: int,
    mu: float = 0.0,
) -> Drawn:
    """Draw a token from `values` `[k]`, the logits of the allowed tokens. Values of -inf are never drawn; at least one
    value must be finite. `vocab_size` is the size of the whole vocabulary.

    `for_draw` and `for_xtc` are random numbers in [0, 1), and `mu` is mirostat's state. Of equal logits, the one with
    the lower index counts as the more probable.
    """
    places = np.flatnonzero(values > -np.inf)
    logits = values[places].astype(np.float64)
    order = ("temperature",) if sampling.mirostat else sampling.samplers or FILTERS
    for name in order:
        if name == "temperature":
            temperature = _temperature(logits, sampling)
            kept = _best(logits, 1) if temperature < _LEAST_TEMPERATURE else None
            logits = logits if temperature < _LEAST_TEMPERATURE else logits / temperature
        else:
            kept = _FILTERS[name](logits, sampling, for_xtc)
        if kept is not None:
            places, logits = places[kept], logits[kept]
    if sampling.mirostat:
        kept = _within_surprise(logits, sampling.mirostat, mu, vocab_size)
        places, logits = places[kept], logits[kept]
    weights = np.exp(logits - logits.max())
    reach = np.cumsum(weights)
    drawn = min(int(np.searchsorted(reach, for_draw * reach[-1], side="right")), len(weights) - 1)
    if sampling.mirostat:
        surprise = -math.log2(weights[drawn] / reach[-1])
        mu -= sampling.mirostat_eta * (surprise - sampling.mirostat_tau)
    return Drawn(int(places[drawn]), mu)


def _probabilities(logits: DoubleArray) -> DoubleArray:
    weights: DoubleArray = np.exp(logits - logits.max())
    weights /= weights.sum()
    return weights


def _temperature(logits: DoubleArray, sampling: SamplingParams) -> float:
    if not sampling.dynatemp_range or len(logits) < 2:
        return sampling.temperature
    probabilities = _probabilities(logits)
    share = min(_entropy(probabilities) / math.log(len(logits)), 1.0)
    least = max(0.0, sampling.temperature - sampling.dynatemp_range)
    most = sampling.temperature + sampling.dynatemp_range
    return float(least + (most - least) * share**sampling.dynatemp_exponent)


def _entropy(probabilities: DoubleArray) -> float:
    """The entropy in nats."""
    some = probabilities[probabilities > 0.0]
    return max(0.0, float(-(some * np.log(some)).sum()))


def _best(logits: DoubleArray, count: int) -> _Kept:
    """The `count` most probable tokens."""
    size = len(logits)
    if count >= size:
        return np.ones(size, np.bool_)
    edge = np.partition(logits, size - count)[size - count]
    kept: _Kept = logits > edge
    equal = np.flatnonzero(logits == edge)
    kept[equal[: count - int(kept.sum())]] = True
    return kept


def _first(order: IndexArray, count: int) -> _Kept:
    kept = np.zeros(len(order), np.bool_)
    kept[order[:count]] = True
    return kept


def _near_the_best(logits: DoubleArray, sampling: SamplingParams, _: float) -> _Kept | None:
    if sampling.top_n_sigma <= 0.0:
        return None
    row = logits.astype(np.float32)[None]
    kept: _Kept = row[0] >= least_near_the_best(row, np.array([sampling.top_n_sigma]))[0]
    return kept


def _top_k(logits: DoubleArray, sampling: SamplingParams, _: float) -> _Kept | None:
    return _best(logits, sampling.top_k) if sampling.top_k else None


def _typical(logits: DoubleArray, sampling: SamplingParams, _: float) -> _Kept | None:
    if sampling.typical_p >= 1.0:
        return None
    probabilities = _probabilities(logits)
    with np.errstate(divide="ignore"):
        distances = np.abs(-np.log(probabilities) - _entropy(probabilities))
    order = np.argsort(distances, kind="stable")
    enough = np.searchsorted(np.cumsum(probabilities[order]), sampling.typical_p, side="right")
    return _first(order, int(enough) + 1)


def _nucleus(logits: DoubleArray, sampling: SamplingParams, _: float) -> _Kept | None:
    if sampling.top_p >= 1.0:
        return None
    descending = -np.sort(-_probabilities(logits))
    return _best(logits, int(np.searchsorted(np.cumsum(descending), sampling.top_p)) + 1)


def _probable(logits: DoubleArray, sampling: SamplingParams, _: float) -> _Kept | None:
    if sampling.min_p <= 0.0:
        return None
    kept: _Kept = logits >= logits.max() + math.log(sampling.min_p)
    return kept


def _without_top_choices(logits: DoubleArray, sampling: SamplingParams, for_xtc: float) -> _Kept | None:
    if not sampling.has_xtc or for_xtc >= sampling.xtc_probability:
        return None
    num_top = int((_probabilities(logits) >= sampling.xtc_threshold).sum())
    return ~_best(logits, num_top - 1) if num_top > 1 else None


_FILTERS: Mapping[str, Callable[[DoubleArray, SamplingParams, float], _Kept | None]] = {
    "top_n_sigma": _near_the_best,
    "top_k": _top_k,
    "typical_p": _typical,
    "top_p": _nucleus,
    "min_p": _probable,
    "xtc": _without_top_choices,
}


def _within_surprise(logits: DoubleArray, version: int, mu: float, vocab_size: int) -> _Kept:
    """The tokens that mirostat keeps, at least one."""
    probabilities = _probabilities(logits)
    if version == 1:
        return _best(logits, _num_for(probabilities, mu, vocab_size))
    # The surprise of a token is -log2 of its probability.
    return _best(logits, max(1, int((probabilities >= 2.0**-mu).sum())))


def _num_for(probabilities: DoubleArray, mu: float, vocab_size: int) -> int:
    """How many tokens mirostat 1 keeps: those of a Zipf distribution, of the exponent that the best tokens have, whose
    surprise is below mu."""
    best = -np.sort(-probabilities)[:_NUM_FOR_SLOPE]
    best = best[best > 0.0]
    if len(best) < 2:
        return 1
    steps = np.log((np.arange(1, len(best)) + 1.0) / np.arange(1, len(best)))
    exponent = float((steps * np.log(best[:-1] / best[1:])).sum() / (steps * steps).sum())
    excess = exponent - 1.0
    with np.errstate(all="ignore"):
        scale = np.log(float(vocab_size)) if abs(excess) < 1e-9 else (1.0 - float(vocab_size) ** -excess) / excess
        count = float((np.float64(2.0) ** mu / scale) ** np.float64(1.0 / exponent)) if exponent > 0.0 else math.inf
    return max(1, int(count)) if count < len(probabilities) else len(probabilities)
