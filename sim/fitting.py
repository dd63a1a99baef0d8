"""Fits the coefficients of step_cost to measured steps, by least squares on relative errors. Pure."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.sim.step_cost import StepCost
from headrace.worker.engine.step_cost import StepShape


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
    """Coefficients that are not negative: the worst negative one is left out until there is none. Those that no sample
    tells anything about are 0. No sample has fewer than `knots[0]` tokens."""
    all_features = np.array([features(sample.shape, knots) for sample in samples])
    milliseconds = np.array([sample.ms for sample in samples])
    used = [column for column in range(all_features.shape[1]) if all_features[:, column].any()]
    solution = np.zeros(0)
    while used:
        rows = all_features[:, used] / milliseconds[:, None]
        solution = np.linalg.lstsq(rows, np.ones(len(rows)), rcond=None)[0]
        if min(solution) >= 0:
            break
        del used[int(np.argmin(solution))]
    coefficients = np.zeros(all_features.shape[1])
    coefficients[used] = solution
    first, slopes, rest = coefficients[0], coefficients[1 : len(knots)], coefficients[len(knots) :]
    base = first + np.concatenate(((0.0,), np.cumsum(slopes * np.diff(knots))))
    attended, reread, context, shared, sequence, change = map(float, rest)
    saving = 0.0
    if any(sample.shape.shared for sample in samples):
        if shared > context:  # they save nothing
            return fitted([sample._replace(shape=sample.shape._replace(shared=0)) for sample in samples], knots)
        saving = context - shared
    return StepCost(knots, tuple(map(float, base)), attended, reread, context, sequence, change, saving=saving)


def errors_of(cost: StepCost, samples: Sequence[Sample]) -> list[float]:
    """Relative errors, sorted by size."""
    return sorted(abs(cost.milliseconds(shape) / ms - 1) for shape, ms in samples)
