"""Compares the speed-up of a draft model or of heads with what the costs of steps predict, for given shares of right
drafts.

    python -m benchmarks.engine.draft_model MODEL_DIR DRAFT_DIR [--rounds 5] [--tokens 80] [--right 0.5 0.7 0.9]
    python -m benchmarks.engine.draft_model MODEL_DIR --random-heads eagle3   of the model's size; or medusa, or mtp

Both models compute all their steps. What the draft model proposes is then replaced: at a share p of the answer's places
by the token that the model will choose, else by another one. So any two models will do, and p is known. One greedy
stream.

Every round has a run without drafts, one with each fixed number k of draft tokens, none of which is right, and one for
each p, in a changing order. The time of a run is the mean of its steps, drafts included: T(k). The prediction of a
round is (1 + p + ... + p^k) * T(0) / T(k), for the k that is best over all rounds. A figure is the median over the
rounds (min to max). Beside each is the same from the medians of all steps with the same k, which other programs on the
machine disturb less. The measured speed-up is about the prediction times three ratios, of the steps of all rounds:

    choice    expected tokens a second for the k that were chosen, by the best fixed k
    luck      tokens of the steps, by those expected for their k
    cost      what T(k) predicts for the steps, by what they took
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time
from bisect import bisect
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from benchmarks.engine.random_heads import write_eagle_heads, write_medusa_heads, write_mtp_layer
from benchmarks.machine import describe
from headrace.common.model_files.heads import heads_kind
from headrace.worker.draft_heads.eagle_runner import EagleRunner
from headrace.worker.draft_heads.features import FeatureStore
from headrace.worker.draft_heads.medusa_runner import MedusaHeads, MedusaRunner
from headrace.worker.engine.build import Draft, build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.host.numa import usable_cpus
from headrace.worker.model.batch import Batch
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.acceptance_rate import AcceptanceRate
from headrace.worker.speculation.load import kind_of_drafts, read_heads
from headrace.worker.speculation.speculation import MAX_DRAFT, Speculation

NUM_BLOCKS = 64
PROMPT = [11 * number % 1000 for number in range(100)]
COUNTS = (1, 3, 5, 7, 11)
WRITERS = {"eagle3": write_eagle_heads, "medusa": write_medusa_heads, "mtp": write_mtp_layer}
# Beside this logit, those that are zero are as good as impossible. What is never right is proposed all the same.
_STANDS_OUT, _LEAST_SHARE = 20.0, 1e-3
# Tokens before the measured ones, in which costs and acceptance are learned, and those of steps with fixed drafts.
WARM_UP_TOKENS, FIXED_WARM_UP = 32, 4


class KnownAnswer:
    """Says what to propose at each place. `answer` has the model's tokens after the prompt."""

    def __init__(self) -> None:
        self.answer: Sequence[int] = ()
        self._shares: Sequence[float] = ()
        self._ranks: list[int] = []
        self._random = random.Random(1)

    def set_right(self, *shares: float) -> None:
        """Let the best proposal be right at the first share of places, the second best at the second, and so on; of any
        20 places in a row at about as many."""
        self._shares = shares
        self._ranks = []
        bounds = [round(20 * sum(shares[: number + 1])) for number in range(len(shares))]
        while len(self._ranks) < len(self.answer):
            deck = [bisect(bounds, number) for number in range(20)]
            self._random.shuffle(deck)
            self._ranks += deck

    def propose(self, row: npt.NDArray[np.float32], place: int) -> None:
        """Make the proposed tokens the best of these logits, which are zero, and as probable as they are right."""
        is_known = 0 <= place < len(self.answer)
        token_id = self.answer[place] if is_known else 0
        candidates = [token_id - 1 - number for number in range(len(self._shares))]
        if is_known:
            candidates.insert(self._ranks[place], token_id)
        for candidate, share in zip(candidates, self._shares, strict=False):
            row[candidate] = _STANDS_OUT + math.log(max(share, _LEAST_SHARE))


