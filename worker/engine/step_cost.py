"""The cost of a step: a linear model, fitted while the worker runs. All costs are in milliseconds.

    cost = fixed + per token + per attended position + per position read + per sequence + per change of size

A `StepShape` has the quantities. The scheduler sizes steps with this model, and waits are predicted with it. The rates
reported to routers are averages over the same observations. The simulator uses the same shapes.

**Two models.** Steps with prompts and decode steps have a model each (`StepCosts`). They may use different graphs
(docs/decisions/graphs.md), and the first tokens of a product cost more than later ones. Nearly every step with prompts
differs in size from the previous one, so the cost of a change is learned from decode steps only, and subtracted from
the cost of steps with prompts.

**The fit.** Each term is expressed in the milliseconds that it takes on a reference machine, `REFERENCE`. A weight says
how many times as much the term costs here; `scale` says the same of whole steps. The weights minimise

    sum over steps of kept ** age * (predicted / expected - observed / expected) ** 2
    + sum over terms of ridge * (weight / scale - 1) ** 2          where scale / WIDEST <= weight <= scale * WIDEST

Errors are relative, so small steps count as much as large ones. The ridge keeps a term that has not been seen at its
share of the reference, scaled to this machine. One step is therefore enough for a first guess of every term. The
function is strictly convex, so it has one minimum. Each sweep of coordinate descent over the box lowers it.

**Bounds.** Once a model is learned, a step that costs more than `OUTLIER` times its prediction counts as `OUTLIER`
times; the same holds for cheap steps. The observed costs, as multiples of the reference, bound `scale`, and each weight
stays in the box around `scale`.

**Changes of speed.** The weight of an observation halves in 350 steps, and faster at first. If the median error of the
latest steps is large, the machine has become faster or slower. All costs are then multiplied by that error, and earlier
observations count half and are forgotten as fast as at first.

Pure.
"""

from __future__ import annotations

import math
import operator
import statistics
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

# Milliseconds of a step, a token, 1,000 attended positions, 1,000 positions read, a sequence and a change of size:
# those of a small model on two cores, rounded. Only their proportions matter, and only until a term has been seen. The
# last is a third of the measured one, because it does not grow with the model.
REFERENCE = (8.0, 0.2, 0.15, 2.0, 0.1, 1.5)
# Weight of an observation n steps ago is FORGETTING ** n: half after 350 steps.
FORGETTING = 0.998
# The weight of earlier observations after a change of speed.
KEPT_AFTER_CHANGE = 0.5
# Early observations are forgotten faster: n steps after the first, FORGETTING is at most n / (n + EARLY). So the weight
# of the first steps, which a busy machine may have disturbed, falls with the square of the number of steps.
EARLY = 2.0
# After a change of speed, observations are forgotten as fast as after this many steps.
AGE_AFTER_CHANGE = 16
# The speed has changed if the median of log(observed / predicted) over this many steps exceeds this limit.
_CHANGE_STEPS = 9
_CHANGE = math.log(1.25)
# A model counts as learned after this many steps.
MIN_STEPS = 8
OUTLIER = 2.0
# One for each term. The last term is seldom seen, and a small part of a step in large models.
RIDGES = (0.05, 0.05, 0.05, 0.05, 0.05, 0.005)
WIDEST = 100.0
# The scale before the first step: a model of 7 billion parameters on few cores. If the real scale is smaller, only the
# first steps are smaller than necessary.
UNKNOWN_SCALE = 40.0
_SIZE = len(REFERENCE)
_FIRST_SWEEPS = 8
_LEAST_MS = 1e-6
_MOST_MS = 1e9


