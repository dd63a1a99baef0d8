"""Compares the worker's engine with speculative decoding to itself without, and to openvino-genai's prompt lookup.

    python -m benchmarks.engine.speculation MODEL_DIR [--rounds 5] [--tokens 128] [--case NAME]... [--streams 8 64]
        [--no-peer]

The cases have one greedy stream each, which repeats parts of its prompt: `edit` (a file is rewritten), `quote` (a
document is quoted) and `json` (records are rewritten). `free` samples at temperature 1, with nothing to repeat. With
many streams, all cases are mixed. Every round runs each side once, in a changing order. A ratio is the median over the
rounds (min to max).
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks.machine import describe
from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.host.numa import usable_cpus
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.row_sums import reducer_for
from headrace.worker.sampling.sampler import BatchSampler

ROOT = Path(__file__).parents[2]
NUM_BLOCKS = 3000
MAX_NGRAM, NUM_ASSISTANT_TOKENS = 3, 5
CASES = ("edit", "quote", "json", "free")


class Task(NamedTuple):
    """A prompt and the temperature of its answer."""

    prompt: Sequence[int]
    temperature: float


Side = Callable[[Sequence[Task], int], float]


def tasks_of(model_dir: Path, case: str, number: int) -> Task:
    """Create a task of a case."""
    code = (ROOT / "worker" / "kv" / "block_pool.py").read_text()
    text = (ROOT / "docs" / "explanation" / "batching.md").read_text()
    at = 120 * (number % 8)
    if case == "edit":
        part = code[at : at + 1200]
        prompt = f"File:\n```python\n{part}\n```\nThe same file:\n```python\n{part[:160]}"
    elif case == "quote":
        part = text[at : at + 1000]
        prompt = f'Document: "{part}"\n\nThe document says: "{part[:120]}'
    elif case == "json":
        records = ",\n".join(
            f'{{"id": {1000 + 37 * row + number}, "name": "item {chr(65 + row)}", "price": {row * 7 + 3}.50}}'
            for row in range(14)
        )
        prompt = f"Input:\n[{records}]\nOutput:\n[{records[:90]}"
    else:
        prompt = f"{number + 3} things that nobody expects of a small town by the sea:\n"
    return Task(_tokenize(model_dir, prompt), 1.0 if case == "free" else 0.0)


def _tokenize(model_dir: Path, text: str) -> list[int]:
    import openvino as ov
    import openvino_tokenizers  # noqa: F401  it registers its operators

    global _tokenizer
    if _tokenizer is None:
        _tokenizer = ov.Core().compile_model(model_dir / "openvino_tokenizer.xml", "CPU")
    tokens: list[int] = _tokenizer([text])["input_ids"][0].tolist()
    return tokens


_tokenizer = None


class Headrace:
    """The worker's engine, with or without speculation. Like a worker, it keeps what it has learned from run to run."""

    def __init__(self, runner: OpenVINOModelRunner, speculation: str) -> None:
        sampler = BatchSampler(reducer_for(runner.vocab_size, len(usable_cpus())))
        most = min(1024, runner.exact_rows)
        limits = StepLimits(min(128, most - 8), most, most, is_exact=True)
        # As the worker has it: see OpenVINOModelRunner.
        self._least_decode = runner.least_decode = 1 if speculation == "off" else 2
        self.engine: Engine = build_engine(runner, sampler, NUM_BLOCKS, limits, speculation=speculation)
        self._seed = 0
        self._runner = runner

    def run(self, tasks: Sequence[Task], max_tokens: int) -> float:
        """Tokens a second, from the step after the last prompt to the last token."""
        scheduler = self.engine.scheduler
        scheduler.kv_cache.pool.forget_all()
        self._runner.least_decode = self._least_decode
        self._seed += 1
        for number, (prompt, temperature) in enumerate(tasks):
            params = SamplingParams(max_tokens=max_tokens, seed=1000 * self._seed + number, temperature=temperature)
            scheduler.add(Request(str(number), prompt, params, number, arrival_s=number))
        while scheduler.waiting or any(request.num_uncomputed_tokens > 1 for request in scheduler.running):
            self.engine.advance(lambda _: None)
        before, start_s = scheduler.stats.tokens_generated, time.perf_counter()
        while scheduler.has_requests:
            self.engine.advance(lambda _: None)
        return (scheduler.stats.tokens_generated - before) / (time.perf_counter() - start_s)


