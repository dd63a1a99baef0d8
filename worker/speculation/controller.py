"""How many draft tokens a step verifies: the number that gives the most tokens a second.

A step of B streams and K draft tokens gives B tokens, and as many more as are accepted. The model of step costs
predicts its cost for B + K tokens (docs/decisions/scheduling.md). The prediction is corrected by the observed cost of
steps of that size, because the first tokens of a product are cheaper than later ones, which a linear model cannot show.
Draft tokens are taken in the order of the probability that they are reached and accepted.

A change in the number of tokens costs time (docs/decisions/scheduling.md), and kernels have to be prepared for each new
number. So only a few sizes are used. A change to a larger size has to be worth its cost in the same step. If drafts are
likely to be right, only half of the cost counts, because the next step then has this size too. The cost of a change to
a smaller size is weighted by the probability that drafts are right again soon, which would change the size back. With
its full cost, a stream would keep a size that it does not need.

Steps have a minimum number of tokens, padding included. A draft token that replaces padding costs nothing.

A branch has other tokens than a stream's draft, from the first one on. Its first token costs two, because the stream's
latest token is computed again in the branch's blocks. So a step has a branch if that is worth more than a longer draft.

The heads compute a whole tree of draft tokens, and tell how likely each token is, before the step is planned. The
controller first chooses the depth of the tree, as it chooses the length of a draft. Then it chooses which tokens of the
tree the step verifies: those that give the most tokens a second. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

from headrace.worker.speculation.tree import TreeGain

# The weight of the newest step in the correction of its size.
_NEWEST = 0.1
# Corrections of sizes stay in these bounds, so that a single unusual step has no lasting effect.
_LEAST = 0.6
_MOST = 1.6
# The least shares of a change of size that count: of one to fewer tokens, and of one to more.
_CHANGE_BACK = 0.25
_CHANGE_UP = 0.5
# The cost of a change to fewer tokens counts by the probability that a draft is right in one of this many steps.
_STEPS_AHEAD = 3
# With drafts, the predicted number of tokens a second must be this many times as high, because the prediction is less
# certain.
_MARGIN = 1.05


class StepLine(NamedTuple):
    """The predicted cost of steps in milliseconds: with the streams only, for each additional draft token, and for a
    change in the number of tokens from the previous step."""

    base_ms: float
    token_ms: float
    change_ms: float


class SizeCorrections:
    """The ratio of the actual to the predicted cost of a decode step, by its number of tokens."""

    __slots__ = ("_ratios",)

    def __init__(self) -> None:
        self._ratios: dict[int, float] = {}

    def observe(self, num_tokens: int, ratio: float) -> None:
        """Learn from a step of `num_tokens` tokens that took `ratio` times as long as predicted."""
        ratio = min(max(ratio, _LEAST), _MOST)
        old = self._ratios.get(num_tokens)
        self._ratios[num_tokens] = ratio if old is None else old + _NEWEST * (ratio - old)

    def of(self, num_tokens: int) -> float:
        """The correction for a size: its own, or that of the nearest observed size."""
        found = self._ratios.get(num_tokens)
        if found is None and self._ratios:
            found = self._ratios[min(self._ratios, key=lambda size: (abs(size - num_tokens), size))]
        return 1.0 if found is None else found


def rounded_size(num_tokens: int) -> int:
    """The size of a step with this many tokens: one of a few sizes, because each has to be prepared."""
    if num_tokens <= 2:
        return num_tokens
    grain = 2 if num_tokens <= 8 else 4 if num_tokens <= 16 else 8
    return -(-num_tokens // grain) * grain


class BranchChance(NamedTuple):
    """A branch of a stream's draft. Its first token is accepted with probability `first`, each later one with `chance`
    if those before it are. There are up to `length`. The first costs `num_repeated` tokens more."""

    stream: int
    first: float
    chance: float
    length: int
    num_repeated: int


class _Gain(NamedTuple):
    """A draft token that a step may have. It is accepted with probability `expected`, and counts `num_tokens` tokens of
    the step. `place` is the number of its stream; branches are numbered after all streams. Tokens are taken in the
    order of `rank`."""

    rank: float
    expected: float
    num_tokens: int
    place: int


def _gains(chances: Sequence[float], lengths: Sequence[int], branches: Sequence[BranchChance]) -> list[_Gain]:
    """All draft tokens, the most worthwhile first. No token comes before those that it follows, and none of a branch
    before that of the draft at the same position."""
    gains = []
    for stream, (chance, length) in enumerate(zip(chances, lengths, strict=True)):
        for depth in range(length):
            expected = chance ** (depth + 1)
            gains.append(_Gain(expected, expected, 1, stream))
    for place, branch in enumerate(branches, len(chances)):
        rank = 1.0
        for depth in range(branch.length):
            num_tokens = 1 if depth else 1 + branch.num_repeated
            expected = branch.first * branch.chance**depth
            rank = min(rank, expected / num_tokens, chances[branch.stream] ** (depth + 1))
            gains.append(_Gain(rank, expected, num_tokens, place))
    gains.sort(key=lambda gain: -gain.rank)
    return gains


class DraftSteps:
    """The cost of the steps in which a smaller model computes drafts. Step d computes token d of each draft."""

    __slots__ = ("_fixed_ms", "_is_modelled", "_num_steps", "_token_ms", "cost_ms")

    def __init__(self, line: StepLine | None, is_modelled: Sequence[bool] | None) -> None:
        """`line` is the cost of a step with all streams that are `is_modelled`."""
        self._is_modelled = is_modelled if line is not None else None
        self._num_steps = 0
        self.cost_ms = 0.0
        if line is not None and is_modelled is not None:
            self._token_ms = line.token_ms
            self._fixed_ms = max(0.0, line.base_ms - sum(is_modelled) * line.token_ms)

    def add(self, stream: int, depth: int) -> None:
        """Add this token of the stream's draft to the tokens that it computes."""
        if self._is_modelled is None or not self._is_modelled[stream]:
            return
        self.cost_ms += self._token_ms
        if depth >= self._num_steps:
            self._num_steps = depth + 1
            self.cost_ms += self._fixed_ms


