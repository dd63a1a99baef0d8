"""Compares the time of one placement with a Rust selector's: `python -m benchmarks.router.decision [--decisions 1000]`.

Workload: 64 workers, an index of a million entries, and prompts of 512 blocks of 32 tokens, a random part of which is
cached at one to four workers. Our time includes the match of the prompt and the cost at all workers, the prediction of
the new blocks, and the booking. The peer's time is `select_and_reserve` of ai-dynamo-runtime's SelectionService with
precomputed hashes (extra `bench`; skipped if not installed). Both sides have the same chains at the same workers and
get the same prompts in turn. The time to hash a prompt is measured separately, because it occurs once per request and
depends on the prompt, not on the fleet.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.router.peer import DynamoSelection, Tokens
from headrace.protos.block_hash import block_hashes, root_hash
from headrace.protos.load_report import LoadReport
from headrace.router.placement.bookings import Bookings
from headrace.router.placement.candidates import Candidate, Candidates, CandidateTable
from headrace.router.placement.policy import RequestFacts, place
from headrace.router.placement.prefix_index import PrefixIndex

NUM_WORKERS = 64
NUM_ENTRIES = 1_000_000
NUM_BLOCKS = 512
BLOCK_SIZE = 32
PROMPT_TOKENS = NUM_BLOCKS * BLOCK_SIZE
# Decisions in a row whose medians make one ratio.
ROUND = 100


@dataclass(frozen=True, slots=True)
class Chain:
    """A prompt that is cached: its tokens, its hashes, and how many of its blocks which worker holds."""

    tokens: Tokens
    hashes: list[int]
    held: dict[int, int]


class Headrace:
    """Our side: index, policy and bookings."""

    def __init__(self, rng: random.Random) -> None:
        self.workers = [f"10.0.0.{number}:50051" for number in range(NUM_WORKERS)]
        self.index = PrefixIndex(2 * NUM_ENTRIES, NUM_ENTRIES // 4, prediction_ttl_s=30.0)
        for worker in self.workers:
            self.index.add_worker(worker)
        self._table = CandidateTable()
        self._slots = np.array([self.index.add_worker(worker) for worker in self.workers])
        self._numbers = {worker: number for number, worker in enumerate(self.workers)}
        for slot, worker in zip(self._slots, self.workers, strict=True):
            self._table.put(int(slot), candidate(worker, rng))
        self._bookings = {worker: Bookings() for worker in self.workers}
        self._rng = rng

    def decide(self, prompt: list[int], now_s: float) -> tuple[float, float]:
        """Seconds of one decision, and of the match within it."""
        facts = RequestFacts(PROMPT_TOKENS, 128)
        began = time.perf_counter()
        blocks = self.index.depths(prompt)[self._slots]
        matched = time.perf_counter()
        candidates = Candidates(self.workers, self._numbers, self._table.at(self._slots))
        placement = place(facts, candidates, blocks, 0.0, self._rng)
        assert placement is not None
        worker, cached = placement.worker_id, int(blocks[placement.number])
        booking = self._bookings[worker].book(PROMPT_TOKENS - placement.predicted_cached_tokens, len(prompt), now_s)
        self.index.predict(worker, prompt, cached, now_s)
        ended = time.perf_counter()
        self._bookings[worker].release(booking)
        self.index.expire(now_s)
        return ended - began, matched - began


def made_chains(rng: random.Random) -> list[Chain]:
    """Chains at one to four workers each, with NUM_ENTRIES entries in all."""
    source = np.random.default_rng(rng.getrandbits(32))
    chains: list[Chain] = []
    num_entries = 0
    while num_entries < NUM_ENTRIES:
        tokens = source.integers(0, 49_152, PROMPT_TOKENS, np.uint32)
        held = {worker: rng.randint(1, NUM_BLOCKS) for worker in rng.sample(range(NUM_WORKERS), rng.randint(1, 4))}
        chains.append(Chain(tokens, block_hashes(root_hash("m"), tokens.tolist(), BLOCK_SIZE), held))
        num_entries += sum(held.values())
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


async def started_peer(chains: list[Chain]) -> DynamoSelection | None:
    """The peer with all chains, or None if it is not installed."""
    try:
        peer = DynamoSelection(NUM_WORKERS, BLOCK_SIZE)
    except ImportError as error:
        print(f"without the peer: {error}; install ai-dynamo-runtime and pyzmq (extra bench)")
        return None
    await peer.start()
    for chain in chains:
        for worker, depth in chain.held.items():
            peer.store(worker, chain.hashes[:depth], chain.tokens[: depth * BLOCK_SIZE])
        await asyncio.sleep(0)
    last_at = {worker: chain for chain in chains for worker in chain.held}
    for worker, chain in last_at.items():
        await peer.until_stored(worker, chain.tokens[: chain.held[worker] * BLOCK_SIZE])
    return peer


async def compare(num_decisions: int) -> None:
    """Fill both sides, query them in turn, and print the results."""
    rng = random.Random(1)
    ours = Headrace(rng)
    chains = made_chains(rng)
    for chain in chains:
        for worker, depth in chain.held.items():
            ours.index.store(ours.workers[worker], chain.hashes[:depth])
    peer = await started_peer(chains)
    source = np.random.default_rng(2)
    whole, match, theirs = [], [], []
    for number in range(num_decisions):
        shared = rng.choice(chains)
        cut = rng.randrange(NUM_BLOCKS + 1) * BLOCK_SIZE
        tokens = [*shared.tokens[:cut].tolist(), *source.integers(0, 49_152, PROMPT_TOKENS - cut).tolist()]
        hashes = block_hashes(root_hash("m"), tokens, BLOCK_SIZE)
        asked = None if peer is None else await peer.prompt(tokens)
        if asked is not None and peer is not None and number % 2:
            theirs.append((await peer.decide(asked))[0])
        seconds, matched = ours.decide(hashes, float(number))
        whole.append(seconds)
        match.append(matched)
        if asked is not None and peer is not None and not number % 2:
            theirs.append((await peer.decide(asked))[0])
    print(f"{NUM_WORKERS} workers, {len(ours.index)} entries, prompts of {NUM_BLOCKS} blocks of {BLOCK_SIZE} tokens")
    report("headrace", whole)
    report("  of which match", match)
    if peer is not None:
        report("ai-dynamo-runtime", theirs)
        report_ratio(whole, theirs)
        peer.close()
    hashing = []
    for _ in range(200):
        began = time.perf_counter()
        block_hashes(root_hash("m"), tokens, BLOCK_SIZE)
        hashing.append(time.perf_counter() - began)
    report("hashing", hashing)


def report(name: str, seconds: list[float]) -> None:
    """Print the median and the 99th percentile in microseconds."""
    centiles = statistics.quantiles(seconds, n=100)
    print(f"{name:18} p50 {statistics.median(seconds) * 1e6:6.0f} us   p99 {centiles[98] * 1e6:6.0f} us")


def report_ratio(ours: list[float], theirs: list[float]) -> None:
    """Print ours over theirs: medians of rounds, with their spread."""
    rounds = range(0, len(ours) - ROUND + 1, ROUND)
    ratios = sorted(
        statistics.median(ours[start : start + ROUND]) / statistics.median(theirs[start : start + ROUND])
        for start in rounds
    )
    if ratios:
        print(f"ratio of p50       {statistics.median(ratios):.2f} (min {ratios[0]:.2f}, max {ratios[-1]:.2f})")


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decisions", type=int, default=1000)
    asyncio.run(compare(parser.parse_args().decisions))


if __name__ == "__main__":
    main()
