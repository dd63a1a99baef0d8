"""Rows of logits, as the model gives them and as requests change them, and what is read of whole rows. Pure.

A row of 49k to 152k logits is read as runs of some hundred tokens. The maximum of each run, and the sum of its weights,
exp((logit - maximum) / temperature), are made where the logits are; that takes the only passes over the whole
vocabulary. All else looks only into runs that can matter: a draw from everything finds its run by the sums, and what
filters and log-probabilities want lies in runs whose maximum is large enough.

    logits  [n, vocab]   | run 0 | run 1 | ... | run r |
    maxima  [n, runs]        4.1     9.7    ...    0.3       a nucleus above 7.0 is in run 1 alone
    sums    [n, runs]        1.2    31.0    ...    2.0       a draw at 0.5 of all is in run 1

A model that computes in bfloat16 gives its logits so, in half the memory; they become float32 where they are looked at.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
DoubleArray = npt.NDArray[np.float64]
IndexArray = npt.NDArray[np.intp]
# The upper half of a float32.
HalfArray = npt.NDArray[np.uint16]

_MAX_RUN = 256
# Runs that are looked at together, so that what is made of them stays in the second-level cache.
_RUNS_AT_ONCE = 512
# Of a run's sum; what is left when more is taken off it has lost digits.
_MOST_LOST = 0.9


def run_length(vocab_size: int) -> int:
    """The longest run, a power of two from 32 to 256, into which the vocabulary divides; 0 if there is none."""
    return next((length for length in (256, 128, 64, 32) if vocab_size % length == 0), 0)


def length_of(vocab_size: int) -> int:
    """The length of all runs but the last, which may be shorter."""
    return run_length(vocab_size) or _MAX_RUN


def float_of(bits: HalfArray) -> FloatArray:
    """bfloat16 as float32."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def floats_of(values: FloatArray | HalfArray) -> FloatArray:
    """float32 numbers, or the bits of bfloat16, as float32."""
    return float_of(values) if values.dtype == np.uint16 else values  # type: ignore[return-value, arg-type]


def weigh_runs(values: FloatArray, maxima: FloatArray, inverse_temperatures: FloatArray) -> FloatArray:
    """The sums of a `Reduction` `[n, runs]`, from rows `[n, vocab]` whose runs are all of one length."""
    in_runs = values.reshape(*maxima.shape, -1)
    exponents = in_runs - maxima[..., None]
    exponents *= inverse_temperatures[:, None, None]
    sums: FloatArray = np.add.reduce(np.exp(exponents, out=exponents), axis=2)
    return sums


def all_of(firsts: IndexArray, counts: IndexArray) -> IndexArray:
    """The numbers from each of `firsts` on, as many as `counts` says, one behind the other."""
    numbers: IndexArray = np.arange(counts.sum()) + np.repeat(firsts - np.cumsum(counts) + counts, counts)
    return numbers


def _in_order(bits: npt.NDArray[Any]) -> npt.NDArray[np.int16]:
    """Integers in the order of the bfloat16 numbers that have these bits: half the work of comparing floats."""
    signed = bits.astype(np.uint16).view(np.int16)
    order: npt.NDArray[np.int16] = signed ^ ((signed >> 15) & np.int16(0x7FFF))
    return order


class Reduction(NamedTuple):
    """Rows of logits, read as runs: `maxima` `[n, runs]`, and `sums` `[n, runs]` of exp((logit - the run's maximum) *
    inverse temperature), or `[n, 0]` where they are not wanted. Nothing of a run depends on another."""

    maxima: FloatArray
    sums: FloatArray


