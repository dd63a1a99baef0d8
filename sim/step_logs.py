"""Costs of steps from the logs of workers: which steps count, what each took, and the fit. Pure."""

from __future__ import annotations

import bisect
import itertools
import math
import random
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.sim.fitting import Sample, errors_of, fitted
from headrace.sim.step_cost import StepCost, StepCostPair, Values
from headrace.worker.engine.step_cost import StepShape

DECODE_KNOTS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
PROMPT_KNOTS = (8, 16, 48, 128, 256, 512, 1024, 2048, 4096)
LEAST_STEPS = 30
"""The minimum number of steps of a kind for a fit."""
_TEST_SHARE = 0.25
# The slowdown is found in large steps, and around the best of them in small ones.
_MOST_SLOWDOWN, _LARGE_STEP, _SMALL_STEP = 3.0, 0.2, 0.01
# Steps are about alike if their positions differ by less than this factor, of which as many are added to each as count
# for little. Fewer steps than `_LEAST_ALIKE` say nothing of each other.
_ALIKE, _FEW_POSITIONS, _LEAST_ALIKE = 1.1, 64, 4
MOST_GAP_S = 0.02
"""A worker that begins no step for longer had nothing to do."""


class LoggedStep(msgspec.Struct, frozen=True):
    """A line of a worker's --step-log."""

    worker: str
    start_s: float
    ms: float
    graph: str
    tokens: int
    attended: int
    reread: int
    context: int
    sequences: int
    prompt_tokens: int
    changed: bool
    shared: int = 0

    @property
    def end_s(self) -> float:
        """The time at which the step ended."""
        return self.start_s + self.ms / 1000

    @property
    def shape(self) -> StepShape:
        """The shape of the step."""
        return StepShape(
            self.tokens,
            self.attended,
            self.reread,
            self.context,
            self.sequences,
            self.prompt_tokens,
            self.changed,
            self.shared,
        )


class Timed(NamedTuple):
    """A step with the time until the worker could begin the next one, and the mean number of other workers that
    computed during it."""

    shape: StepShape
    ms: float
    others: float


class Fit(NamedTuple):
    """The fitted costs, with their errors on steps that were left out of the fit."""

    steps: StepCostPair
    slowdown: float
    num_steps: int


def timed(steps: Iterable[LoggedStep], since_s: float) -> list[Timed]:
    """The steps that began after `since_s`, without those of a size that a worker computed for the first time."""
    by_worker: dict[str, list[LoggedStep]] = {}
    for step in sorted(steps, key=lambda step: step.start_s):
        by_worker.setdefault(step.worker, []).append(step)
    gaps_s = [
        after.start_s - before.end_s
        for own in by_worker.values()
        for before, after in itertools.pairwise(own)
        if after.start_s - before.end_s < MOST_GAP_S
    ]
    usual_gap_s = statistics.median(gaps_s) if gaps_s else 0.0
    found = []
    for name, own in by_worker.items():
        rest = [_Busy(other) for worker, other in by_worker.items() if worker != name]
        seen: set[tuple[str, int]] = set()
        for number, step in enumerate(own):
            key = step.graph, step.tokens
            is_first = key not in seen
            seen.add(key)
            if is_first or step.start_s < since_s:
                continue
            gap_s = own[number + 1].start_s - step.end_s if number + 1 < len(own) else usual_gap_s
            gap_s = gap_s if 0 <= gap_s < MOST_GAP_S else usual_gap_s
            others = sum(busy.share(step.start_s, step.end_s) for busy in rest)
            found.append(Timed(step.shape, step.ms + 1000 * gap_s, others))
    return found


class _Busy:
    """The times during which a worker computed."""

    def __init__(self, steps: Sequence[LoggedStep]) -> None:
        self._starts = [step.start_s for step in steps]
        self._ends = [step.end_s for step in steps]

    def share(self, start_s: float, end_s: float) -> float:
        """The share of this interval in which the worker computed."""
        if end_s <= start_s:
            return 0.0
        busy_s = 0.0
        number = max(0, bisect.bisect_right(self._starts, start_s) - 1)
        while number < len(self._starts) and self._starts[number] < end_s:
            busy_s += max(0.0, min(self._ends[number], end_s) - max(self._starts[number], start_s))
            number += 1
        return busy_s / (end_s - start_s)


def fit(steps: Sequence[Timed], model: str, machine: str) -> Fit:
    """Fit both kinds of steps. Raises ValueError if there are too few of a kind."""
    prompts = [step for step in steps if step.shape.prompt_tokens]
    decode = [step for step in steps if not step.shape.prompt_tokens]
    for kind, own in (("with prompts", prompts), ("without prompts", decode)):
        if len(own) < LEAST_STEPS:
            raise ValueError(f"only {len(own)} steps {kind} were computed, and a fit needs {LEAST_STEPS}")
    slowdown = _slowdown(steps)
    pair = StepCostPair(
        _of_kind(prompts, PROMPT_KNOTS, slowdown, model, machine),
        _of_kind(decode, DECODE_KNOTS, slowdown, model, machine),
    )
    return Fit(pair, slowdown, len(steps))


