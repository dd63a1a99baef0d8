"""Requests that give up blocks beside a tier that is slow, has only a part, or breaks off: each gets the answer that it
gets alone in an ample pool.

Blocks leave the pool for the tier and come back, for requests and in takeovers. There are several choices of a prompt,
priorities, cancels and preemptions. Time is made up, so a seed always does the same. HEADRACE_SOAK=1 runs 300 seeds
instead of 6.
"""

from __future__ import annotations

import os
import random

import numpy as np
import numpy.typing as npt
import pytest

from headrace.worker.engine.fetching import Fetching
from headrace.worker.kv.chain import Content
from headrace.worker.kv.fetch import NO_SLOT, ChainedBlock, Fetch
from headrace.worker.kv.takeover import Offer, Takeover
from headrace.worker.request.eviction import Aggregation, Eviction, EvictionRule
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from tests.worker.kv.groups.test_evicting import BLOCK_SIZE, RULE, VOCAB_SIZE, LayeredRunner, Load, alone, answer

SEEDS = 300 if os.environ.get("HEADRACE_SOAK") == "1" else 6
NUM_PROMPTS = 8
MOST_TURNS = 20_000


class RandomTier:
    """Has the blocks that were evicted. Reads at most one block of each fetch a tick, and now and then breaks off. Says
    that it is fast, so that requests always wait for it."""

    has_news = False
    num_slots = num_blocks = 1
    bytes_per_s = 1.0
    num_written = num_not_written = num_read = 0

    def __init__(self, runner: LayeredRunner, rng: random.Random) -> None:
        self.stored: dict[int, tuple[Content, npt.NDArray[np.int64]]] = {}
        self.num_fetches = 0
        self._parts = runner.parts
        self._rng = rng
        self._running: list[Fetch] = []
        self._delays: dict[Fetch, int] = {}
        self._ended: list[Fetch] = []

    @property
    def is_idle(self) -> bool:
        return not self._running and not self._ended

    def spill(self, block: int, slot: int, content: Content) -> None:
        if content.block_hash is not None:
            assert slot == NO_SLOT
            self.stored[content.block_hash] = content, self._parts[:, block].copy()

    def spill_part(self, slot: int, content: Content) -> None:
        raise AssertionError("blocks have no parts here")

    def has(self, block_hash: int) -> bool:
        return block_hash in self.stored

    def has_part(self, block_hash: int) -> bool:
        return self.has(block_hash)

    def take_changes(self) -> dict[int, bool]:
        return {}

    def expected_s(self, num_blocks: int) -> float:
        return 1e-9 * num_blocks

    def fetch(self, fetch: Fetch) -> None:
        self.num_fetches += 1
        self._running.append(fetch)
        self._delays[fetch] = self._rng.randrange(12)

    def take_ended(self) -> list[Fetch]:
        ended, self._ended = self._ended, []
        return ended

    def tick(self) -> None:
        for fetch in list(self._running):
            if self._delays[fetch] > 0 and self._rng.random() < 0.7:
                self._delays[fetch] -= 1
            elif fetch.is_given_up or self._rng.random() < 0.05 or not self._read_one(fetch):
                self._running.remove(fetch)
                self._ended.append(fetch)

    def _read_one(self, fetch: Fetch) -> bool:
        """Fill the next block. Returns False if there is none or it is not here."""
        if fetch.num_read == len(fetch.wanted):
            return False
        wanted = fetch.wanted[fetch.num_read]
        if wanted.block_hash not in self.stored:
            return False
        content, parts = self.stored[wanted.block_hash]
        assert wanted.token_bytes in (b"", content.token_bytes)
        self._parts[:, wanted.block] = parts
        fetch.wanted[fetch.num_read] = wanted._replace(token_bytes=content.token_bytes)
        fetch.num_read += 1
        return True