class _Sizes(NamedTuple):
    """The predicted costs of steps whose size differs from the previous step's, `size_before`. Steps have at least
    `least_size` tokens. `back_ms` is the cost of a change to fewer tokens."""

    line: StepLine
    correction: Callable[[int], float]
    least_size: int
    size_before: int
    back_ms: float

    def are_few(self, size: int) -> bool:
        """Whether steps with drafts may have this size."""
        return size in (self.size_before, rounded_size(size))

    def cost_ms(self, size: int, likely: float) -> float:
        """The cost of a step of `size` tokens, in which the least likely draft token has the probability `likely`."""
        line = self.line
        cost_ms = (line.base_ms + line.token_ms * (size - self.least_size)) * self.correction(size)
        if size < self.size_before:
            cost_ms += self.back_ms
        elif size > self.size_before:
            cost_ms += line.change_ms * max(_CHANGE_UP, 1.0 - likely)
        return cost_ms


def _back_ms(line: StepLine, chance: float) -> float:
    """The cost of a change to fewer tokens in milliseconds, if a draft token is accepted with probability `chance`."""
    return line.change_ms * min(max(_CHANGE_BACK, _STEPS_AHEAD * chance), 1.0)


def best_counts(
    chances: Sequence[float],
    lengths: Sequence[int],
    line: StepLine,
    correction: Callable[[int], float],
    *,
    size_before: int,
    most_tokens: int,
    most_ms: float,
    least_tokens: int = 1,
    is_modelled: Sequence[bool] | None = None,
    draft_line: StepLine | None = None,
    branches: Sequence[BranchChance] = (),
) -> list[int]:
    """How many draft tokens of each of B streams to verify. A token of stream i is accepted with probability
    `chances[i]` if those before it are; there are `lengths[i]`. Steps with drafts have at most `most_tokens` tokens and
    take at most `most_ms`. All steps have at least `least_tokens`, padding included, as the line's do. `size_before` is
    the number of tokens of the previous step.

    A smaller model has to compute the tokens of streams that are `is_modelled`, one of each stream in a step;
    `draft_line` is the cost of its steps with all of these streams. After the counts of the streams come those of
    `branches`, whose tokens cost the smaller model nothing."""
    gains, drafting = _gains(chances, lengths, branches), DraftSteps(draft_line, is_modelled)
    num_streams = len(chances)
    least_size = max(num_streams, least_tokens)
    back_ms = _back_ms(line, max(chances))
    sizes = _Sizes(line, correction, least_size, size_before, back_ms)
    without_ms = line.base_ms * correction(least_size)
    if least_size != size_before:
        without_ms += back_ms
    best_rate, best = _MARGIN * num_streams / without_ms, 0
    expected = float(num_streams)
    num_tokens = num_streams
    counts = [0] * (num_streams + len(branches))
    for count, gain in enumerate(gains, 1):
        expected += gain.expected
        num_tokens += gain.num_tokens
        if num_tokens > most_tokens:
            break
        if gain.place < num_streams:
            drafting.add(gain.place, counts[gain.place])
        counts[gain.place] += 1
        size = max(num_tokens, least_tokens)
        if not sizes.are_few(size):
            continue
        cost_ms = sizes.cost_ms(size, gain.expected) + drafting.cost_ms
        if cost_ms <= most_ms and expected / cost_ms > best_rate:
            best_rate, best = expected / cost_ms, count
    taken = Counter(gain.place for gain in gains[:best])
    return [taken[place] for place in range(len(counts))]


class Planned(NamedTuple):
    """A step before the tokens of trees are added: `num_streams` streams, and `num_tokens` tokens including drafts,
    from which the streams are expected to gain `expected` tokens."""

    num_streams: int
    num_tokens: int
    expected: float


def best_of_trees(
    gains: Sequence[TreeGain],
    planned: Planned,
    line: StepLine,
    correction: Callable[[int], float],
    *,
    size_before: int,
    most_tokens: int,
    most_ms: float,
    least_tokens: int = 1,
) -> int:
    """How many of the tokens of trees `gains`, in this order, a step verifies besides what is planned. The heads have
    computed them already. See `best_counts` for the rest."""
    least_size = max(planned.num_streams, least_tokens)
    back_ms = _back_ms(line, max((gain.expected for gain in gains), default=0.0))
    sizes = _Sizes(line, correction, least_size, size_before, back_ms)
    num_tokens, expected = planned.num_tokens, planned.expected
    best_rate, best = expected / sizes.cost_ms(max(num_tokens, least_tokens), 1.0), 0
    for count, gain in enumerate(gains, 1):
        expected += gain.expected
        num_tokens += gain.num_tokens
        if num_tokens > most_tokens:
            break
        size = max(num_tokens, least_tokens)
        if not sizes.are_few(size):
            continue
        cost_ms = sizes.cost_ms(size, gain.expected)
        if cost_ms <= most_ms and expected / cost_ms > best_rate:
            best_rate, best = expected / cost_ms, count
    return best
