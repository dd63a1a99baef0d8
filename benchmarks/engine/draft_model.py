"""Compares the speed-up of a draft model or of heads with what the costs of steps predict, for given shares of right
drafts.

    python -m benchmarks.engine.draft_model MODEL_DIR DRAFT_DIR [--rounds 5] [--tokens 80] [--right 0.5 0.7 0.9]
    python -m benchmarks.engine.draft_model MODEL_DIR --random-heads      EAGLE-3 heads of the model's size

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
import json
import math
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov

from benchmarks.machine import describe
from headrace.common.model_files.heads import heads_kind
from headrace.worker.engine.build import Draft, build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.heads.eagle_runner import EagleHeads, EagleRunner
from headrace.worker.heads.features import FeatureStore
from headrace.worker.heads.states import attentions_of, embeddings_of, width_of
from headrace.worker.host.numa import usable_cpus
from headrace.worker.model.batch import Batch
from headrace.worker.model.paging import read_paged
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.acceptance_rate import AcceptanceRate
from headrace.worker.speculation.draft_model import DraftModel
from headrace.worker.speculation.eagle import EagleModel
from headrace.worker.speculation.speculation import MAX_DRAFT, Speculation

NUM_BLOCKS = 64
PROMPT = [11 * number % 1000 for number in range(100)]
COUNTS = (1, 3, 5, 7, 11)
# Tokens before the measured ones, in which costs and acceptance are learned, and those of steps with fixed drafts.
WARM_UP_TOKENS, FIXED_WARM_UP = 32, 4


class KnownDraftRunner:
    """A draft model or heads whose logits are replaced. `answer` has the model's tokens after the prompt."""

    def __init__(self, runner: OpenVINOModelRunner | EagleRunner, vocab_size: int) -> None:
        self.vocab_size, self.block_size = vocab_size, runner.block_size
        self.answer: Sequence[int] = ()
        self._is_right: list[bool] = []
        self._runner, self._random = runner, random.Random(1)
        self._sampled: Sequence[Request] = ()

    @property
    def store(self) -> FeatureStore:
        """The features that heads read."""
        assert isinstance(self._runner, EagleRunner)
        return self._runner.store

    def set_right(self, share: float) -> None:
        """Let the proposals for this share of places be right, of any 20 places in a row about as many."""
        self._is_right = []
        while len(self._is_right) < len(self.answer):
            deck = [number < round(20 * share) for number in range(20)]
            self._random.shuffle(deck)
            self._is_right += deck

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
            place = request.num_tokens + lag - len(PROMPT)
            is_known = 0 <= place < len(self.answer)
            token_id = self.answer[place] if is_known else 0
            row[token_id if is_known and self._is_right[place] else token_id - 1] = 1.0
        return Logits(logits)


