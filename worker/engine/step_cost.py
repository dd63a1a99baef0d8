"""What a step costs: one model, learned while the worker runs. All costs are in milliseconds.

    cost = step + per token + per attended position + per position read + per sequence + for another number of tokens

A `StepShape` has the quantities. The scheduler sizes steps by this model, padding weighs a token against another number
of tokens by it, waits are predicted by it, the rates that routers are told are averages over the same observations, and
the simulator uses the same shapes.

**Two instances.** Steps with prompts and decode steps are learned apart (`StepCosts`): they may go through different
graphs (docs/decisions/0029), and the first tokens of a product cost more than later ones. Nearly every step with
prompts has another number of tokens than the one before, so what that costs is learned of decode steps alone; with
prompts it is part of any step.

**The fit.** Each term is measured in the milliseconds that it takes on a reference machine, `REFERENCE`. A weight says
how many times dearer the term is here. `scale` is that number for whole steps. The weights minimise

    sum over steps of kept ** age * (predicted / expected - observed / expected) ** 2
    + sum over terms of ridge * (weight / scale - 1) ** 2          where scale / WIDEST <= weight <= scale * WIDEST

Errors are relative, so small steps count as much as large ones. The ridge keeps a term that has not been seen at its
share of the reference, scaled to this machine. One step is therefore enough for a first guess of every term. The
function is strictly convex, so it has one minimum. Each sweep of coordinate descent over the box lowers it.

**Bounds.** A learned model takes a step that cost more than `OUTLIER` times the prediction as one that cost just that;
the same holds downwards. What steps so taken cost, as multiples of the reference, bounds `scale` from below and above,
and every weight is in the box around `scale`.

**Changes of speed.** Old steps weigh half after 350 steps. When the mean error of the latest steps is large and of one
sign, the machine has changed: what was learned is kept in its proportions, multiplied by that error, and weighs half.

Pure.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Milliseconds of a step, of a token, of 1,000 attended positions, of 1,000 positions read, of a sequence and of another
# number of tokens than in the step before: those of a small model on two cores, rounded. Only their proportions matter,
# and only until a term has been seen. The last is a third of what it is there, for it does not grow with a model.
REFERENCE = (8.0, 0.2, 0.15, 2.0, 0.1, 1.5)
# Weight of an observation n steps ago is FORGETTING ** n: half after 350 steps.
FORGETTING = 0.998
# What is left of earlier observations when the machine has changed.
KEPT_AFTER_CHANGE = 0.5
# It has changed when the mean logarithm of observed over predicted, over about so many steps, exceeds this.
_CHANGE_STEPS = 12
_CHANGE = math.log(1.25)
# Steps before observations are held against predictions.
MIN_STEPS = 8
OUTLIER = 2.0
# Of each term. The last is seldom seen, and in large models a small part of a step.
RIDGES = (0.05, 0.05, 0.05, 0.05, 0.05, 0.005)
WIDEST = 100.0
# How many times dearer than the reference a machine is taken to be before the first step: a model of 7 billion
# parameters on few cores. A first step that is too small costs little.
UNKNOWN_SCALE = 40.0
_SIZE = len(REFERENCE)
_FIRST_SWEEPS = 8
_LEAST_MS = 1e-6
_MOST_MS = 1e9


class StepShape(NamedTuple):
    """What the cost of a step depends on."""

    tokens: int
    """New tokens, padding included."""
    attended: int
    """Positions that the new tokens of prompts look at, summed over the tokens: n * p + n * (n + 1) / 2 for n tokens
    behind p. Attention's arithmetic."""
    reread: int
    """Positions that those prompts have computed before. A chunk reads them from the cache once."""
    context: int
    """Positions of the sequences that compute one token. Each reads its own from the cache."""
    sequences: int
    """Sequences. Each has its sampling and its projection onto the vocabulary."""
    prompt_tokens: int = 0
    """Those of `tokens` that belong to sequences which compute several."""
    changed: bool = False
    """Whether the step before had another number of tokens."""

    @classmethod
    def of(cls, step: Iterable[tuple[int, int]], *, padding: int = 0, changed: bool = False) -> StepShape:
        """The shape of a step that gives, for each sequence, its computed tokens and those that the step computes."""
        attended, reread, context, prompt_tokens, decoding, prompts = 0, 0, 0, 0, 0, 0
        for past, new in step:
            if new == 1:
                context += past + 1
                decoding += 1
            else:
                attended += new * past + new * (new + 1) // 2
                reread += past
                prompt_tokens += new
                prompts += 1
        tokens = prompt_tokens + decoding + padding
        return cls(tokens, attended, reread, context, decoding + prompts, prompt_tokens, changed)

    @property
    def reference_ms(self) -> tuple[float, ...]:
        """What each term takes on the reference machine."""
        step, token, attended, read, sequence, change = REFERENCE
        return (
            step,
            token * self.tokens,
            attended * self.attended / 1000,
            read * (self.reread + self.context) / 1000,
            sequence * self.sequences,
            change * self.changed,
        )


