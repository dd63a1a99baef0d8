"""Measures and fits the cost of a worker's step: `python -m benchmarks.engine.step_cost MODEL_DIR [--out FILE]`.

The worker's model runner and sampler run steps of many shapes (decode batches, prompt chunks after a context, and
mixtures) in random order. Each shape runs twice in a row: once after a step with another number of tokens, and once
after the same. The median of several rounds counts. The coefficients of headrace.sim.step_cost are fitted by least
squares on relative errors over three quarters of the shapes. The stated error is measured on the rest. `--out` writes
the file for `headrace sim`.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from array import array
from pathlib import Path

import msgspec

from headrace.sim.fitting import Sample, errors_of, fitted
from headrace.worker.engine.step_cost import StepShape
from headrace.worker.host.numa import usable_cpus
from headrace.worker.model.batch import build_batch
from headrace.worker.model.runner import OpenVINOModelRunner
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import Scheduled
from headrace.worker.sampling.row_sums import reducer_for
from headrace.worker.sampling.sampler import BatchSampler

NUM_BLOCKS = 2100
LONGEST_CONTEXT = 16_384
KNOTS = (1, 4, 16, 48, 128, 256, 512, 1024)
# A step: for each sequence the tokens that it has computed and those that the step computes.
Step = tuple[tuple[int, int], ...]


def steps() -> list[Step]:
    """The shapes that are measured."""
    decode: list[Step] = [
        ((context, 1),) * batch
        for batch in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
        for context in (64, 512, 2048, 8192, LONGEST_CONTEXT)
        if batch * context <= NUM_BLOCKS * 32 * 0.9
    ]
    chunks: list[Step] = [
        ((past, tokens),)
        for tokens in (8, 16, 32, 64, 128, 192, 256)
        for past in (0, 512, 1024, 4096, 8192, LONGEST_CONTEXT)
    ]
    large: list[Step] = [((past, tokens),) for tokens in (384, 512, 1024) for past in (0, 1024)]
    mixed: list[Step] = [
        (*(((context, 1),) * batch), (past, 256 - batch))
        for batch in (1, 4, 16)
        for context in (256, 2048)
        for past in (0, 2048, 8192)
    ]
    several: list[Step] = [((0, 64),) * 4, ((512, 128),) * 2, ((2048, 32),) * 8]
    return [*decode, *chunks, *large, *mixed, *several]


def requests_of(step: Step, rng: random.Random, block_size: int) -> list[Scheduled]:
    """Requests in progress, each with its own blocks."""
    blocks = iter(rng.sample(range(NUM_BLOCKS), NUM_BLOCKS))
    scheduled = []
    for number, (past, tokens) in enumerate(step):
        prompt = array("I", (rng.randrange(100, 49_000) for _ in range(past + tokens)))
        request = Request(str(number), prompt, SamplingParams(max_tokens=10, seed=0, temperature=0.0), 0)
        request.num_computed_tokens = past
        num_blocks = -(-(past + tokens) // block_size)
        request.block_table = array("i", (next(blocks) for _ in range(num_blocks)))
        scheduled.append(Scheduled(request, tokens))
    return scheduled


def measured(model_dir: Path, rounds: int, threads: int) -> list[Sample]:
    """Each shape with the median of its milliseconds, both after another number of tokens and after the same."""
    runner = OpenVINOModelRunner(model_dir, threads=threads, kv_precision="u8", execution_mode="performance")
    runner.allocate(NUM_BLOCKS)
    sampler, rng = BatchSampler(reducer_for(runner.vocab_size, threads)), random.Random(1)
    taken: dict[tuple[Step, bool], list[float]] = {}
    num_tokens = 0
    for number in range(rounds + 1):
        shapes = steps()
        for step in rng.sample(shapes, len(shapes)):
            scheduled = requests_of(step, rng, runner.block_size)
            for _ in range(2):
                began = time.perf_counter()
                batch = build_batch(scheduled, runner.block_size)
                runner.bind(batch, keeps_logits=False)
                sampler.sample(batch.sampled, runner.run())
                took_ms = 1000 * (time.perf_counter() - began)
                changed = len(batch.input_ids) != num_tokens
                num_tokens = len(batch.input_ids)
                if number:  # in the first round kernels are built
                    taken.setdefault((step, changed), []).append(took_ms)
    return [
        Sample(StepShape.of(step, changed=changed), statistics.median(times))
        for (step, changed), times in taken.items()
    ]


def machine() -> str:
    """The name of the processor and the number of threads."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return f"{model or platform.machine()}, {len(usable_cpus())} threads"


def main() -> None:
    """Measure, fit, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(usable_cpus()))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    samples = measured(args.model_dir, args.rounds, args.threads)
    random.Random(2).shuffle(samples)
    cut = len(samples) * 3 // 4
    errors = errors_of(fitted(samples[:cut], KNOTS), samples[cut:])
    median, p90 = statistics.median(errors), errors[int(0.9 * len(errors))]
    cost = msgspec.structs.replace(
        fitted(samples, KNOTS),
        model=args.model_dir.resolve().name,
        machine=machine(),
        median_error=round(median, 3),
        p90_error=round(p90, 3),
    )
    for shape, ms in sorted(samples, key=lambda sample: sample.ms):
        print(f"{ms:9.2f} ms, fit {cost.milliseconds(shape):9.2f}   {shape}")
    print(f"error on unseen shapes: median {median:.1%}, 90th percentile {p90:.1%}, worst {errors[-1]:.1%}")
    print(cost)
    if args.out:
        args.out.write_bytes(msgspec.json.format(msgspec.json.encode(cost), indent=2) + b"\n")


if __name__ == "__main__":
    main()