class FixedSpeculation:
    """Takes the choice of the number of draft tokens from a controller; None gives it back."""

    def __init__(self, speculation: Speculation) -> None:
        self._speculation, self._choose = speculation, speculation._counts

    def fix(self, count: int | None) -> None:
        """Draft so many tokens for each stream."""
        chosen = self._choose if count is None else lambda _streams, drafts, *_: [count] * len(drafts)
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
    parser.add_argument("--random-heads", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no round that would end later")
    parser.add_argument("--tokens", type=int, default=80)
    parser.add_argument("--right", type=float, nargs="*", default=[0.5, 0.7, 0.9])
    args = parser.parse_args()
    print(describe(), flush=True)
    with TemporaryDirectory() as directory:
        if args.random_heads:
            write_random_heads(args.model_dir, Path(directory))
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
    curve |= {count: statistics.median(step_ms(each.fixed[count]) for each in rounds) for count in COUNTS}
    print("T(k) ms, and that of the best and the worst round by T(0) of the same round:")
    for count, milliseconds in curve.items():
        ratios = [step_ms(each.fixed.get(count, each.alone)) / step_ms(each.alone) for each in rounds]
        print(f"    {count}: {milliseconds:.1f}, {spread(ratios)}")
    for right in shares:
        report(right, curve, rounds)


class Runs:
    """Runs the kinds of a round. Each share of right drafts has its own knowledge of how often drafts are accepted."""

    def __init__(self, off: Engine, engine: Engine, known: KnownDraftRunner, shares: Sequence[float]) -> None:
        speculation = engine.scheduler.speculation
        assert speculation is not None
        self._off, self._engine, self._known, self._speculation = off, engine, known, speculation
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

        kinds = [alone, *(partial(drafted, right) for right in self._rates), *(partial(fixed, k) for k in COUNTS)]
        at = number % len(kinds)
        for kind in (*kinds[at:], *kinds[:at]):
            kind()
        return found


def spread(values: Sequence[float]) -> str:
    """Median, least and largest."""
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def engines(model_dir: Path, draft_dir: Path) -> tuple[Engine, Engine, KnownDraftRunner]:
    """An engine without drafts and one with, over one runner, and what replaces the drafts."""
    threads = len(usable_cpus())
    heads = EagleHeads.read(draft_dir) if heads_kind(draft_dir) else None
    target = OpenVINOModelRunner(
        model_dir,
        threads=threads,
        kv_precision="u8",
        execution_mode="performance",
        speculates=True,
        states=None if heads is None else heads.reader,
    )
    target.allocate(NUM_BLOCKS)
    smaller: OpenVINOModelRunner | EagleRunner
    if heads is None:
        smaller = OpenVINOModelRunner(draft_dir, threads=threads, kv_precision="u8", execution_mode="performance")
    else:
        smaller = heads.compile(model_dir, threads)
    smaller.allocate(NUM_BLOCKS)
    known = KnownDraftRunner(smaller, target.vocab_size)
    limits = StepLimits(8, 256, 256, is_exact=True)
    off = build_engine(target, BatchSampler(), NUM_BLOCKS, limits)
    draft = Draft(known, BatchSampler(), kind=DraftModel if heads is None else EagleModel)
    speculation = "draft" if heads is None else "eagle3"
    engine = build_engine(target, BatchSampler(), NUM_BLOCKS, limits, speculation=speculation, draft=draft)
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


def write_random_heads(model_dir: Path, directory: Path) -> None:
    """Heads in the format of EAGLE-3 for a model, with random weights of the usual sizes."""
    graph = read_paged(ov.Core(), model_dir).graph
    size = width_of(embeddings_of(graph))
    vocab_size = int(graph.get_results()[0].get_output_partial_shape(0)[-1].get_length())
    num_draft, inner, num_heads = min(32_000, vocab_size), size * 11 // 4, size // 128
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(count for count in (1, 2, 4, 8) if num_heads % count == 0),
        "head_dim": 128,
        "vocab_size": vocab_size,
        "eagle_aux_hidden_state_layer_ids": [1, len(attentions_of(graph)) // 2, len(attentions_of(graph)) - 1],
    }
    shapes = {
        "fc": (size, 3 * size),
        "midlayer.self_attn.q_proj": (num_heads * 128, 2 * size),
        "midlayer.self_attn.k_proj": (config["num_key_value_heads"] * 128, 2 * size),
        "midlayer.self_attn.v_proj": (config["num_key_value_heads"] * 128, 2 * size),
        "midlayer.self_attn.o_proj": (size, num_heads * 128),
        "midlayer.mlp.gate_proj": (inner, size),
        "midlayer.mlp.up_proj": (inner, size),
        "midlayer.mlp.down_proj": (size, inner),
        "lm_head": (num_draft, size),
    }
    rng = np.random.default_rng(0)
    tensors = {}
    for name, (rows, columns) in shapes.items():
        values = rng.integers(-127, 128, (rows, columns), np.int8) / (73 * columns**0.5)
        tensors[f"{name}.weight"] = values.astype(np.float16)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = np.ones(size, np.float16)
    tensors["norm.weight"] = np.ones(size, np.float16)
    tensors["d2t"] = np.zeros(num_draft, np.int64)
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", tensors)


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write arrays of float16 and int64."""
    header, place = {}, 0
    for name, values in tensors.items():
        kind = "F16" if values.dtype == np.float16 else "I64"
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [place, place + values.nbytes]}
        place += values.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.tobytes())


if __name__ == "__main__":
    main()