class KnownDraftRunner(KnownAnswer):
    """A draft model or heads whose logits are replaced."""

    def __init__(self, runner: OpenVINOModelRunner | EagleRunner, vocab_size: int) -> None:
        super().__init__()
        self.vocab_size, self.block_size = vocab_size, runner.block_size
        self._runner = runner
        self._sampled: Sequence[Request] = ()

    @property
    def store(self) -> FeatureStore:
        """The features that heads read."""
        assert isinstance(self._runner, EagleRunner)
        return self._runner.store

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Compute the step with tokens that the draft model knows."""
        self._sampled = batch.sampled
        known = replace(batch, input_ids=batch.input_ids % self._runner.vocab_size)
        self._runner.bind(known, keeps_logits=keeps_logits)

    def run(self) -> Logits:
        """One row for each sampled request, whose best token is right at the places that were set."""
        self._runner.run()
        logits = np.zeros((len(self._sampled), self.vocab_size), np.float32)
        lag = isinstance(self._runner, EagleRunner)
        for row, request in zip(logits, self._sampled, strict=True):
            self.propose(row, request.num_tokens + lag - len(PROMPT))
        return Logits(logits)


class KnownMedusaHeads(KnownAnswer):
    """Heads in the format of Medusa whose logits are replaced. A branch is never right."""

    def __init__(self, runner: MedusaRunner) -> None:
        super().__init__()
        self.vocab_size, self.block_size = runner.vocab_size, runner.block_size
        self.num_heads, self.size = runner.num_heads, runner.size
        self._runner = runner
        self._place = 0

    @property
    def states(self) -> KnownMedusaHeads:
        """Itself: it sees who asks for states."""
        return self

    def of(self, request: Request) -> npt.NDArray[np.float32] | None:
        """The last hidden state before the latest token of the one stream."""
        self._place = request.num_generated_tokens
        return self._runner.states.of(request)

    def compute(self, head: int, states: npt.NDArray[np.float32]) -> Logits:
        """One row, whose best token is right at the places that were set."""
        self._runner.compute(head, states)
        logits = np.zeros((len(states), self.vocab_size), np.float32)
        for row in logits:
            self.propose(row, self._place + head)
        return Logits(logits)


class FixedSpeculation:
    """Takes the choice of the number of draft tokens from a controller; None gives it back."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation, self._choose = speculation, speculation._counts

    def fix(self, count: int | None) -> None:
        """Draft so many tokens for each stream."""
        chosen = (
            self._choose
            if count is None
            else (lambda _streams, drafts, _line, branches, _most: [count] * len(drafts) + [0] * len(branches))
        )
        self._speculation._counts = chosen  # type: ignore[method-assign]


class Step(NamedTuple):
    """A step: its draft tokens, the tokens it gave, and its time in milliseconds, drafts included."""

    num_drafted: int
    num_tokens: int
    milliseconds: float


class Round(NamedTuple):
    """The steps of a round's runs: without drafts, for each fixed number of draft tokens, for each share of right
    ones."""

    alone: list[Step]
    fixed: dict[int, list[Step]]
    drafted: dict[float, list[Step]]


def run(engine: Engine, num_tokens: int, warm_up: int = WARM_UP_TOKENS) -> tuple[list[Step], list[int]]:
    """The steps after the first `warm_up` tokens that give at least `num_tokens`, and the whole answer. It could go on,
    so no draft is cut short."""
    scheduler = engine.scheduler
    scheduler.kv_cache.pool.forget_all()
    most = warm_up + num_tokens + MAX_DRAFT + 2
    request = Request("0", PROMPT, SamplingParams(max_tokens=most, seed=0, temperature=0.0), 0)
    scheduler.add(request)
    steps: list[Step] = []
    while scheduler.has_requests and request.num_generated_tokens < warm_up + num_tokens:
        before, drafted, start_s = request.num_generated_tokens, request.num_drafted, time.perf_counter()
        engine.advance(lambda _: None)
        milliseconds = 1000 * (time.perf_counter() - start_s)
        if before >= warm_up:
            steps.append(Step(request.num_drafted - drafted, request.num_generated_tokens - before, milliseconds))
    scheduler.cancel(request)
    engine.step()
    return steps, list(request.token_ids[len(PROMPT) :])


def token_ms(steps: Sequence[Step]) -> float:
    """Milliseconds of a token."""
    return sum(step.milliseconds for step in steps) / sum(step.num_tokens for step in steps)


def step_ms(steps: Sequence[Step]) -> float:
    """Milliseconds of a step."""
    return statistics.fmean(step.milliseconds for step in steps)


