"""Rows to sample from: logits with their changes, and a summary that includes these changes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.reduction import DoubleArray, FloatArray, IndexArray, Reduction, length_of, weights_of

# If a change subtracts more than this part of a run's sum, too few digits are left, so the run is read again.
_MOST_LOST = 0.9


@dataclass(frozen=True, slots=True)
class Runs:
    """n rows to sample from; `rows` `[n]` are their numbers in `logits`.

    `maxima` `[n, runs]` are the largest logits of the runs, and `best` `[n]` those of the rows.
    `sums` `[n, runs]` are the sums of weights exp((logit - best) / temperature), or `[n, 0]` if nothing is drawn;
    `totals` `[n]` add them up. Run r has tokens `[r * length, (r + 1) * length)`; the last may be shorter. The total of
    a row that holds a NaN, or no finite number, is not finite.
    """

    logits: Logits
    rows: IndexArray
    maxima: FloatArray
    best: FloatArray
    sums: FloatArray
    totals: DoubleArray
    length: int

    @classmethod
    def made_of(cls, logits: Logits, reduction: Reduction, inverse_temperatures: FloatArray) -> Runs:
        """All rows of `logits`. `reduction` is that of the model's values, at `inverse_temperatures` `[n]`."""
        maxima, sums = _corrected(logits, reduction, inverse_temperatures)
        best = maxima.max(axis=1)
        if sums.shape[1]:
            sums = weights_of(maxima, best, inverse_temperatures) * sums
        totals = sums.sum(axis=1, dtype=np.float64)
        return cls(logits, np.arange(len(maxima)), maxima, best, sums, totals, length_of(logits.shape[1]))

    def part(self, which: IndexArray) -> Runs:
        """The summary of the rows `which` `[k]`, which must be in ascending order."""
        assert np.all(which[1:] > which[:-1]), "rows in another order would be mistaken for others"
        if len(which) == len(self.rows):
            return self
        return replace(
            self,
            rows=self.rows[which],
            maxima=self.maxima[which],
            best=self.best[which],
            sums=self.sums[which],
            totals=self.totals[which],
        )

    def at(self, token_ids: IndexArray) -> FloatArray:
        """`[n]`: the logit of one token of each row."""
        return self.logits.at(self.rows, token_ids)

    def gather(self, which: IndexArray, runs: IndexArray) -> FloatArray:
        """`[len(which), length]`: a run of each of some rows; see `Logits.gather`."""
        return self.logits.gather(self.rows[which], runs)

    def argmax(self) -> IndexArray:
        """`[n]`: the token with the largest logit, the lowest id among equals."""
        run = self.maxima.argmax(axis=1)
        best: IndexArray = run * self.length + self.gather(np.arange(len(run)), run).argmax(axis=1)
        return best

    def above(self, thresholds: FloatArray) -> tuple[FloatArray, IndexArray]:
        """Logits and ids `[n, columns]` of the tokens at or above each row's threshold, in order of id, padded with
        -inf and 0."""
        row, run = np.nonzero(self.maxima >= thresholds[:, None])
        values = self.gather(row, run)
        at, offset = np.nonzero(values >= thresholds[row][:, None])
        rows = row[at]
        counts = np.bincount(rows, minlength=len(self.rows))
        columns = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        shape = (len(self.rows), max(1, int(counts.max())))
        padded, token_ids = np.full(shape, -np.inf, np.float32), np.zeros(shape, np.intp)
        padded[rows, columns] = values[at, offset]
        token_ids[rows, columns] = run[at] * self.length + offset
        return padded, token_ids


def _corrected(logits: Logits, reduction: Reduction, inverse_temperatures: FloatArray) -> Reduction:
    """The reduction after the changes of `logits`.

    The weights of old values are subtracted and those of new ones added. A run is read again if too few digits would be
    left, or if its largest logit changes.
    """
    changes = logits.changes
    if changes is None:
        return reduction
    maxima, sums = reduction.maxima.copy(), reduction.sums.copy()
    row = changes.places.rows_of_runs
    run = changes.places.runs
    firsts = changes.places.firsts
    highest = maxima[row, run]
    is_stale = np.maximum.reduceat(changes.before, firsts) >= highest
    is_stale |= np.maximum.reduceat(changes.values, firsts) > highest
    if sums.shape[1]:
        group = changes.places.group
        exponents = np.stack([changes.before, changes.values])
        exponents -= highest[group]
        exponents *= inverse_temperatures[row][group]
        lost, gained = np.add.reduceat(np.exp(exponents, out=exponents), firsts, axis=1)
        is_stale |= lost > _MOST_LOST * sums[row, run]
        sums[row, run] += gained - lost
    row, run = row[is_stale], run[is_stale]
    if len(row):
        values = logits.gather(row, run)
        highest = maxima[row, run] = values.max(axis=1)
        if sums.shape[1]:
            weights = weights_of(values, highest, inverse_temperatures[row])
            sums[row, run] = np.where(np.isneginf(highest), 0.0, weights.sum(axis=1))
    return Reduction(maxima, sums)
