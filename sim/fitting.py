"""Fits the coefficients of step_cost to measured steps, by least squares on relative errors. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.sim.step_cost import StepCost, Values
from headrace.worker.engine.step_cost import StepShape

OUTLIER = 2.0
"""A step that is off by more than this factor was disturbed."""
# Rounds of a fit, each with the errors relative to what the one before predicts, until predictions change by less.
_MOST_ROUNDS, _SETTLED = 30, 1e-4
# Features are alike in all samples if their products differ by less: the tokens and sequences of decode steps.
_ALIKE = 1e-12
# No sample counts as predicted to take less than this share of its time.
_LEAST_SHARE = 0.01


class Sample(NamedTuple):
    """A measured step."""

    shape: StepShape
    ms: float


def features(shape: StepShape, knots: tuple[int, ...]) -> list[float]:
    """The factors of the coefficients: 1 for the cost of `knots[0]` tokens, for each segment between two knots the part
    of it that is below the shape's tokens, and the others in the order of StepCost. Positions of contexts are in two
    parts: those that no other sequence reads, and those that are shared. So coefficients that are not negative make a
    `base` that never falls. The last segment has no end."""
    lengths = [
        max(0, min(shape.tokens, high) - low) for low, high in zip(knots[:-1], (*knots[1:-1], sys.maxsize), strict=True)
    ]
    distinct = shape.context - shape.shared
    others = shape.attended, shape.reread, distinct, shape.shared, shape.sequences, shape.changed
    return [1.0, *map(float, lengths), *map(float, others)]


def fitted(samples: Sequence[Sample], knots: tuple[int, ...]) -> StepCost:
    """Coefficients that are not negative. Those that no sample tells anything about are 0. No sample has fewer than
    `knots[0]` tokens.

    Errors are relative to the prediction, and a sample that is off by more than `OUTLIER` counts as off by it. So
    samples are as long as predicted on average. If errors were relative to the samples, long ones would count less, and
    predictions would be too short: by 6 % if steps vary by a tenth and every seventh takes up to twice as long."""
    all_features = np.array([features(sample.shape, knots) for sample in samples])
    milliseconds = np.array([sample.ms for sample in samples])
    expected = counted = milliseconds
    coefficients = np.zeros(all_features.shape[1])
    for _ in range(_MOST_ROUNDS):
        coefficients = _not_negative(all_features / expected[:, None], counted / expected)
        before, expected = expected, np.maximum(all_features @ coefficients, _LEAST_SHARE * milliseconds)
        counted = np.clip(milliseconds, expected / OUTLIER, expected * OUTLIER)
        if np.allclose(expected, before, rtol=_SETTLED, atol=0.0):
            break
    first, slopes, rest = coefficients[0], coefficients[1 : len(knots)], coefficients[len(knots) :]
    base = first + np.concatenate(((0.0,), np.cumsum(slopes * np.diff(knots))))
    attended, reread, context, shared, sequence, change = map(float, rest)
    saving = 0.0
    if any(sample.shape.shared for sample in samples):
        if shared > context:  # they save nothing
            return fitted([sample._replace(shape=sample.shape._replace(shared=0)) for sample in samples], knots)
        saving = context - shared
    return StepCost(knots, tuple(map(float, base)), attended, reread, context, sequence, change, saving=saving)


def _not_negative(rows: Values, targets: Values) -> Values:
    """The least squares solution of `rows` times coefficients equals `targets`: the coefficient that takes most away is
    left out until none is negative."""
    lengths = np.sqrt((rows * rows).sum(axis=0))
    used = np.flatnonzero(lengths)
    # With columns of length 1, coefficients of all units can be compared. Their products are small, whatever the number
    # of samples.
    columns = rows[:, used] / lengths[used]
    products, sums = columns.T @ columns, columns.T @ targets
    coefficients = np.zeros(rows.shape[1])
    left = np.arange(len(used))
    while len(left):
        solution = np.linalg.lstsq(products[np.ix_(left, left)], sums[left], rcond=_ALIKE)[0]
        if solution.min() >= 0:
            coefficients[used[left]] = solution / lengths[used[left]]
            break
        left = np.delete(left, solution.argmin())
    return coefficients


def errors_of(cost: StepCost, samples: Sequence[Sample]) -> list[float]:
    """Relative errors, sorted by size."""
    return sorted(abs(cost.milliseconds(shape) / ms - 1) for shape, ms in samples)