NOTHING = StepShape(0, 0, 0, 0, 0)
ONE_STREAM = StepShape.of([(64, 1)])
# Tokens of the prompts with which a worker warms up. Two numbers tell a step from its tokens.
WARM_UP_TOKENS = (64, 16)


class StepCostModel:
    """Learns what steps of one kind cost; see the module."""

    __slots__ = (
        "_drift",
        "_gram",
        "_least_ratio",
        "_moment",
        "_most_ratio",
        "_observed_ms",
        "_reference_ms",
        "_weights",
        "num_steps",
    )

    def __init__(self) -> None:
        self.num_steps = 0
        """Steps that it has learned from."""
        self._weights = [UNKNOWN_SCALE] * _SIZE
        self._gram = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._moment = [0.0] * _SIZE
        self._observed_ms = self._reference_ms = 0.0
        self._least_ratio, self._most_ratio = math.inf, 0.0
        self._drift = 0.0

    @property
    def is_learned(self) -> bool:
        """Whether there were enough steps for predictions to be held against requests."""
        return self.num_steps >= MIN_STEPS

    @property
    def scale(self) -> float:
        """How many times dearer than on the reference machine a step is here."""
        return self._observed_ms / self._reference_ms if self.num_steps else UNKNOWN_SCALE

    @property
    def weights(self) -> Sequence[float]:
        """How many times dearer than on the reference machine each term is here."""
        return tuple(self._weights)

    @property
    def step_ms(self) -> float:
        """What any step costs, whatever is in it."""
        return self._weights[0] * REFERENCE[0]

    @property
    def token_ms(self) -> float:
        """What a further token costs, without attention."""
        return self._weights[1] * REFERENCE[1]

    @property
    def change_ms(self) -> float:
        """What another number of tokens than in the step before costs; 0 before the first step."""
        return self._weights[5] * REFERENCE[5] if self.num_steps else 0.0

    def predict_ms(self, shape: StepShape) -> float:
        """Cost of a step. Above 0."""
        cost_ms: float = sum(map(operator.mul, self._weights, shape.reference_ms))
        return cost_ms

    def chunk_ms(self, past: int, new: int) -> float:
        """What a step costs more with a chunk of a prompt of which `past` tokens are computed."""
        per_attended = self._weights[2] * REFERENCE[2] / 1000
        attended = new * past + new * (new + 1) / 2
        return self._beginning_ms(past) + self.token_ms * new + per_attended * attended

    def tokens_for(self, budget_ms: float, past: int) -> int:
        """The most tokens of a prompt, `past` of which are computed, that cost no more than this in a step."""
        left_ms = budget_ms - self._beginning_ms(past)
        if left_ms <= 0.0:
            return 0
        per_attended = self._weights[2] * REFERENCE[2] / 1000
        # The root of token_ms * n + per_attended * (n * past + n * (n + 1) / 2) = left_ms.
        linear, square = self.token_ms + per_attended * (past + 0.5), per_attended / 2
        return int(2 * left_ms / (linear + math.sqrt(linear * linear + 4 * square * left_ms)))

    def reread_ms(self, past: int) -> float:
        """What a chunk costs for reading the `past` tokens before it from the cache, however many tokens it has."""
        return self._weights[3] * REFERENCE[3] * past / 1000

    def _beginning_ms(self, past: int) -> float:
        """What a chunk costs before its first token: it is a sequence, and reads what was computed."""
        return self.reread_ms(past) + self._weights[4] * REFERENCE[4]

    def observe(self, shape: StepShape, milliseconds: float) -> None:
        """Learn from a step."""
        terms = shape.reference_ms
        expected_ms = self.predict_ms(shape)
        if self.is_learned:
            milliseconds = min(max(milliseconds, expected_ms / OUTLIER), expected_ms * OUTLIER)
        milliseconds = min(max(milliseconds, _LEAST_MS), _MOST_MS)
        if self.num_steps == 0:
            expected_ms = milliseconds
        reference_ms = sum(terms)
        self._least_ratio = min(self._least_ratio, milliseconds / reference_ms)
        self._most_ratio = max(self._most_ratio, milliseconds / reference_ms)
        ratio = milliseconds / expected_ms
        self._add([term / expected_ms for term in terms], ratio)
        self._observed_ms = FORGETTING * self._observed_ms + milliseconds
        self._reference_ms = FORGETTING * self._reference_ms + reference_ms
        self.num_steps += 1
        self._drift += (math.log(ratio) - self._drift) / _CHANGE_STEPS
        if abs(self._drift) > _CHANGE:
            self._rescale(math.exp(self._drift))
            self._drift = 0.0
        self._fit()

    def _add(self, row: Sequence[float], ratio: float) -> None:
        """Add an equation: the weights times the row are the ratio. Earlier ones count less."""
        for i, left in enumerate(row):
            products = self._gram[i]
            for j in range(_SIZE):
                products[j] = FORGETTING * products[j] + left * row[j]
            self._moment[i] = FORGETTING * self._moment[i] + left * ratio

    def _rescale(self, ratio: float) -> None:
        """All steps cost so many times what they did."""
        least_ms, most_ms = self._least_ratio * self._reference_ms, self._most_ratio * self._reference_ms
        self._observed_ms = KEPT_AFTER_CHANGE * min(max(ratio * self._observed_ms, least_ms), most_ms)
        self._reference_ms *= KEPT_AFTER_CHANGE
        self._gram = [[KEPT_AFTER_CHANGE * value for value in row] for row in self._gram]
        self._moment = [KEPT_AFTER_CHANGE * ratio * value for value in self._moment]
        self._weights = [ratio * weight for weight in self._weights]

    def _fit(self) -> None:
        """Coordinate descent from the weights before. One sweep is enough later on: a step changes little."""
        scale, weights = self.scale, self._weights
        least, most = scale / WIDEST, scale * WIDEST
        if self.num_steps == 1:
            weights[:] = [scale] * _SIZE
        for _ in range(_FIRST_SWEEPS if self.num_steps <= 4 * MIN_STEPS else 1):
            for i, row in enumerate(self._gram):
                rest = sum(map(operator.mul, row, weights)) - row[i] * weights[i]
                ridge = RIDGES[i] / scale
                weight = (self._moment[i] - rest + ridge) / (row[i] + ridge / scale)
                weights[i] = min(max(weight, least), most)


