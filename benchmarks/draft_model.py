"""Compares the speed-up of a draft model with what the costs of steps predict, for given shares of right drafts.

    python -m benchmarks.draft_model MODEL_DIR DRAFT_DIR [--rounds 2] [--tokens 64] [--right 0.5 0.7 0.9]

Both models compute all their steps. What the draft model proposes is then replaced: by the token that the model will
choose with probability p, else by another one. So any two models will do, and p is known. One greedy stream.

The prediction comes from steps with fixed numbers k of draft tokens, none of which is right: T(k) is the time of such a
step, drafts included. It is the best of (1 + p + ... + p^k) * T(0) / T(k) over k.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.machine import describe
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
from headrace.worker.speculation.speculation import Speculation

NUM_BLOCKS = 64
PROMPT = [11 * number % 1000 for number in range(100)]
COUNTS = (1, 3, 5, 7, 11)
# Tokens before the measured ones, in which costs and acceptance are learned, and those of steps with fixed drafts.
WARM_UP_TOKENS, FIXED_WARM_UP = 40, 12


class KnownDraftRunner:
    """A draft model whose logits are replaced. `answer` has the model's tokens after the prompt."""

    def __init__(self, runner: OpenVINOModelRunner, vocab_size: int) -> None:
        self.vocab_size, self.block_size = vocab_size, runner.block_size
        self.answer: Sequence[int] = ()
        self.right = 0.0
        self._runner, self._random = runner, random.Random(1)
        self._sampled: Sequence[Request] = ()

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Compute the step with tokens that the draft model knows."""
        self._sampled = batch.sampled
        known = replace(batch, input_ids=batch.input_ids % self._runner.vocab_size)
        self._runner.bind(known, keeps_logits=keeps_logits)

    def run(self) -> Logits:
        """One row for each sampled request, whose best token is right with probability `right`."""
        self._runner.run()
        logits = np.zeros((len(self._sampled), self.vocab_size), np.float32)
        for row, request in zip(logits, self._sampled, strict=True):
            place = request.num_generated_tokens
            token_id = self.answer[place] if place < len(self.answer) else 0
            row[token_id if self._random.random() < self.right else token_id - 1] = 1.0
        return Logits(logits)


class FixedSpeculation:
    """Takes the choice of the number of draft tokens from a controller; None gives it back."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation, self._choose = speculation, speculation._counts

    def fix(self, count: int | None) -> None:
        """Draft so many tokens for each stream."""
        chosen = self._choose if count is None else lambda _streams, drafts, _line: [count] * len(drafts)
        self._speculation._counts = chosen  # type: ignore[method-assign]


def run(engine: Engine, num_tokens: int, warm_up: int = WARM_UP_TOKENS) -> tuple[float, list[int]]:
    """Milliseconds of a token after the first `warm_up`, and the whole answer."""
    scheduler = engine.scheduler
    scheduler.kv_cache.pool.forget_all()
    params = SamplingParams(max_tokens=warm_up + num_tokens, seed=0, temperature=0.0)
    request = Request("0", PROMPT, params, 0)
    scheduler.add(request)
    while scheduler.has_requests and request.num_generated_tokens < warm_up:
        engine.advance(lambda _: None)
    before, start_s = request.num_generated_tokens, time.perf_counter()
    while scheduler.has_requests:
        engine.advance(lambda _: None)
    token_ms = 1000 * (time.perf_counter() - start_s) / (request.num_generated_tokens - before)
    return token_ms, list(request.token_ids[len(PROMPT) :])


def main() -> None:
    """Measure, and print each share of right drafts with its speed-up and prediction."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("draft_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--right", type=float, nargs="*", default=[0.5, 0.7, 0.9])
    args = parser.parse_args()
    print(describe(), flush=True)
    threads = len(usable_cpus())
    runners = [
        OpenVINOModelRunner(
            path, threads=threads, kv_precision="u8", execution_mode="performance", speculates=speculates
        )
        for path, speculates in ((args.model_dir, True), (args.draft_dir, False))
    ]
    for runner in runners:
        runner.allocate(NUM_BLOCKS)
    known = KnownDraftRunner(runners[1], runners[0].vocab_size)
    limits = StepLimits(8, 256, 256, is_exact=True)
    off = build_engine(runners[0], BatchSampler(), NUM_BLOCKS, limits)
    engine = build_engine(
        runners[0], BatchSampler(), NUM_BLOCKS, limits, speculation="draft", draft=Draft(known, BatchSampler())
    )
    speculation = engine.scheduler.speculation
    assert speculation is not None
    assert speculation.model_drafts is not None
    speculation.looks_up = False
    speculation.model_drafts.warm_up((64, 16), 4)
    fixed = FixedSpeculation(speculation)
    _, known.answer = run(off, args.tokens)
    times: dict[object, list[float]] = {}
    for number in range(args.rounds + 1):
        found: dict[object, float] = {0: run(off, args.tokens)[0] if number else 0.0}
        for count in COUNTS:
            fixed.fix(count)
            known.right = 0.0
            found[count] = run(engine, 16 if number else 2, FIXED_WARM_UP if number else 2)[0]
        fixed.fix(None)
        for right in args.right:
            known.right = right
            found[f"p {right}"], answer = run(engine, args.tokens)
            if answer != known.answer:
                print(f"p = {right}: the answer is another one", flush=True)
        for name, value in found.items() if number else ():
            times.setdefault(name, []).append(value)
    report(times, args.right)


def report(times: dict[object, list[float]], rights: Sequence[float]) -> None:
    """Print the cost curve, and for each share of right drafts the measured and the predicted speed-up."""
    curve = {name: statistics.median(values) for name, values in times.items()}
    print("T(k) ms:", ", ".join(f"{count}: {curve[count]:.1f}" for count in (0, *COUNTS)))
    for right in rights:
        predicted = max(sum(right**i for i in range(k + 1)) * curve[0] / curve[k] for k in (0, *COUNTS))
        ratios = [alone / drafted for alone, drafted in zip(times[0], times[f"p {right}"], strict=True)]
        measured = statistics.median(ratios)
        print(
            f"p = {right}: {measured:.3f} times as fast ({min(ratios):.3f} to {max(ratios):.3f}), predicted "
            f"{predicted:.3f}, ratio {measured / predicted:.3f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