class StepShape(NamedTuple):
    """The counts that the cost of a step depends on; one term of the model for each."""

    tokens: int
    """New tokens, padding included."""
    attended: int
    """Positions that new prompt tokens attend to, summed over the tokens: n * p + n * (n + 1) / 2 for n tokens after
    p. The arithmetic of attention."""
    reread: int
    """Positions of these prompts that were computed in earlier steps. A chunk reads them from the KV cache once."""
    context: int
    """Positions of the sequences that compute one token. Each reads its own from the KV cache."""
    sequences: int
    """Sequences. Each costs sampling and a projection onto the vocabulary."""
    prompt_tokens: int = 0
    """Tokens of sequences that compute several."""
    changed: bool = False
    """Whether the previous step had another number of tokens."""
    shared: int = 0
    """Positions of `context` that another sequence reads too, which is then the first to bring them into the caches of
    the CPU. The simulator counts them; the model here does not."""

    @classmethod
    def of(
        cls, step: Iterable[tuple[int, int]], *, padding: int = 0, changed: bool = False, shared: int = 0
    ) -> StepShape:
        """The shape of a step. `step` has a pair for each sequence: tokens computed before, tokens computed now.
        `shared` may be too high where sequences with prompts share positions as well."""
        attended = 0
        reread = 0
        context = 0
        prompt_tokens = 0
        decoding = 0
        prompts = 0
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
        shared = min(shared, context)
        return cls(tokens, attended, reread, context, decoding + prompts, prompt_tokens, changed, shared)

    @property
    def reference_ms(self) -> tuple[float, ...]:
        """What each term of the model would take on the reference machine, in milliseconds, in the order of
        `REFERENCE`."""
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
# Lengths of the prompts of the warm-up. With two lengths, the fixed cost and that of a token can be told apart.
WARM_UP_TOKENS = (64, 16)


