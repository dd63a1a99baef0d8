"""A summary of logits, which most of sampling uses. Only the summary reads the whole vocabulary.

The vocabulary, 49k to 152k tokens, is divided into runs of some hundred tokens. The summary has two numbers for each
run: its largest logit, and the sum of its weights. A weight is exp((logit - maximum) / temperature), a probability that
is not normalised.

    logits  [n, vocab]   | run 0 | run 1 | ... | run r |
    maxima  [n, runs]        4.1     9.7    ...    0.3       all tokens with a logit above 7.0 are in run 1
    sums    [n, runs]        1.2    31.0    ...    2.0       half of all probability is reached in run 1

The model's own graph computes the summary with the logits. A `Reducer` computes it for other rows: with OpenVINO
(row_sums.py), or with numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]

_MAX_RUN = 256


def run_length(vocab_size: int) -> int:
    """The longest run, a power of two from 32 to 256, that divides the vocabulary; 0 if there is none."""
    return next((length for length in (256, 128, 64, 32) if vocab_size % length == 0), 0)


def length_of(vocab_size: int) -> int:
    """The number of tokens in a run of this vocabulary. The last run may have fewer."""
    return run_length(vocab_size) or _MAX_RUN


class Reduction(NamedTuple):
    """The summary of n rows. `maxima` `[n, runs]`; `sums` `[n, runs]` at each row's temperature, or `[n, 0]` if nothing
    is drawn. No number depends on another run."""

    maxima: FloatArray
    sums: FloatArray


# Summarises logits `[n, vocab]`, n at least 1, at inverse temperatures `[n]`.
Reducer = Callable[[FloatArray, FloatArray], Reduction]


def reduce_with_numpy(logits: FloatArray, inverse_temperatures: FloatArray) -> Reduction:
    """Summarise logits `[n, vocab]` at inverse temperatures `[n]` with NumPy. Works for any vocabulary, and is fast
    enough for few rows only."""
    vocab_size = logits.shape[1]
    starts = np.arange(0, vocab_size, length_of(vocab_size))
    maxima = np.maximum.reduceat(logits, starts, axis=1)
    with np.errstate(invalid="ignore"):
        weights = logits - np.repeat(maxima, np.diff(starts, append=vocab_size), axis=1)
    weights *= inverse_temperatures[:, None]
    np.exp(weights, out=weights)
    sums = np.add.reduceat(weights, starts, axis=1)
    sums[np.isneginf(maxima)] = 0.0  # no token of the run is allowed
    return Reduction(maxima, sums)


def weigh_runs(values: FloatArray, maxima: FloatArray, inverse_temperatures: FloatArray) -> FloatArray:
    """The `sums` `[n, runs]` of a reduction, from `values` `[n, vocab]` whose runs all have the same length, `maxima`
    `[n, runs]` and `inverse_temperatures` `[n]`."""
    in_runs = values.reshape(*maxima.shape, -1)
    exponents = in_runs - maxima[..., None]
    exponents *= inverse_temperatures[:, None, None]
    sums: FloatArray = np.add.reduce(np.exp(exponents, out=exponents), axis=2)
    return sums


def weights_of(values: FloatArray, maxima: FloatArray, inverse_temperatures: FloatArray) -> FloatArray:
    """The weights exp((value - maximum) * inverse temperature) of `values` `[n, columns]`, with `maxima` `[n]` and
    `inverse_temperatures` `[n]`. Returns `[n, columns]`."""
    exponents: FloatArray = values - maxima[:, None]
    exponents *= inverse_temperatures[:, None]
    return np.exp(exponents, out=exponents)
