"""Compares trees of heads with their drafts without branches, and both with no drafts.

    python -m benchmarks.engine.draft_trees MODEL_DIR [--rounds 5] [--tokens 80] [--heads eagle3 mtp]
        [--right 0.5,0.3 0.7,0.2 0.9,0.05] [--tree-tokens 16] [--tree-depth 5] [--tree-top-k 4]

Heads in the format of EAGLE-3, and a layer that predicts more tokens (mtp), are of the model's size and have random
weights. They compute all their steps, and their logits are then replaced, as in `draft_model`: `0.5,0.3` means that
their best token is right at half of the places and their second best at 0.3 of them, and that the heads give these
tokens such probabilities. One greedy stream; the controller chooses drafts and trees as in a worker.

Every round has a run without drafts, of the model as it is served without heads, and for each kind of heads and each
pair of shares one without branches (chain) and one with trees, in a changing order. The time of a run is the mean of a
token, drafts included. A ratio is of the runs of a round, and a figure the median over the rounds (min to max).
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from benchmarks.engine.draft_model import (
    NUM_BLOCKS,
    WRITERS,
    KnownDraftRunner,
    Step,
    run,
    spread,
    token_ms,
)
from benchmarks.machine import describe
from headrace.worker.draft_heads.eagle_runner import EagleHeads, EagleRunner
from headrace.worker.engine.build import Draft, build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.host.numa import usable_cpus
from headrace.worker.model.runner import OpenVINOModelRunner, StateReader
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.step import BlockCopy
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.acceptance_rate import AcceptanceRate
from headrace.worker.speculation.load import DEFAULT_DEPTH, DEFAULT_TOP_K, kind_of_drafts, read_heads
from headrace.worker.speculation.speculation import MAX_DRAFT, Speculation
from headrace.worker.speculation.tree import TreeShape

HEADS = ("eagle3", "mtp")
LIMITS = StepLimits(8, 256, 256, is_exact=True)
FORMS = ("chain", "tree")
NO_DRAFTS = ""


class Right(NamedTuple):
    """At which share of places the best and the second best token of the heads are right."""

    best: float
    second: float

    @classmethod
    def of(cls, text: str) -> Right:
        """From a text such as 0.5,0.3. Raises ValueError."""
        best, _, second = text.partition(",")
        found = cls(float(best), float(second or 0))
        if min(found) < 0 or sum(found) > 1:
            raise ValueError(f"{text} are not two shares of the same places")
        return found


class Kind(NamedTuple):
    """The kind of a run: heads, whether they grow trees, and how often they are right. Without heads it has no
    drafts."""

    heads: str
    form: str = NO_DRAFTS
    right: Right = Right(0.0, 0.0)


class KnownHeads(KnownDraftRunner):
    """Heads whose logits are replaced, with the blocks that trees need."""

    def __init__(self, runner: EagleRunner, vocab_size: int) -> None:
        super().__init__(runner, vocab_size)
        self.spare_blocks = runner.spare_blocks
        self._heads = runner

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy keys, values and features of blocks."""
        self._heads.copy(copies)


class Drafting(NamedTuple):
    """An engine with drafts, and its knowledge of how often those of each share are accepted."""

    engine: Engine
    speculation: Speculation
    rates: dict[Right, AcceptanceRate]


class Heads:
    """Heads of one kind and the model for which they draft, with an engine for each form of drafts."""

    def __init__(self, kind: str, model_dir: Path, shape: TreeShape, shares: Sequence[Right], num_tokens: int) -> None:
        threads = len(usable_cpus())
        with TemporaryDirectory() as directory:
            WRITERS[kind](model_dir, Path(directory))
            heads = read_heads(Path(directory), kind, shape)
            assert isinstance(heads, EagleHeads)
            target = model_of(model_dir, threads, heads.reader)
            runner = heads.compile(model_dir, threads)
        runner.allocate(NUM_BLOCKS)
        self._known = KnownHeads(runner, target.vocab_size)
        # Of this graph, which also computes what the heads read.
        _, self._known.answer = run(build_engine(target, BatchSampler(), NUM_BLOCKS, LIMITS), num_tokens + MAX_DRAFT)
        self._forms: dict[str, Drafting] = {}
        for form, tree in zip(FORMS, (None, shape), strict=True):
            draft = Draft(
                self._known, BatchSampler(), kind=kind_of_drafts(heads, tree), on_take=self._known.store.forget
            )
            engine = build_engine(target, BatchSampler(), NUM_BLOCKS, LIMITS, speculation=kind, draft=draft)
            speculation = engine.scheduler.speculation
            assert speculation is not None
            assert speculation.model_drafts is not None
            speculation.looks_up = False
            speculation.model_drafts.warm_up((64, 16), 4)
            self._forms[form] = Drafting(engine, speculation, {right: AcceptanceRate() for right in shares})

    def run(self, kind: Kind, num_tokens: int) -> list[Step]:
        """The steps of a run."""
        drafting = self._forms[kind.form]
        drafting.speculation._rate = drafting.rates[kind.right]
        self._known.set_right(*kind.right)
        steps, answer = run(drafting.engine, num_tokens)
        if answer != self._known.answer[: len(answer)]:
            print(f"{kind}: the answer is another one", flush=True)
        return steps