def median_ms(steps: Sequence[Step]) -> float:
    """The median of the milliseconds of steps."""
    return statistics.median(step.milliseconds for step in steps)


def expected_tokens(right: float, count: int) -> float:
    """Expected tokens of a step with this many draft tokens."""
    return sum(right**depth for depth in range(count + 1))


def main() -> None:
    """Measure, and print each share of right drafts with its speed-up and prediction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("draft_dir", type=Path, nargs="?")
    parser.add_argument("--random-heads", choices=sorted(WRITERS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--right", type=float, nargs="*", default=[0.5, 0.7, 0.9])
    args = parser.parse_args()
    print(describe(), flush=True)
    with TemporaryDirectory() as directory:
        if args.random_heads:
            WRITERS[args.random_heads](args.model_dir, Path(directory))
        measure(args, Path(directory) if args.random_heads else args.draft_dir)


def measure(args: argparse.Namespace, draft_dir: Path) -> None:
    """Run all rounds, and print what they found."""
    begun_s = time.perf_counter()
    off, engine, known = engines(args.model_dir, draft_dir)
    _, known.answer = run(off, args.tokens + MAX_DRAFT)
    runs = Runs(off, engine, known, args.right)
    runs.of_round(0, min(8, args.tokens), 1)
    rounds: list[Round] = []
    longest_s = 0.0
    while len(rounds) < args.rounds and time.perf_counter() - begun_s + longest_s < args.seconds:
        start_s = time.perf_counter()
        rounds.append(runs.of_round(len(rounds) + 1, args.tokens, 10))
        longest_s = max(longest_s, time.perf_counter() - start_s)
        print(f"\nafter {len(rounds)} rounds of up to {longest_s:.0f} s:", flush=True)
        report_all(args.right, rounds)


def report_all(shares: Sequence[float], rounds: Sequence[Round]) -> None:
    """Print what the rounds so far say."""
    curve = {0: statistics.median(step_ms(each.alone) for each in rounds)}
    curve |= {count: statistics.median(step_ms(each.fixed[count]) for each in rounds) for count in rounds[0].fixed}
    print("T(k) ms, and that of the best and the worst round by T(0) of the same round:")
    for count, milliseconds in curve.items():
        ratios = [step_ms(each.fixed.get(count, each.alone)) / step_ms(each.alone) for each in rounds]
        print(f"    {count}: {milliseconds:.1f}, {spread(ratios)}")
    for right in shares:
        report(right, curve, rounds)


class Runs:
    """Runs the kinds of a round. Each share of right drafts has its own knowledge of how often drafts are accepted."""

    def __init__(self, off: Engine, engine: Engine, known: KnownAnswer, shares: Sequence[float]) -> None:
        speculation = engine.scheduler.speculation
        assert speculation is not None
        self._off, self._engine, self._known, self._speculation = off, engine, known, speculation
        assert speculation.model_drafts is not None
        self.counts = [count for count in COUNTS if count <= speculation.model_drafts.max_tokens]
        self._fixed = FixedSpeculation(speculation)
        self._rates: dict[float, AcceptanceRate] = {share: AcceptanceRate() for share in shares}

    def of_round(self, number: int, num_tokens: int, num_fixed: int) -> Round:
        """Run everything once: so many tokens, and so many steps with a fixed number of draft tokens."""
        found = Round([], {}, {})

        def alone() -> None:
            found.alone.extend(run(self._off, num_tokens)[0])

        def fixed(count: int) -> None:
            self._fixed.fix(count)
            self._known.set_right(0.0)
            self._speculation._rate = AcceptanceRate()
            found.fixed[count], _ = run(self._engine, num_fixed, FIXED_WARM_UP)

        def drafted(right: float) -> None:
            self._fixed.fix(None)
            self._known.set_right(right)
            self._speculation._rate = self._rates[right]
            found.drafted[right], answer = run(self._engine, num_tokens)
            if answer != self._known.answer[: len(answer)]:
                print(f"p = {right}: the answer is another one", flush=True)

        kinds = [alone, *(partial(drafted, right) for right in self._rates), *(partial(fixed, k) for k in self.counts)]
        at = number % len(kinds)
        for kind in (*kinds[at:], *kinds[:at]):
            kind()
        return found


def spread(values: Sequence[float]) -> str:
    """Median, least and largest."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def engines(model_dir: Path, draft_dir: Path) -> tuple[Engine, Engine, KnownAnswer]:
    """An engine without drafts and one with, over one runner, and what replaces the drafts."""
    threads = len(usable_cpus())
    found_kind = heads_kind(draft_dir)
    heads = None if found_kind is None else read_heads(draft_dir, found_kind.value)
    target = OpenVINOModelRunner(
        model_dir,
        threads=threads,
        kv_precision="u8",
        execution_mode="performance",
        speculates=True,
        states=None if heads is None else heads.reader,
    )
    target.allocate(NUM_BLOCKS)
    known: KnownDraftRunner | KnownMedusaHeads
    if isinstance(heads, MedusaHeads):
        known = KnownMedusaHeads(heads.compile(model_dir, threads, target))
    elif heads is not None:
        smaller = heads.compile(model_dir, threads)
        smaller.allocate(NUM_BLOCKS)
        known = KnownDraftRunner(smaller, target.vocab_size)
    else:
        draft = OpenVINOModelRunner(draft_dir, threads=threads, kv_precision="u8", execution_mode="performance")
        draft.allocate(NUM_BLOCKS)
        known = KnownDraftRunner(draft, target.vocab_size)
    limits = StepLimits(8, 256, 256, is_exact=True)
    off = build_engine(target, BatchSampler(), NUM_BLOCKS, limits)
    kind = kind_of_drafts(heads)
    on_take = known.store.forget if heads is not None and isinstance(known, KnownDraftRunner) else None
    drafts = Draft(known, BatchSampler(), kind=kind, on_take=on_take)  # type: ignore[arg-type]  # as kind wants it
    engine = build_engine(target, BatchSampler(), NUM_BLOCKS, limits, speculation=kind.source.value, draft=drafts)
    found = engine.scheduler.speculation
    assert found is not None
    assert found.model_drafts is not None
    found.looks_up = False
    found.model_drafts.warm_up((64, 16), 4)
    return off, engine, known