class Places:
    """Where rows `[n, vocab]` are changed, known before there are logits: `rows` and `token_ids`, in order and no pair
    twice, by `order` taken from what was given. Runs that have any are `runs` of `rows_of_runs`; place i is in the one
    at `which[i]`, whose places begin at `firsts`."""

    __slots__ = ("firsts", "keys", "order", "rows", "rows_of_runs", "runs", "starts", "token_ids", "which")

    def __init__(self, shape: tuple[int, int], rows: IndexArray, token_ids: IndexArray) -> None:
        """Of rows of this shape. Of a pair that comes twice, the last is taken."""
        num_rows, vocab_size = shape
        keys = rows * vocab_size + token_ids
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        is_last = np.append(keys[1:] != keys[:-1], True)
        self.order: IndexArray = order[is_last]
        self.keys: IndexArray = keys[is_last]
        self.rows, self.token_ids = rows[self.order], token_ids[self.order]
        length = length_of(vocab_size)
        num_runs = -(-vocab_size // length)
        runs = self.rows * num_runs + self.token_ids // length
        is_first = np.append(True, runs[1:] != runs[:-1])
        self.firsts: IndexArray = np.flatnonzero(is_first)
        self.which: IndexArray = np.cumsum(is_first) - 1
        self.rows_of_runs, self.runs = np.divmod(runs[self.firsts], num_runs)
        # Places in run r, counted over all rows, are [starts[r], starts[r + 1]).
        counts = np.bincount(runs, minlength=num_rows * num_runs)
        self.starts: IndexArray = np.concatenate([[0], np.cumsum(counts)])


class Changes:
    """Logits that requests change: at each of `places` the one `before`, and the one that comes there instead."""

    __slots__ = ("before", "places", "values")

    def __init__(self, places: Places, before: FloatArray, values: npt.NDArray[np.floating]) -> None:
        self.places = places
        self.before = before
        self.values: FloatArray = values.astype(np.float32, copy=False)

    def apply(self, values: FloatArray, keys: IndexArray) -> None:
        """Replace those of `values` that are changed; `keys` are row * vocab + token."""
        places = self.places.keys
        at = np.minimum(np.searchsorted(places, keys), len(places) - 1)
        is_changed = places[at] == keys
        values[is_changed] = self.values[at[is_changed]]

    def apply_to_runs(self, values: FloatArray, runs: IndexArray) -> None:
        """Replace what is changed in runs, `values` `[len(runs), length]`; runs are counted over all rows."""
        first = self.places.starts[runs]
        counts = self.places.starts[runs + 1] - first
        which = np.repeat(np.arange(len(runs)), counts)
        at = all_of(first, counts)
        values[which, self.places.token_ids[at] % values.shape[1]] = self.values[at]

    def apply_to_rows(self, values: FloatArray, rows: IndexArray) -> None:
        """Replace what is changed in whole rows, `values` `[len(rows), vocab]`."""
        for position, row in enumerate(rows.tolist()):
            first, last = np.searchsorted(self.places.rows, (row, row + 1))
            values[position, self.places.token_ids[first:last]] = self.values[first:last]


@dataclass(frozen=True, slots=True)
class Logits:
    """Rows of a step: `values` `[n, vocab]`, float32 or bfloat16, what changes them, and what was read of them, without
    the changes, while they were computed: `reduction` at each row's temperature, and `model_sums`, those at temperature
    1 if any row differs. Without a reduction the reader makes his own."""

    values: FloatArray | HalfArray
    reduction: Reduction | None = None
    model_sums: FloatArray | None = None
    changes: Changes | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and vocabulary."""
        return self.values.shape[0], self.values.shape[1]

    def part(self, rows: slice) -> Logits:
        """Some of the rows, unchanged."""
        reduction = None if self.reduction is None else Reduction(*(array[rows] for array in self.reduction))
        return Logits(self.values[rows], reduction, None if self.model_sums is None else self.model_sums[rows])

    def changed(self, changes: Changes) -> Logits:
        """The rows with other changes."""
        return replace(self, changes=changes)

    @property
    def unchanged(self) -> Logits:
        """The rows as the model gave them."""
        return self if self.changes is None else replace(self, changes=None)

    def at(self, rows: IndexArray, token_ids: IndexArray) -> FloatArray:
        """Single logits."""
        values = floats_of(self.values[rows, token_ids])
        if self.changes is not None:
            self.changes.apply(values, rows * self.shape[1] + token_ids)
        return values

    def gather(self, rows: IndexArray, runs: IndexArray) -> FloatArray:
        """`[len(rows), length]`: some runs of some rows; behind the end of the vocabulary there is minus infinity."""
        vocab_size = self.shape[1]
        length = length_of(vocab_size)
        if vocab_size % length == 0:
            # A third of the time of an index of two arrays.
            in_runs = self.values.reshape(-1, length)
            values = floats_of(in_runs.take(rows * (vocab_size // length) + runs, axis=0))
        else:
            token_ids = runs[:, None] * length + np.arange(length)
            values = floats_of(self.values[rows[:, None], np.minimum(token_ids, vocab_size - 1)])
            values[token_ids >= vocab_size] = -np.inf
        if self.changes is not None:
            self.changes.apply_to_runs(values, rows * -(-vocab_size // length) + runs)
        return values

    def count_above(self, rows: IndexArray, runs: IndexArray, limits: FloatArray) -> IndexArray:
        """How many logits of each of some runs are above its limit."""
        length = length_of(self.shape[1])
        if self.values.dtype != np.uint16 or self.changes is not None or self.shape[1] % length:
            few: IndexArray = np.count_nonzero(self.gather(rows, runs) > limits[:, None], axis=1)
            return few
        counts = np.empty(len(rows), np.intp)
        in_runs, num_runs = self.values.reshape(-1, length), self.shape[1] // length
        order = _in_order(limits.view(np.uint32) >> 16)[:, None]
        order[order == -1] = 0  # minus zero is not below zero
        for first in range(0, len(rows), _RUNS_AT_ONCE):
            part = slice(first, first + _RUNS_AT_ONCE)
            bits = in_runs.take(rows[part] * num_runs + runs[part], axis=0)
            is_above = np.packbits(_in_order(bits) > order[part])
            counts[part] = np.bitwise_count(is_above.view(np.uint32)).reshape(len(bits), -1).sum(axis=1)
        return counts

    def whole(self, rows: IndexArray) -> FloatArray:
        """Whole rows, copied."""
        values = floats_of(self.values[rows])
        if self.changes is not None:
            self.changes.apply_to_rows(values, rows)
        return values


class Reducer(Protocol):
    """Reads whole rows."""

    def reduce(self, logits: FloatArray, inverse_temperatures: FloatArray) -> Reduction:
        """The runs of `logits` `[n, vocab]`, n at least 1, with sums at `inverse_temperatures` `[n]`."""
        ...


class NumpyReducer:
    """Reduces with numpy: for few rows of any length."""

    def reduce(self, logits: FloatArray, inverse_temperatures: FloatArray) -> Reduction:
        """As `Reducer.reduce`."""
        vocab_size = logits.shape[1]
        starts = np.arange(0, vocab_size, length_of(vocab_size))
        maxima = np.maximum.reduceat(logits, starts, axis=1)
        with np.errstate(invalid="ignore"):
            weights = logits - np.repeat(maxima, np.diff(starts, append=vocab_size), axis=1)
        weights *= inverse_temperatures[:, None]
        np.exp(weights, out=weights)
        sums = np.add.reduceat(weights, starts, axis=1)
        # What is forbidden altogether has no weight.
        sums[np.isneginf(maxima)] = 0.0
        return Reduction(maxima, sums)


def after_changes(
    logits: Logits, reduction: Reduction, inverse_temperatures: FloatArray, *, all_maxima: bool
) -> Reduction:
    """The reduction of logits, made without their changes, with them. Weights are taken off and added; a run is read
    again where that would leave nothing but rounding, or where it may hold the best of its row. Unless `all_maxima` are
    wanted, others keep a maximum that is too large where it was changed."""
    changes = logits.changes
    if changes is None:
        return reduction
    maxima, sums = reduction.maxima.copy(), reduction.sums.copy()
    row, run, firsts = changes.places.rows_of_runs, changes.places.runs, changes.places.firsts
    highest = maxima[row, run]
    is_stale = np.maximum.reduceat(changes.values, firsts) > highest
    if sums.shape[1]:
        which = changes.places.which
        exponents = np.stack([changes.before, changes.values])
        exponents -= highest[which]
        exponents *= inverse_temperatures[row][which]
        lost, gained = np.add.reduceat(np.exp(exponents, out=exponents), firsts, axis=1)
        is_stale |= lost > _MOST_LOST * sums[row, run]
        sums[row, run] += gained - lost
    is_doubtful = np.maximum.reduceat(changes.before, firsts) >= highest
    if not all_maxima:
        certain = maxima.copy()
        certain[row[is_doubtful], run[is_doubtful]] = -np.inf
        is_doubtful &= highest >= certain.max(axis=1)[row]
    stale = np.flatnonzero(is_stale | is_doubtful)
    if len(stale):
        row, run = row[stale], run[stale]
        values = logits.gather(row, run)
        highest = maxima[row, run] = values.max(axis=1)
        if sums.shape[1]:
            weights = np.exp((values - highest[:, None]) * inverse_temperatures[row][:, None])
            sums[row, run] = np.where(np.isneginf(highest), 0.0, weights.sum(axis=1))
    return Reduction(maxima, sums)


@dataclass(frozen=True, slots=True)
class Runs:
    """Rows of logits to be drawn from. `rows` `[n]` are those of `logits` that are meant; `maxima` `[n, runs]`, see
    `after_changes`, and their largest, `best` `[n]`, the best logit; `sums` `[n, runs]` of exp((logit - best) * inverse
    temperature), `[n, 0]` where nobody draws, and their `totals` `[n]`. Tokens `[r * length, (r + 1) * length)` are run
    r; the last may be shorter. A row that holds a NaN, or nothing finite, has a total that is not finite."""

    logits: Logits
    rows: IndexArray
    maxima: FloatArray
    best: FloatArray
    sums: FloatArray
    totals: DoubleArray
    length: int

    @classmethod
    def made_of(cls, logits: Logits, reduction: Reduction, inverse_temperatures: FloatArray) -> Runs:
        """All rows of `logits`, as reduced with their changes at `inverse_temperatures` `[n]`."""
        maxima, sums = reduction
        best = maxima.max(axis=1)
        if sums.shape[1]:
            exponents = maxima - best[:, None]
            exponents *= inverse_temperatures[:, None]
            sums = np.exp(exponents, out=exponents) * sums
        totals = sums.sum(axis=1, dtype=np.float64)
        return cls(logits, np.arange(len(maxima)), maxima, best, sums, totals, length_of(logits.shape[1]))

    def of(self, which: IndexArray) -> Runs:
        """Those of some of the n rows, `which` in ascending order."""
        assert np.all(which[1:] > which[:-1]), "rows in another order would be taken for others"
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
        """`[n]`: the logit of a token of each row."""
        return self.logits.at(self.rows, token_ids)

    def gather(self, which: IndexArray, runs: IndexArray) -> FloatArray:
        """The logits `[len(which), length]` of some runs of some of the n rows; behind the end of the vocabulary there
        is minus infinity."""
        return self.logits.gather(self.rows[which], runs)

    def above(self, thresholds: FloatArray) -> tuple[FloatArray, IndexArray]:
        """Values and ids `[n, columns]` of each row's tokens that reach its threshold, in order of id, padded with
        minus infinity and 0."""
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