class RandomLoad:
    """Prompts that come at random times to an engine with a small pool, steps of a random size, and the tier."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.load = Load(rng.choice([14, 20, 30]), rng.choice([16, 20, 64]), self._make_tier)
        self.scheduler = self.load.engine.scheduler
        self.pool = self.load.kv_cache.pool
        self.takeover = Takeover(self.scheduler.kv_cache, self.tier)
        self.fetching = Fetching(self.scheduler, self.tier, clock=lambda: self._now_s, takeover=self.takeover)
        self.kept: list[Request] = []
        """The requests that were not cancelled."""
        self.offers: list[Offer] = []
        self._now_s = 0.0
        # With long ones, patience often ends before the tier has answered.
        self._pauses_s = rng.choice([[0.001, 0.01], [0.01, 0.05, 0.3]])
        self._common = [rng.randrange(VOCAB_SIZE) for _ in range(40)]

    def _make_tier(self, runner: LayeredRunner) -> RandomTier:
        self.tier = RandomTier(runner, self.rng)
        return self.tier

    def turn(self) -> None:
        self._add_ready()
        self.load.step(self.fetching.begin_late)
        self._now_s += self.rng.choice(self._pauses_s)
        for _ in range(self.rng.randrange(4)):
            self.tier.tick()
        self._add_ready()
        self.scheduler.check()
        if self.tier.stored and self.rng.random() < 0.1:
            self._offer()

    def arrive(self) -> None:
        """Send a prompt with one or three choices, unless it cannot fit."""
        rng = self.rng
        if rng.random() < 0.6:
            tail = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(12))]
            prompt = self._common[: rng.randrange(6, 40)] + tail
        else:
            prompt = [rng.randrange(VOCAB_SIZE) for _ in range(3)] * rng.randrange(1, 15)
        rule = rng.choice([RULE, RULE._replace(aggregation=Aggregation.SUM), None])
        max_tokens = rng.randrange(1, 16 if rule is None else 90)
        if len(prompt) + (max_tokens if rule is None else 1) > self.pool.num_blocks * BLOCK_SIZE - 4:
            return
        for _ in range(rng.choice([1, 1, 1, 3])):
            self._begin(prompt, max_tokens, rule)

    def cancel_one(self) -> None:
        request = self.kept.pop(self.rng.randrange(len(self.kept)))
        if not self.fetching.cancel(request):
            self.scheduler.cancel(request)
        self.scheduler.check()

    def run(self) -> None:
        for _ in range(MOST_TURNS):
            if self._is_done:
                return
            self.turn()
        pytest.fail("some requests do not end")

    @property
    def _is_done(self) -> bool:
        is_idle = not (self.scheduler.has_requests or self.fetching.num_held) and self.tier.is_idle
        return is_idle and all(offer.ended.done() for offer in self.offers)

    def _begin(self, prompt: list[int], max_tokens: int, rule: EvictionRule | None) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        request = Request("r", list(prompt), sampling, 1, priority=self.rng.choice([0, 0, 1]))
        request.eviction = None if rule is None else Eviction(rule)
        self.kept.append(request)
        if not self.fetching.begin(request):
            self.scheduler.add(request)

    def _add_ready(self) -> None:
        for request in self.fetching.take_ready():
            self.scheduler.add(request)

    def _offer(self) -> None:
        """Have another worker hand over a block that was evicted, with what is in front of it."""
        content = self.rng.choice([content for content, _ in self.tier.stored.values()])
        chain: list[ChainedBlock] = []
        while True:
            assert content.block_hash is not None
            chain.append(ChainedBlock(content.block_hash, content.parent_hash, content.is_first))
            if content.is_first or content.parent_hash not in self.tier.stored:
                break
            content = self.tier.stored[content.parent_hash][0]
        self.offers.append(Offer("another worker", chain[::-1], 1.0))
        self.takeover.offer(self.offers[-1])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_requests_that_give_up_blocks_get_their_tokens_beside_a_tier_that_fails(seed: int) -> None:
    rng = random.Random(seed)
    worker = RandomLoad(rng)
    for _ in range(NUM_PROMPTS):
        worker.arrive()
        for _ in range(rng.randrange(25)):
            worker.turn()
        if worker.kept and rng.random() < 0.3:
            worker.cancel_one()
    worker.run()
    assert worker.pool.num_free_blocks == worker.pool.num_blocks
    assert worker.tier.num_fetches
    for request in worker.kept:
        prompt = request.token_ids[: request.num_prompt_tokens].tolist()
        rule = None if request.eviction is None else request.eviction.rule
        assert answer(request) == alone(prompt, request.sampling.max_tokens, rule)