# Weight of a step with prompts n such steps ago in the prefill rate is RATE_KEPT ** n: half after 3,500 steps, which is
# minutes of prefill. A shorter memory says how long the latest prompts were.
RATE_KEPT = 0.9998
# Weight of the newest decode step in their mean time: the present batch counts.
DECODE_WEIGHT = 0.05


class StepRates:
    """How fast a worker is, as routers are told: averages over the steps that the models learn from. 0 while unknown.

    They are averages and no predictions. Routers compare workers by them, so they must say what the host can do for the
    prompts that come here, long or short. A prediction for the running batch would differ between equal hosts by the
    length of their contexts and draw requests away from their prefixes. One for a standard prompt leaves out what the
    length of prompts does; that was tried and gave longer waits (docs/simulation.md).
    """

    __slots__ = ("_seconds", "_tokens", "decode_step_ms")

    def __init__(self) -> None:
        self.decode_step_ms = 0.0
        """Mean time of a decode step."""
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """Prompt tokens per second of steps that are mostly prompts."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def observe_prompts(self, num_tokens: int, milliseconds: float) -> None:
        """Learn from a step that was mostly prompts."""
        self._tokens = self._tokens * RATE_KEPT + num_tokens
        self._seconds = self._seconds * RATE_KEPT + milliseconds / 1000

    def observe_decode(self, milliseconds: float) -> None:
        """Learn from a step without prompts."""
        old = self.decode_step_ms or milliseconds
        self.decode_step_ms = old + DECODE_WEIGHT * (milliseconds - old)


class StepCosts:
    """What a worker knows of its steps: a model of those with prompts, one of those without, and averages of both."""

    __slots__ = ("decode", "prompts", "rates")

    def __init__(self) -> None:
        self.prompts = StepCostModel()
        self.decode = StepCostModel()
        self.rates = StepRates()

    def of(self, *, is_decode: bool) -> StepCostModel:
        """The model of one kind of step."""
        return self.decode if is_decode else self.prompts

    def observe(self, shape: StepShape, milliseconds: float, *, is_first: bool) -> None:
        """Learn from a step. `is_first`: kernels were built for its number of tokens, which says nothing of other
        steps."""
        is_decode = shape.prompt_tokens == 0
        if not is_first:
            if is_decode:
                self.decode.observe(shape, milliseconds)
            else:
                changed_ms = self.decode.change_ms if shape.changed else 0.0
                self.prompts.observe(shape._replace(changed=False), milliseconds - changed_ms)
        if is_decode:
            self.rates.observe_decode(milliseconds)
        elif self._is_mostly_prompts(shape):
            self.rates.observe_prompts(shape.prompt_tokens, milliseconds)

    def _is_mostly_prompts(self, shape: StepShape) -> bool:
        """Whether prompts take more of the step's time than streams do, besides what any step costs."""
        streams = shape.tokens - shape.prompt_tokens
        alone = StepShape(streams, 0, 0, shape.context, streams)
        of_streams_ms = self.prompts.predict_ms(alone) - self.prompts.step_ms
        return 2 * of_streams_ms < self.prompts.predict_ms(shape) - self.prompts.step_ms
