"""Time of one placement: `python -m benchmarks.router_decision`.

Workload: 64 workers, an index of a million entries, prompts of 512 blocks of which a random part is cached at one to
four workers. Timed: the match of the prompt against all workers, the weighing of all workers, and the prediction of the
blocks that are new at the chosen one. The hashing of the prompt is timed beside it, since it is done once per request
and grows with the prompt, not with the fleet.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable

from headrace.protos.block_hash import block_hashes, root_hash
from headrace.router.policy import Candidate, LoadReport, RequestFacts, place
from headrace.router.prefix_index import PrefixIndex

NUM_WORKERS = 64
NUM_ENTRIES = 1_000_000
NUM_BLOCKS = 512
BLOCK_SIZE = 32
NUM_DECISIONS = 2000


def main() -> None:
    """Print p50 and p99 of each part in microseconds."""
    rng = random.Random(1)
    workers = [f"10.0.0.{number}:50051" for number in range(NUM_WORKERS)]
    index = PrefixIndex(2 * NUM_ENTRIES, NUM_ENTRIES // 4, prediction_ttl_s=30.0)
    for worker in workers:
        index.add_worker(worker)
    chains = filled(index, workers, rng)
    candidates = [candidate(worker, rng) for worker in workers]
    whole, match = [], []
    for number in range(NUM_DECISIONS):
        shared = rng.choice(chains)
        cut = rng.randrange(NUM_BLOCKS + 1)
        prompt = shared[:cut] + [rng.getrandbits(64) for _ in range(NUM_BLOCKS - cut)]
        facts = RequestFacts(NUM_BLOCKS * BLOCK_SIZE, 128)
        began = time.perf_counter()
        blocks = index.match(prompt, workers)
        matched = time.perf_counter()
        placement = place(facts, candidates, blocks, 0.0, rng)
        assert placement is not None
        index.predict(placement.worker_id, prompt[blocks[placement.worker_id] :], float(number))
        ended = time.perf_counter()
        index.expire(float(number))
        whole.append(ended - began)
        match.append(matched - began)
    tokens = [rng.randrange(49152) for _ in range(NUM_BLOCKS * BLOCK_SIZE)]
    print(f"{NUM_WORKERS} workers, {len(index)} entries, prompts of {NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens")
    report("decision", whole)
    report("  of which match", match)
    report("hashing", [timed(lambda: block_hashes(root_hash("m"), tokens, BLOCK_SIZE)) for _ in range(200)])


def filled(index: PrefixIndex, workers: list[str], rng: random.Random) -> list[list[int]]:
    """Chains in the index, each at one to four workers, until it has its entries."""
    chains = []
    while len(index) < NUM_ENTRIES:
        chain = [rng.getrandbits(64) for _ in range(NUM_BLOCKS)]
        chains.append(chain)
        for worker in rng.sample(workers, rng.randint(1, 4)):
            index.store(worker, chain[: rng.randint(1, NUM_BLOCKS)])
    return chains


def candidate(worker: str, rng: random.Random) -> Candidate:
    """A worker under some load."""
    load = LoadReport(
        num_running=rng.randrange(16),
        num_uncached_tokens=rng.randrange(4000),
        num_blocks=20_000,
        num_free_blocks=rng.randrange(5_000, 20_000),
        num_cached_blocks=rng.randrange(15_000),
        prefill_tokens_per_s=rng.uniform(500, 1500),
        decode_step_ms=rng.uniform(20, 40),
        max_num_seqs=64,
    )
    return Candidate(worker, load, BLOCK_SIZE)


def timed(work: Callable[[], object]) -> float:
    """Seconds that the work takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def report(name: str, seconds: list[float]) -> None:
    """Print the median and the 99th percentile in microseconds."""
    centiles = statistics.quantiles(seconds, n=100)
    print(f"{name:18} p50 {statistics.median(seconds) * 1e6:6.0f} us   p99 {centiles[98] * 1e6:6.0f} us")


if __name__ == "__main__":
    main()