def report(right: float, curve: dict[int, float], rounds: Sequence[Round]) -> None:
    """Print the measured and the predicted speed-up, and what their ratio is made of."""

    def cost(count: int) -> float:
        return float(np.interp(count, sorted(curve), [curve[each] for each in sorted(curve)]))

    best = max(curve, key=lambda count: expected_tokens(right, count) / curve[count])
    measured = [token_ms(each.alone) / token_ms(each.drafted[right]) for each in rounds]
    predicted = [
        expected_tokens(right, best) * step_ms(each.alone) / step_ms(each.fixed.get(best, each.alone))
        for each in rounds
    ]
    ratios = [ours / theirs for ours, theirs in zip(measured, predicted, strict=True)]
    steps = [step for each in rounds for step in each.drafted[right]]
    predicted_ms = sum(cost(step.num_drafted) for step in steps)
    hoped = sum(expected_tokens(right, step.num_drafted) for step in steps)
    choice = hoped / predicted_ms * curve[best] / expected_tokens(right, best)
    luck = sum(step.num_tokens for step in steps) / hoped
    costs = predicted_ms / sum(step.milliseconds for step in steps)
    print(
        f"p = {right}: {spread(measured)} times as fast, predicted {spread(predicted)} with k = {best}, ratio "
        f"{spread(ratios)}: choice {choice:.3f}, luck {luck:.3f}, cost {costs:.3f}"
    )
    by_count: dict[int, list[Step]] = {}
    for step in steps:
        by_count.setdefault(step.num_drafted, []).append(step)
    typical_ms = sum(len(of) * median_ms(of) for of in by_count.values()) / sum(step.num_tokens for step in steps)
    alone_ms = median_ms([step for each in rounds for step in each.alone])
    best_ms = median_ms([step for each in rounds for step in each.fixed.get(best, each.alone)])
    typical, hoped_for = alone_ms / typical_ms, expected_tokens(right, best) * alone_ms / best_ms
    print(f"    by the medians of all steps: {typical:.3f}, predicted {hoped_for:.3f}, ratio {typical / hoped_for:.3f}")
    chosen = (f"{count}: {len(of)} of {step_ms(of):.1f} ms" for count, of in sorted(by_count.items()))
    print("    steps by k:", ", ".join(chosen), flush=True)


if __name__ == "__main__":
    main()