class Genai:
    """openvino-genai's pipeline with prompt lookup."""

    def __init__(self, model_dir: Path) -> None:
        import openvino as ov
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.num_kv_blocks = NUM_BLOCKS
        self._ov, self._genai = ov, genai
        self._pipeline = genai.LLMPipeline(str(model_dir), "CPU", scheduler_config=scheduler, prompt_lookup=True)

    def run(self, tasks: Sequence[Task], max_tokens: int) -> float:
        """Tokens a second after the first of one task."""
        (task,) = tasks
        config = self._genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.num_assistant_tokens, config.max_ngram_size = NUM_ASSISTANT_TOKENS, MAX_NGRAM
        result = self._pipeline.generate(self._ov.Tensor(np.asarray([task.prompt], np.int64)), config)
        metrics = result.perf_metrics
        seconds = (metrics.get_generate_duration().mean - metrics.get_ttft().mean) / 1000
        return (metrics.get_num_generated_tokens() - 1) / seconds


def compare(name: str, sides: dict[str, Side], tasks: Sequence[Sequence[Task]], max_tokens: int) -> None:
    """Print the ratios of the first side to the others. `tasks` has the tasks of each round; the first round is a
    warm-up."""
    found: dict[str, list[float]] = {side: [] for side in sides}
    order = list(sides)
    for number, of_round in enumerate(tasks):
        for side in np.roll(order, number).tolist():
            rate = sides[side](of_round, max_tokens)
            if number:
                found[side].append(rate)
    first = order[0]
    for other in order[1:]:
        ratios = [ours / theirs for ours, theirs in zip(found[first], found[other], strict=True)]
        print(
            f"{name}: {first} {statistics.median(found[first]):.1f} tokens/s, {other} "
            f"{statistics.median(found[other]):.1f}: {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f})",
            flush=True,
        )


def main() -> None:
    """Compare the sides in each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--case", choices=CASES, action="append")
    parser.add_argument("--streams", type=int, nargs="*", default=[8, 32, 64])
    parser.add_argument("--no-peer", action="store_true")
    args = parser.parse_args()
    print(describe(), flush=True)
    runner = OpenVINOModelRunner(
        args.model_dir, threads=len(usable_cpus()), kv_precision="u8", execution_mode="performance"
    )
    runner.allocate(NUM_BLOCKS)
    sides = {mode: Headrace(runner, mode) for mode in ("auto", "off")}
    # The engine keeps pools of its own over one cache, so nothing of one side is left for the other.
    runs: dict[str, Side] = {mode: side.run for mode, side in sides.items()}
    genai = None if args.no_peer else Genai(args.model_dir)
    for case in args.case or CASES:
        tasks = [[tasks_of(args.model_dir, case, number)] for number in range(args.rounds + 1)]
        with_peer = runs if genai is None or case == "free" else {**runs, "openvino-genai": genai.run}
        compare(f"one stream, {case}", with_peer, tasks, args.tokens)
    for streams in args.streams:
        tasks = [
            [tasks_of(args.model_dir, CASES[number % 4], number + 7 * of_round) for number in range(streams)]
            for of_round in range(args.rounds + 1)
        ]
        compare(f"{streams} streams, mixed", runs, tasks, args.tokens)
    speculation = sides["auto"].engine.scheduler.speculation
    assert speculation is not None
    print(speculation.counters)


if __name__ == "__main__":
    main()
