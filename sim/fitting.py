"""Fits the coefficients of step_cost to measured steps, by least squares on relative errors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.sim.step_cost import StepCost, place_among
from headrace.worker.engine.step_cost import StepShape


class Sample(NamedTuple):
    """A measured step."""

    shape: StepShape
    ms: float


def features(shape: StepShape, knots: tuple[int, ...]) -> list[float]:
    """The factors of the coefficients: those of `base`, then the others in the order of StepCost."""
    base = [0.0] * len(knots)
    left, share = place_among(knots, shape.tokens)
    base[left], base[left + 1] = 1.0 - share, share
    others = shape.attended, shape.reread, shape.context, shape.sequences, shape.changed
    return [*base, *map(float, others)]


def fitted(samples: Sequence[Sample], knots: tuple[int, ...]) -> StepCost:
    """Coefficients that are not negative: the worst negative one is left out until there is none. Those that no sample
    tells anything about are 0."""
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
    values = [float(value) for value in coefficients]
    attended, reread, context, sequence, change = values[len(knots) :]
    return StepCost(knots, tuple(values[: len(knots)]), attended, reread, context, sequence, change)


def errors_of(cost: StepCost, samples: Sequence[Sample]) -> list[float]:
    """Relative errors, sorted by size."""
    return sorted(abs(cost.milliseconds(shape) / ms - 1) for shape, ms in samples)
