"""The worker's engine against openvino-genai's ContinuousBatchingPipeline: same IR, kernels, blocks and token budget.

    python -m benchmarks.engine.throughput MODEL_DIR [--pairs 5] [--case closed sampled mixed poisson behind identical]
        [--requests 1 8 32 64] [--tokens 256] [--our-tokens N] [--our-mixed-tokens N] [--our-tpot-ms MS]
        [--their-tokens N] [--their-whole-prompts] [--one-graph]

Each side is a process of its own and both stay up; they take turns on the same workload, and each pair gives a ratio.

    closed     N requests of 128 random tokens at once, 64 out: N of --requests              output tokens/s
    sampled    the same, drawn at temperature 0.8 from the nucleus of 0.95         output tokens/s
    mixed      200 requests at once, log-normal prompts around 200, exponential outputs of mean 128
    poisson    the same lengths, arriving at 80 % of the peer's rate in `mixed`              p95 TTFT, time per token
    behind     twenty 50-token prompts behind one of 4,000                                   p95 TTFT of the twenty
    identical  sixteen identical prompts of 1,000 tokens at once                             p95 TTFT
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Generic, TypeVar
from zlib import crc32

import numpy as np

from benchmarks.engine.sides import EngineSettings, Job, JobTimes, side_process

Run = tuple[float, list[JobTimes]]
"""The seconds of a workload, and the times of its jobs."""
_Run = TypeVar("_Run")

VOCAB = (100, 49_000)
NAMES = ("headrace", "openvino-genai")


class Peers:
    """Both sides, up and waiting."""

    def __init__(self, settings: dict[str, EngineSettings]) -> None:
        context = get_context("spawn")
        self._pipes = {}
        for name in NAMES:
            pipe, other_end = context.Pipe()
            context.Process(target=side_process, args=(name, settings[name], other_end), daemon=True).start()
            self._pipes[name] = pipe
            assert pipe.recv() == "ready"

    def run(self, name: str, jobs: Sequence[Job]) -> Run:
        """Run a workload on one side while the other is idle."""
        self._pipes[name].send(jobs)
        answer: Run = self._pipes[name].recv()
        return answer

    def close(self) -> None:
        """End both processes."""
        for pipe in self._pipes.values():
            pipe.send(None)


@dataclass(frozen=True, slots=True)
class Pair(Generic[_Run]):
    """The two outcomes of one workload."""

    ours: _Run
    theirs: _Run


def pairs_of(
    peers: Peers, case: str, make: Callable[[np.random.Generator, int], list[Job]], count: int
) -> list[Pair[Run]]:
    """`count` pairs after a warm-up pair. Each run gets fresh tokens, so that it cannot use the cache of an earlier
    one. `make` also gets the number of the pair, so that each pair may have its own load, the same for both sides."""
    pairs = []
    for number in range(count + 1):
        runs = {}
        for position, name in enumerate(NAMES if number % 2 else NAMES[::-1]):
            rng = np.random.default_rng([crc32(case.encode()), number, position])
            runs[name] = peers.run(name, make(rng, number))
        if number:
            pairs.append(Pair(runs["headrace"], runs["openvino-genai"]))
    return pairs


def prompt_of(rng: np.random.Generator, length: int) -> list[int]:
    """Random tokens."""
    tokens: list[int] = rng.integers(*VOCAB, length).tolist()
    return tokens


def conversation(index: int) -> tuple[int, int]:
    """Prompt and output length as in conversations; the same for the same index on both sides."""
    shape = np.random.default_rng(index)
    prompt = int(np.clip(shape.lognormal(np.log(200), 0.8), 8, 2000))
    return prompt, int(np.clip(shape.exponential(128), 4, 600))


def rate(run: Run) -> float:
    """Output tokens per second."""
    return sum(times.num_tokens for times in run[1]) / run[0]


def p95_ttft(run: Run) -> float:
    """The 95th percentile of the time to the first token, in milliseconds."""
    return 1000 * float(np.percentile([times.ttft_s for times in run[1]], 95))


def tpot(run: Run) -> float:
    """Mean time per output token after the first, in milliseconds."""
    return 1000 * statistics.fmean(
        (times.total_s - times.ttft_s) / (times.num_tokens - 1) for times in run[1] if times.num_tokens > 1
    )


def report(name: str, unit: str, pairs: Sequence[Pair[_Run]], figure: Callable[[_Run], float]) -> float:
    """Print medians and the ratio ours/theirs with its spread. Returns the median of theirs."""
    ours = [figure(pair.ours) for pair in pairs]
    theirs = [figure(pair.theirs) for pair in pairs]
    ratios = sorted(mine / other for mine, other in zip(ours, theirs, strict=True))
    print(
        f"{name}: headrace {statistics.median(ours):.1f}, openvino-genai {statistics.median(theirs):.1f} {unit}, "
        f"ratio {statistics.median(ratios):.3f} (min {ratios[0]:.3f}, max {ratios[-1]:.3f}, {len(pairs)} pairs)",
        flush=True,
    )
    return statistics.median(theirs)


def run_closed(
    peers: Peers,
    pairs: int,
    requests: Sequence[int],
    case: str = "closed",
    temperature: float = 0.0,
    top_p: float = 1.0,
) -> None:
    """Saturated, equal lengths."""
    for number in requests:

        def jobs(rng: np.random.Generator, _: int, number: int = number) -> list[Job]:
            return [Job(0.0, prompt_of(rng, 128), 64, temperature, top_p) for _ in range(number)]

        report(f"{case} {number}", "output tokens/s", pairs_of(peers, f"{case} {number}", jobs, pairs), rate)


def run_sampled(peers: Peers, pairs: int, requests: Sequence[int]) -> None:
    """The same load as `closed`, with random sampling."""
    run_closed(peers, pairs, requests, "sampled", temperature=0.8, top_p=0.95)


def mixed_jobs(rng: np.random.Generator, count: int, per_s: float | None, load: int = 0) -> list[Job]:
    """Conversations that arrive all at once or as a Poisson process. Lengths and times depend on `load`."""
    gaps_s = np.zeros(count) if per_s is None else np.random.default_rng([7, load]).exponential(1 / per_s, count)
    arrivals = np.cumsum(gaps_s)
    jobs = []
    for index in range(count):
        prompt, output = conversation(load * count + index)
        jobs.append(Job(float(arrivals[index]), prompt_of(rng, prompt), output))
    return jobs


def run_mixed(peers: Peers, pairs: int) -> None:
    """Saturated, lengths as in conversations."""
    report("mixed", "output tokens/s", pairs_of(peers, "mixed", lambda rng, _: mixed_jobs(rng, 200, None), pairs), rate)


def run_poisson(peers: Peers, pairs: int) -> None:
    """An open loop at 80 % of the peer's capacity. Each pair has its own lengths and times, because these have the
    largest effect on the result."""
    seconds, times = peers.run("openvino-genai", mixed_jobs(np.random.default_rng(99), 120, None))
    per_s = 0.8 * len(times) / seconds
    print(f"poisson: {per_s:.2f} requests/s")
    runs = pairs_of(peers, "poisson", lambda rng, number: mixed_jobs(rng, 120, per_s, number), pairs)
    report("poisson p95 TTFT", "ms", runs, p95_ttft)
    report("poisson time per output token", "ms", runs, tpot)


def run_behind(peers: Peers, pairs: int) -> None:
    """Short prompts after a long one."""

    def jobs(rng: np.random.Generator, _: int) -> list[Job]:
        return [Job(0.0, prompt_of(rng, 4000), 8), *(Job(0.0, prompt_of(rng, 50), 8) for _ in range(20))]

    report("behind p95 TTFT", "ms", pairs_of(peers, "behind", jobs, pairs), lambda run: p95_ttft((run[0], run[1][1:])))


def run_identical(peers: Peers, pairs: int) -> None:
    """Sixteen times the same prompt."""

    def jobs(rng: np.random.Generator, _: int) -> list[Job]:
        prompt = prompt_of(rng, 1000)
        return [Job(0.0, prompt, 8) for _ in range(16)]

    report("identical p95 TTFT", "ms", pairs_of(peers, "identical", jobs, pairs), p95_ttft)


OF_REQUESTS = {"closed": run_closed, "sampled": run_sampled}
CASES = {
    "mixed": run_mixed,
    "poisson": run_poisson,
    "behind": run_behind,
    "identical": run_identical,
}
ALL_CASES = [*OF_REQUESTS, *CASES]


def main() -> None:
    """Parse and run the cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--case", nargs="+", choices=ALL_CASES, default=ALL_CASES)
    parser.add_argument(
        "--requests", type=int, nargs="+", default=[1, 8, 32, 64], help="at once, in closed and sampled"
    )
    parser.add_argument("--blocks", type=int, default=4000)
    parser.add_argument("--tokens", type=int, default=256, help="in a step, of both sides")
    parser.add_argument("--our-tokens", type=int, help="by default --tokens, or as many as are exact on this CPU")
    parser.add_argument("--our-mixed-tokens", type=int, help="in a step that streams have a part in; by default 256")
    parser.add_argument("--our-tpot-ms", type=float, help="the worker's --target-tpot-ms; by default its own choice")
    parser.add_argument("--their-tokens", type=int)
    parser.add_argument("--their-whole-prompts", action="store_true", help="the peer without dynamic_split_fuse")
    parser.add_argument("--one-graph", action="store_true", help="us without a graph of its own for small decode steps")
    args = parser.parse_args()
    of_both = EngineSettings(args.model_dir, args.blocks, max_num_batched_tokens=args.tokens)
    ours = replace(
        of_both,
        max_num_batched_tokens=args.our_tokens or args.tokens,
        stays_exact=args.our_tokens is None,
        max_num_mixed_tokens=args.our_mixed_tokens,
        target_step_ms=args.our_tpot_ms,
        decode_graph=False if args.one_graph else None,
    )
    theirs = replace(
        of_both,
        max_num_batched_tokens=args.their_tokens or args.tokens,
        split_prompts=not args.their_whole_prompts,
    )
    peers = Peers({"headrace": ours, "openvino-genai": theirs})
    for case in args.case:
        if case in OF_REQUESTS:
            OF_REQUESTS[case](peers, args.pairs, args.requests)
        else:
            CASES[case](peers, args.pairs)
    peers.close()


if __name__ == "__main__":
    main()
