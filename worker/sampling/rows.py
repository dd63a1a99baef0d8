"""How each row of a step is sampled, as arrays over the rows, with the random numbers of its draws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.worker.request.request import Request
from headrace.worker.sampling.reduction import DoubleArray, FloatArray, IndexArray

# See `draw`: two numbers for each attempt, and one for the exact draw.
ATTEMPTS = 3
DRAWS = 2 * ATTEMPTS + 1
_SEED_MASK = (1 << 64) - 1


class RowParams(NamedTuple):
    """Sampling parameters of n rows: arrays `[n]`, and `uniforms` `[n, DRAWS]` in [0, 1). Greedy rows are not drawn, so
    their other parameters have no meaning."""

    is_greedy: npt.NDArray[np.bool_]
    inverse_temperatures: FloatArray
    top_k: npt.NDArray[np.int64]
    """0: all tokens."""
    top_p: DoubleArray
    min_p: DoubleArray
    top_n_sigma: DoubleArray
    """0 or less: all tokens."""
    uniforms: DoubleArray

    @classmethod
    def of(cls, requests: Sequence[Request], ahead: IndexArray | None = None) -> RowParams:
        """The parameters for the next token of each request, or for the token after `ahead` `[n]` more."""
        samplings = [request.sampling for request in requests]
        positions = np.array([request.num_generated_tokens for request in requests], np.uint64)
        return cls(
            np.array([sampling.is_greedy for sampling in samplings]),
            np.array([sampling.inverse_temperature for sampling in samplings], np.float32),
            np.array([sampling.top_k for sampling in samplings], np.int64),
            np.array([sampling.top_p for sampling in samplings], np.float64),
            np.array([sampling.min_p for sampling in samplings], np.float64),
            np.array([sampling.top_n_sigma for sampling in samplings], np.float64),
            uniforms(
                np.array([sampling.seed & _SEED_MASK for sampling in samplings], np.uint64),
                positions if ahead is None else positions + ahead.astype(np.uint64),
            ),
        )

    def part(self, rows: IndexArray) -> RowParams:
        """The parameters of the rows `rows` `[k]`, which must be in ascending order."""
        if len(rows) == len(self.is_greedy):
            return self
        return RowParams(
            self.is_greedy[rows],
            self.inverse_temperatures[rows],
            self.top_k[rows],
            self.top_p[rows],
            self.min_p[rows],
            self.top_n_sigma[rows],
            self.uniforms[rows],
        )

    @property
    def is_filtered(self) -> npt.NDArray[np.bool_]:
        """For each row, `[n]`, whether top-k, top-p, min-p or top-n-sigma may exclude tokens."""
        return (self.top_k > 0) | (self.top_p < 1.0) | (self.min_p > 0.0) | (self.top_n_sigma > 0.0)


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> DoubleArray:
    """`[n, DRAWS]` random numbers in [0, 1), with 53 bits each.

    They depend on seed and position alone, so a request draws the same tokens in any batch and after a resumption. Two
    rounds of the SplitMix64 finaliser (Steele, Lea, Flood 2014).
    """
    counters = positions[:, None] * np.uint64(DRAWS) + np.arange(1, DRAWS + 1, dtype=np.uint64)
    weyl = np.multiply(counters, np.uint64(0x9E3779B97F4A7C15), dtype=np.uint64)
    state = _mixed(_mixed(seeds[:, None] + weyl) + np.uint64(0xD1B54A32D192ED03))
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(state: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