def _slowdown(steps: Sequence[Timed]) -> float:
    """The slowdown by other workers with which steps that are about alike take about the same time; 0 if no other
    worker computed. A fit would not tell it: large batches hardly ever compute alone, and it would take what they cost
    for what other workers cost."""
    groups: dict[tuple[int, ...], list[Timed]] = {}
    for step in steps:
        groups.setdefault(_about(step.shape), []).append(step)
    alike = [
        (np.array([step.ms for step in group]), np.array([step.others for step in group]))
        for group in groups.values()
        if len(group) >= _LEAST_ALIKE
    ]

    def error(slowdown: float) -> float:
        return sum(_deviation(ms / (1.0 + slowdown * others)) for ms, others in alike)

    first = min((number * _LARGE_STEP for number in range(round(_MOST_SLOWDOWN / _LARGE_STEP) + 1)), key=error)
    around = round(_LARGE_STEP / _SMALL_STEP)
    near = (round(first + number * _SMALL_STEP, 2) for number in range(1 - around, around))
    return min((slowdown for slowdown in near if slowdown >= 0), key=error)


def _about(shape: StepShape) -> tuple[int, ...]:
    """The same for shapes that are about alike."""
    positions = (
        round(math.log(count + _FEW_POSITIONS, _ALIKE))
        for count in (shape.attended, shape.reread, shape.context, shape.shared)
    )
    return (shape.tokens, shape.prompt_tokens, shape.sequences, shape.changed, *positions)


def _deviation(values: Values) -> float:
    """The sum of relative deviations from the median."""
    return float(np.abs(values / np.median(values) - 1.0).sum())


def _alone(steps: Sequence[Timed], slowdown: float) -> list[Sample]:
    """The steps as they would be if no other worker computed."""
    return [Sample(step.shape, step.ms / (1.0 + slowdown * step.others)) for step in steps]


def _knots(samples: Sequence[Sample], knots: tuple[int, ...]) -> tuple[int, ...]:
    """The first knot, those between sizes of samples, and the largest size."""
    sizes = sorted(sample.shape.tokens for sample in samples)
    least, most = min(knots[0], sizes[0]), sizes[-1]
    inner = [knot for knot in knots if max(least, sizes[0]) < knot < most]
    return tuple(sorted({least, *inner, max(most, least + 1)}))


def _of_kind(steps: Sequence[Timed], knots: tuple[int, ...], slowdown: float, model: str, machine: str) -> StepCost:
    """The cost of one kind of steps, with its error on a quarter of them that is left out of a first fit."""
    samples = _alone(steps, slowdown)
    random.Random(1).shuffle(samples)
    cut = round(len(samples) * _TEST_SHARE)
    errors = errors_of(fitted(samples[cut:], _knots(samples, knots)), samples[:cut])
    return msgspec.structs.replace(
        fitted(samples, _knots(samples, knots)),
        model=model,
        machine=machine,
        median_error=round(statistics.median(errors), 4),
        p90_error=round(errors[int(0.9 * len(errors))], 4),
    )


def read(raw: bytes) -> list[LoggedStep]:
    """The steps in a log. A line that is being written is left out."""
    whole = raw[: raw.rfind(b"\n") + 1]
    return msgspec.json.decode(b"[" + b",".join(whole.splitlines()) + b"]", type=list[LoggedStep])


def learned(prompts: LearnedCost, decode: LearnedCost, machine: str, model: str) -> StepCostPair:
    """The costs that a running worker has learned. They are linear in the number of tokens."""
    return StepCostPair(_of_terms(prompts, machine, model), _of_terms(decode, machine, model))


class LearnedCost(msgspec.Struct, frozen=True):
    """The message StepCost of worker.proto."""

    step_ms: float
    token_ms: float
    attended_ms: float
    read_ms: float
    sequence_ms: float
    change_ms: float
    num_steps: int


def _of_terms(cost: LearnedCost, machine: str, model: str) -> StepCost:
    return StepCost(
        knots=(1, 2),
        base=(cost.step_ms + cost.token_ms, cost.step_ms + 2 * cost.token_ms),
        per_attended=cost.attended_ms / 1000,
        per_reread=cost.read_ms / 1000,
        per_context=cost.read_ms / 1000,
        per_sequence=cost.sequence_ms,
        change=cost.change_ms,
        model=model,
        machine=machine,
    )