def model_of(model_dir: Path, threads: int, states: StateReader | None = None) -> OpenVINOModelRunner:
    """The model as a worker serves it, with what heads read if there are some."""
    runner = OpenVINOModelRunner(
        model_dir,
        threads=threads,
        kv_precision="u8",
        execution_mode="performance",
        speculates=states is not None,
        states=states,
    )
    runner.allocate(NUM_BLOCKS)
    return runner


def main() -> None:
    """Measure, and print what each kind of heads brings for each pair of shares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=[*HEADS])
    parser.add_argument(
        "--right", type=Right.of, nargs="+", default=[Right(0.5, 0.3), Right(0.7, 0.2), Right(0.9, 0.05)]
    )
    parser.add_argument("--tree-tokens", type=int, default=16)
    parser.add_argument("--tree-depth", type=int, default=DEFAULT_DEPTH)
    parser.add_argument("--tree-top-k", type=int, default=DEFAULT_TOP_K)
    args = parser.parse_args()
    print(describe(), flush=True)
    begun_s = time.perf_counter()
    shape = TreeShape(args.tree_tokens, args.tree_depth, args.tree_top_k)
    off = build_engine(model_of(args.model_dir, len(usable_cpus())), BatchSampler(), NUM_BLOCKS, LIMITS)
    runs: dict[Kind, Callable[[int], list[Step]]] = {Kind(NO_DRAFTS): lambda num_tokens: run(off, num_tokens)[0]}
    for name in args.heads:
        heads = Heads(name, args.model_dir, shape, args.right, args.tokens)
        kinds = [Kind(name, form, right) for right in args.right for form in FORMS]
        runs |= {kind: partial(heads.run, kind) for kind in kinds}
    of_round(runs, 0, min(8, args.tokens))
    rounds: list[dict[Kind, list[Step]]] = []
    longest_s = 0.0
    while len(rounds) < args.rounds and time.perf_counter() - begun_s + longest_s < args.seconds:
        start_s = time.perf_counter()
        rounds.append(of_round(runs, len(rounds) + 1, args.tokens))
        longest_s = max(longest_s, time.perf_counter() - start_s)
    print(f"{len(rounds)} rounds of up to {longest_s:.0f} s; a tree has {shape}")
    for name in args.heads:
        for right in args.right:
            report(Kind(name, FORMS[0], right), Kind(name, FORMS[1], right), rounds)


def of_round(runs: dict[Kind, Callable[[int], list[Step]]], number: int, num_tokens: int) -> dict[Kind, list[Step]]:
    """Run everything once, so many tokens each."""
    kinds = [*runs]
    at = number % len(kinds)
    return {kind: runs[kind](num_tokens) for kind in (*kinds[at:], *kinds[:at])}


def report(chain: Kind, tree: Kind, rounds: Sequence[dict[Kind, list[Step]]]) -> None:
    """Print the speeds of drafts and trees of the same heads."""

    def faster(kind: Kind, other: Kind) -> str:
        return spread([token_ms(each[other]) / token_ms(each[kind]) for each in rounds])

    def per_token(kind: Kind) -> float:
        steps = [step for each in rounds for step in each[kind]]
        return len(steps) / sum(step.num_tokens for step in steps)

    print(f"{chain.heads}, best token right at {chain.right.best}, second best at {chain.right.second} of the places:")
    for kind in (chain, tree):
        steps = [step for each in rounds for step in each[kind]]
        drafted = sum(step.num_drafted for step in steps) / len(steps)
        details = f"{per_token(kind):.3f} steps a token, {drafted:.1f} proposed tokens a step"
        print(f"    {kind.form}: {faster(kind, Kind(NO_DRAFTS))} times as fast as without drafts, {details}")
    fewer = per_token(tree) / per_token(chain)
    print(f"    tree by chain: {faster(tree, chain)} times as fast, {fewer:.3f} of its steps", flush=True)


if __name__ == "__main__":
    main()