class StepCostModel:
    """Learns and predicts the time of one kind of step, with prompts or without. The module describes the model."""

    __slots__ = (
        "_age",
        "_errors",
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
        """Observed steps."""
        self._weights = [UNKNOWN_SCALE] * _SIZE
        self._gram = [[0.0] * _SIZE for _ in range(_SIZE)]
        self._moment = [0.0] * _SIZE
        self._observed_ms = self._reference_ms = 0.0
        self._least_ratio = math.inf
        self._most_ratio = 0.0
        self._age = 0
        self._errors: deque[float] = deque(maxlen=_CHANGE_STEPS)

    @property
    def is_learned(self) -> bool:
        """Whether at least `MIN_STEPS` steps were observed, so that predictions can be relied on."""
        return self.num_steps >= MIN_STEPS

    @property
    def scale(self) -> float:
        """How many times as long as on the reference machine steps take; `UNKNOWN_SCALE` before the first step."""
        return self._observed_ms / self._reference_ms if self.num_steps else UNKNOWN_SCALE

    @property
    def weights(self) -> Sequence[float]:
        """For each term of the model, how many times as long it takes as on the reference machine."""
        return tuple(self._weights)

    @property
    def terms_ms(self) -> tuple[float, ...]:
        """The learned milliseconds of each term, in the order and units of `REFERENCE`."""
        return tuple(map(operator.mul, self._weights, REFERENCE))

    @property
    def step_ms(self) -> float:
        """What every step takes in milliseconds, whatever is in it."""
        return self._weights[0] * REFERENCE[0]

    @property
    def token_ms(self) -> float:
        """What one more token takes in milliseconds, without its attention."""
        return self._weights[1] * REFERENCE[1]

    @property
    def change_ms(self) -> float:
        """The cost of a change in the number of tokens from the previous step; 0 before the first step."""
        return self._weights[5] * REFERENCE[5] if self.num_steps else 0.0

    def predict_ms(self, shape: StepShape) -> float:
        """The time in milliseconds that a step of this shape is expected to take; above 0."""
        cost_ms: float = sum(map(operator.mul, self._weights, shape.reference_ms))
        return cost_ms

    def chunk_ms(self, past: int, new: int) -> float:
        """The time in milliseconds that `new` tokens of a prompt, after `past` computed ones, add to a step."""
        per_attended = self._weights[2] * REFERENCE[2] / 1000
        attended = new * past + new * (new + 1) / 2
        return self._beginning_ms(past) + self.token_ms * new + per_attended * attended

    def tokens_for(self, budget_ms: float, past: int) -> int:
        """How many tokens of a prompt, after `past` computed ones, cost at most `budget_ms` in a step."""
        left_ms = budget_ms - self._beginning_ms(past)
        if left_ms <= 0.0:
            return 0
        per_attended = self._weights[2] * REFERENCE[2] / 1000
        # The root of token_ms * n + per_attended * (n * past + n * (n + 1) / 2) = left_ms.
        linear, square = self.token_ms + per_attended * (past + 0.5), per_attended / 2
        return int(2 * left_ms / (linear + math.sqrt(linear * linear + 4 * square * left_ms)))

    def reread_ms(self, past: int) -> float:
        """The cost of reading `past` computed positions, which a chunk of any size has."""
        return self._weights[3] * REFERENCE[3] * past / 1000

    def _beginning_ms(self, past: int) -> float:
        """The cost of a chunk apart from its tokens: that of a sequence, and of reading the computed positions."""
        return self.reread_ms(past) + self._weights[4] * REFERENCE[4]

    def observe(self, shape: StepShape, milliseconds: float) -> None:
        """Learn from a step of this shape that took `milliseconds`. Once the cost is learned, a step counts as at most
        `OUTLIER` times longer or shorter than predicted."""
        terms = shape.reference_ms
        expected_ms = self.predict_ms(shape)
        actual_ms = min(max(milliseconds, _LEAST_MS), _MOST_MS)
        if self.is_learned:
            milliseconds = min(max(milliseconds, expected_ms / OUTLIER), expected_ms * OUTLIER)
        milliseconds = min(max(milliseconds, _LEAST_MS), _MOST_MS)
        if self.num_steps == 0:
            expected_ms = actual_ms = milliseconds
        reference_ms = sum(terms)
        self._least_ratio = min(self._least_ratio, milliseconds / reference_ms)
        self._most_ratio = max(self._most_ratio, milliseconds / reference_ms)
        ratio = milliseconds / expected_ms
        kept = min(FORGETTING, self._age / (self._age + EARLY))
        self._age += 1
        self._add([term / expected_ms for term in terms], ratio, kept)
        self._observed_ms = kept * self._observed_ms + milliseconds
        self._reference_ms = kept * self._reference_ms + reference_ms
        self.num_steps += 1
        self._errors.append(math.log(actual_ms / expected_ms))
        if len(self._errors) == _CHANGE_STEPS and abs(change := statistics.median(self._errors)) > _CHANGE:
            self._rescale(math.exp(change))
        self._fit()

    def _add(self, row: Sequence[float], ratio: float, kept: float) -> None:
        """Add an equation: weights times row equals ratio. Earlier equations count `kept` times as much."""
        for i, left in enumerate(row):
            products = self._gram[i]
            for j in range(_SIZE):
                products[j] = kept * products[j] + left * row[j]
            self._moment[i] = kept * self._moment[i] + left * ratio

    def _rescale(self, ratio: float) -> None:
        """Multiply the cost of every step."""
        least_ms, most_ms = self._least_ratio * self._reference_ms, self._most_ratio * self._reference_ms
        self._observed_ms = KEPT_AFTER_CHANGE * min(max(ratio * self._observed_ms, least_ms), most_ms)
        self._reference_ms *= KEPT_AFTER_CHANGE
        self._gram = [[KEPT_AFTER_CHANGE * value for value in row] for row in self._gram]
        self._moment = [KEPT_AFTER_CHANGE * ratio * value for value in self._moment]
        self._weights = [ratio * weight for weight in self._weights]
        self._age = min(self._age, AGE_AFTER_CHANGE)
        self._errors.clear()

    def _fit(self) -> None:
        """Coordinate descent from the current weights. Later on, one sweep is enough."""
        scale, weights = self.scale, self._weights
        least, most = scale / WIDEST, scale * WIDEST
        if self.num_steps == 1:
            weights[:] = [scale] * _SIZE
        for _ in range(_FIRST_SWEEPS if self._age <= 4 * MIN_STEPS else 1):
            for i, row in enumerate(self._gram):
                rest = sum(map(operator.mul, row, weights)) - row[i] * weights[i]
                ridge = RIDGES[i] / scale
                weight = (self._moment[i] - rest + ridge) / (row[i] + ridge / scale)
                weights[i] = min(max(weight, least), most)


# The weight of a step in the prefill rate is RATE_KEPT ** n after n such steps: half after 3,500 steps, which is
# minutes of prefill. A shorter memory would only reflect the length of the latest prompts.
RATE_KEPT = 0.9998
# In the averages, a step counts at most this many times its prediction. Longer steps mean that the process was stopped
# or the machine slept, and one pause would otherwise outweigh hours of steps.
PAUSE = 20.0
# The weight of the newest decode step in the mean. It is large, because the current batch matters.
DECODE_WEIGHT = 0.05


class StepRates:
    """The speed of a worker, as reported to routers: averages over the observed steps. 0 while unknown.

    They are averages rather than predictions, because routers compare workers by them. A prediction for the running
    batch would differ between equal hosts with the length of their contexts, and draw requests away from their cached
    prefixes. A prediction for a standard prompt would ignore the length of prompts, and gave longer waits in a test
    (docs/explanation/simulation.md).
    """

    __slots__ = ("_seconds", "_tokens", "decode_step_ms", "draft_ms", "tokens_per_stream")

    def __init__(self) -> None:
        self.decode_step_ms = 0.0
        """Mean time of a decode step."""
        self.tokens_per_stream = 1.0
        """Mean number of tokens that a decode step gives to a stream: more than one with accepted drafts."""
        self.draft_ms = 0.0
        """Mean time that a smaller model takes before a decode step to propose tokens."""
        self._tokens = 0.0
        self._seconds = 0.0

    @property
    def prefill_tokens_per_s(self) -> float:
        """How many tokens of prompts recent steps that were mostly prompts computed in a second; 0 before the first."""
        return self._tokens / self._seconds if self._seconds else 0.0

    def observe_prompts(self, num_tokens: int, milliseconds: float) -> None:
        """Add a step of `num_tokens` tokens, mostly of prompts, that took `milliseconds`."""
        self._tokens = self._tokens * RATE_KEPT + num_tokens
        self._seconds = self._seconds * RATE_KEPT + milliseconds / 1000

    @property
    def decode_token_ms(self) -> float:
        """The mean time between two tokens of a stream in milliseconds, with that of drafts; 0 before the first decode
        step."""
        return (self.decode_step_ms + self.draft_ms) / self.tokens_per_stream

    def observe_drafts(self, tokens_per_stream: float, draft_ms: float = 0.0) -> None:
        """Record the number of tokens that a decode step gave each stream, and the time to propose them."""
        self.draft_ms += DECODE_WEIGHT * (draft_ms - self.draft_ms)
        self.tokens_per_stream += DECODE_WEIGHT * (tokens_per_stream - self.tokens_per_stream)

    def observe_decode(self, milliseconds: float) -> None:
        """Add a step without prompts that took `milliseconds`."""
        old = self.decode_step_ms or milliseconds
        self.decode_step_ms = old + DECODE_WEIGHT * (milliseconds - old)


class StepCosts:
    """The cost of a worker's steps: a model of steps with prompts, one of decode steps, and the average speed."""

    __slots__ = ("decode", "prompts", "rates")

    def __init__(self) -> None:
        self.prompts = StepCostModel()
        self.decode = StepCostModel()
        self.rates = StepRates()

    def of(self, *, is_decode: bool) -> StepCostModel:
        """The model of decode steps, or that of steps with prompts."""
        return self.decode if is_decode else self.prompts

    def most_ms(self, shape: StepShape) -> float:
        """The maximum time of a step of known size without a pause; infinite while that is unknown."""
        model = self.of(is_decode=shape.prompt_tokens == 0)
        return PAUSE * model.predict_ms(shape) if model.is_learned else math.inf

    def observe(self, shape: StepShape, milliseconds: float, *, is_first: bool) -> None:
        """Learn from a step that took `milliseconds`. `is_first`: OpenVINO built kernels for its size, so its time says
        nothing about other steps."""
        is_decode = shape.prompt_tokens == 0
        if not is_first:
            milliseconds = min(milliseconds, self.most_ms(shape))
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
        """Whether prompts take more of the step's time than streams, apart from the fixed cost."""
        streams = shape.tokens - shape.prompt_tokens
        alone = StepShape(streams, 0, 0, shape.context, streams)
        of_streams_ms = self.prompts.predict_ms(alone) - self.prompts.step_ms
        return 2 * of_streams_ms < self.prompts.predict_ms(shape) - self.prompts.step_ms
