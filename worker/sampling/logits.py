"""Logits of a step: the model's values, and the single values that logits processors changed.

The model's values are never overwritten: log-probabilities are read from them later, and copying a batch costs as much
as reading it. Models that compute in bfloat16 give bfloat16 logits, in half the memory. They become float32 where they
are read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from headrace.worker.sampling.reduction import FloatArray, IndexArray, Reduction, length_of

# The upper half of a float32.
HalfArray = npt.NDArray[np.uint16]


def float_of(bits: HalfArray) -> FloatArray:
    """Convert `bits` of bfloat16 to float32, in the same shape."""
    return np.left_shift(bits, 16, dtype=np.uint32).view(np.float32)


def floats_of(values: FloatArray | HalfArray) -> FloatArray:
    """The values as float32, in the same shape. Bits of bfloat16 are converted; float32 is returned as it is."""
    return float_of(values) if values.dtype == np.uint16 else values  # type: ignore[return-value, arg-type]


def ranges(starts: IndexArray, counts: IndexArray) -> IndexArray:
    """The integers `[starts[i], starts[i] + counts[i])` of all i, concatenated."""
    numbers: IndexArray = np.arange(counts.sum()) + np.repeat(starts - np.cumsum(counts) + counts, counts)
    return numbers


class Places:
    """Positions of single logits in rows `[n, vocab]`, sorted, without repeats, and grouped by run.

    Position i is (`rows[i]`, `token_ids[i]`), and was entry `order[i]` of the input. It lies in group `group[i]`; group
    g is run `runs[g]` of row `rows_of_runs[g]` and begins at position `firsts[g]`.
    """

    __slots__ = ("firsts", "group", "keys", "order", "rows", "rows_of_runs", "runs", "starts", "token_ids")

    def __init__(self, shape: tuple[int, int], rows: IndexArray, token_ids: IndexArray) -> None:
        """Positions in rows of this shape. The last of equal pairs counts."""
        num_rows, vocab_size = shape
        keys = rows * vocab_size + token_ids
        order = np.argsort(keys, kind="stable")
        keys = keys[order]
        is_last = np.append(keys[1:] != keys[:-1], True)
        self.order: IndexArray = order[is_last]
        self.keys: IndexArray = keys[is_last]
        self.rows = rows[self.order]
        self.token_ids = token_ids[self.order]
        length = length_of(vocab_size)
        num_runs = -(-vocab_size // length)
        runs = self.rows * num_runs + self.token_ids // length
        is_first = np.append(True, runs[1:] != runs[:-1])
        self.firsts: IndexArray = np.flatnonzero(is_first)
        self.group: IndexArray = np.cumsum(is_first) - 1
        self.rows_of_runs, self.runs = np.divmod(runs[self.firsts], num_runs)
        # With runs counted over all rows, run r has positions [starts[r], starts[r + 1]).
        counts = np.bincount(runs, minlength=num_rows * num_runs)
        self.starts: IndexArray = np.concatenate([[0], np.cumsum(counts)])


class Changes:
    """Changed logits: at each of `places` the model's value, `before`, and the one that replaces it."""

    __slots__ = ("before", "places", "values")

    def __init__(self, places: Places, before: FloatArray, values: npt.NDArray[np.floating]) -> None:
        self.places = places
        self.before = before
        self.values: FloatArray = values.astype(np.float32, copy=False)

    def apply(self, values: FloatArray, keys: IndexArray) -> None:
        """Put the changed logits into `values` `[k]`, in place. `keys` `[k]` say where each value is from: row * vocab
        + token."""
        places = self.places.keys
        at = np.minimum(np.searchsorted(places, keys), len(places) - 1)
        is_changed = places[at] == keys
        values[is_changed] = self.values[at[is_changed]]

    def apply_to_runs(self, values: FloatArray, runs: IndexArray) -> None:
        """Change runs in place: `values` `[len(runs), length]`, runs counted over all rows."""
        first = self.places.starts[runs]
        counts = self.places.starts[runs + 1] - first
        which = np.repeat(np.arange(len(runs)), counts)
        at = ranges(first, counts)
        values[which, self.places.token_ids[at] % values.shape[1]] = self.values[at]

    def apply_to_rows(self, values: FloatArray, rows: IndexArray) -> None:
        """Change whole rows in place: `values` `[len(rows), vocab]`."""
        for position, row in enumerate(rows.tolist()):
            first, last = np.searchsorted(self.places.rows, (row, row + 1))
            values[position, self.places.token_ids[first:last]] = self.values[first:last]


@dataclass(frozen=True, slots=True)
class Logits:
    """Logits of n rows. `values` `[n, vocab]` are the model's; `changes` replace some of them.

    `reduction` summarises the model's values at each row's temperature, and `model_sums` `[n, runs]` at temperature 1
    if any row has another. Without a reduction, the reader makes its own.
    """

    values: FloatArray | HalfArray
    reduction: Reduction | None = None
    model_sums: FloatArray | None = None
    changes: Changes | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """The number of rows, and the size of the vocabulary."""
        return self.values.shape[0], self.values.shape[1]

    def part(self, rows: slice | IndexArray) -> Logits:
        """Some of the rows, as the model gave them; a copy if they are not a slice."""
        reduction = None if self.reduction is None else Reduction(*(array[rows] for array in self.reduction))
        return Logits(self.values[rows], reduction, None if self.model_sums is None else self.model_sums[rows])

    def at_temperature_one(self) -> Logits:
        """The same rows, with the summary of the model's values at temperature 1 instead of each row's own."""
        if self.reduction is None or self.model_sums is None:
            return self
        return replace(self, reduction=Reduction(self.reduction.maxima, self.model_sums), model_sums=None)

    def with_changes(self, changes: Changes | None) -> Logits:
        """The same rows, with `changes` in place of those that they have; None for the model's values."""
        return self if self.changes is changes else replace(self, changes=changes)

    def at(self, rows: IndexArray, token_ids: IndexArray) -> FloatArray:
        """The logits `[k]` of the tokens `token_ids` `[k]`, each in its row of `rows` `[k]`, with the changes."""
        values = floats_of(self.values[rows, token_ids])
        if self.changes is not None:
            self.changes.apply(values, rows * self.shape[1] + token_ids)
        return values

    def gather(self, rows: IndexArray, runs: IndexArray) -> FloatArray:
        """`[len(rows), length]`: a run of each row. A run that the vocabulary cuts short is padded with -inf."""
        vocab_size = self.shape[1]
        length = length_of(vocab_size)
        if vocab_size % length == 0:
            # Three times as fast as indexing with two arrays.
            in_runs = self.values.reshape(-1, length)
            values = floats_of(in_runs.take(rows * (vocab_size // length) + runs, axis=0))
        else:
            token_ids = runs[:, None] * length + np.arange(length)
            values = floats_of(self.values[rows[:, None], np.minimum(token_ids, vocab_size - 1)])
            values[token_ids >= vocab_size] = -np.inf
        if self.changes is not None:
            self.changes.apply_to_runs(values, rows * -(-vocab_size // length) + runs)
        return values

    def whole(self, rows: IndexArray) -> FloatArray:
        """A copy of the rows `rows` `[k]` with the changes: float32 `[k, vocab]`."""
        values = floats_of(self.values[rows])
        if self.changes is not None:
            self.changes.apply_to_rows(values, rows)
        return values
