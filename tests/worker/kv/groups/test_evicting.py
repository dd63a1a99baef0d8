"""Requests that give up blocks, over a runner that keeps each layer's tokens and derives everything from them.

The next token depends on what every layer still holds. So a wrong table, a part that was not moved, a lost or shared
block and another choice of blocks all give other tokens than the request gets alone in an ample pool.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest

from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.engine.scheduler import FetchFirst
from headrace.worker.kv.fetch import Persistence, Spill
from headrace.worker.kv.groups.evicting import EvictionBudget
from headrace.worker.model.batch import Batch
from headrace.worker.model.scored import add_scores, tables_of
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.eviction import Aggregation, Eviction, EvictionRule
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from tests.worker.conftest import CHEAP_STEPS
from tests.worker.fake_runner import EMPTY, next_token

LAYERS, BLOCK_SIZE, VOCAB_SIZE = 3, 4, 251
RULE = EvictionRule(24, start_size=4, recent_size=8)
SEEDS = 200 if os.environ.get("HEADRACE_SOAK") else 6
MOST_BLOCKS = RULE.max_cache_size // BLOCK_SIZE + 1
IntArray = npt.NDArray[np.int64]


class LayeredRunner:
    """Blocks have a part for each layer, which stores tokens with their positions. Padding goes to the last block."""

    def __init__(self, num_blocks: int) -> None:
        self.parts = np.full((LAYERS, num_blocks + 1, BLOCK_SIZE), EMPTY, np.int64)
        self.vocab_size, self.block_size = VOCAB_SIZE, BLOCK_SIZE
        self.infer_s, self.small_decode, self.least_decode = 0.0, 0, 1
        self.num_tokens = 0
        self._batch: Batch | None = None

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        del keeps_logits
        self._batch = batch

    def run(self) -> Logits:
        batch = self._batch
        assert batch is not None
        for source, destination in batch.copies:
            self.parts[:, destination] = self.parts[:, source]
        for sources, destinations in batch.moves:
            for layer, part in enumerate(self.parts):
                part[destinations] = part[sources[layer]]
        spans = [range(*span) for span in zip(batch.subsequence_begins, batch.subsequence_begins[1:], strict=False)]
        tables = tables_of(batch.block_indices, batch.block_tables, LAYERS)
        begins = batch.block_indices_begins
        for number, span in enumerate(spans):
            self._store(batch, span, int(batch.past_lens[number]), tables[:, begins[number] : begins[number + 1]])
        scores, contexts = [], []
        for number, span in enumerate(spans):
            table = tables[:, begins[number] : begins[number + 1]]
            end = int(batch.past_lens[number]) + len(span)
            context = np.stack([part[row].reshape(-1)[:end] for part, row in zip(self.parts, table, strict=True)])
            contexts.append(context)
            queries = next((scored.num_queries for scored in batch.scored if scored.sequence == number), 1)
            scores.append(sum(_attention(context[:, : end - back], end) for back in range(queries)))
        add_scores(batch.scored, batch.past_lens, batch.subsequence_begins, np.concatenate(scores, axis=1))
        logits = np.zeros((len(batch.sampled), VOCAB_SIZE), np.float32)
        for row, index in enumerate(batch.sampled_tokens_indices.tolist()):
            number = next(number for number, span in enumerate(spans) if index in span)
            assert EMPTY not in contexts[number], "a token was never computed"
            logits[row, next_token(contexts[number].reshape(-1).tolist(), VOCAB_SIZE)] = 1.0
        return Logits(logits)

    def _store(self, batch: Batch, span: range, past: int, table: npt.NDArray[np.int32]) -> None:
        assert table.shape[1] == -(-(past + len(span)) // BLOCK_SIZE)
        for offset, index in enumerate(span, past):
            values = VOCAB_SIZE * int(batch.position_ids[index]) + int(batch.input_ids[index])
            for layer in range(LAYERS):
                self.parts[layer, table[layer, offset // BLOCK_SIZE], offset % BLOCK_SIZE] = values
        self.num_tokens += len(span)


def _attention(context: IntArray, width: int) -> npt.NDArray[np.float32]:
    """What the last token of a context gives to each of its tokens, in each layer: multiples of 1/1024, so that sums
    are exact. Zeros fill up `width`."""
    layers = np.arange(1, LAYERS + 1)[:, None]
    mixed = (context * 7919 + context[:, -1:] * 104729 + layers * 613) % 1021
    return np.pad(mixed.astype(np.float32) / 1024, ((0, 0), (0, width - context.shape[1])))


class Load:
    """An engine over the runner, whose requests are checked after every step."""

    def __init__(self, num_blocks: int, budget: int = 32, tier: Callable[[LayeredRunner], Spill] | None = None) -> None:
        self.runner = LayeredRunner(num_blocks)
        spill = None if tier is None else tier(self.runner)
        limits = StepLimits(6, budget, budget, is_exact=True)
        self.engine: Engine = build_engine(
            self.runner,
            BatchSampler(),
            num_blocks,
            limits,
            step_costs=CHEAP_STEPS,
            persistence=Persistence(spill=spill),
            groups=[EvictionBudget()],
        )
        self.kv_cache = self.engine.scheduler.kv_cache

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        rule: EvictionRule | None = RULE,
        resume: Sequence[int] = (),
        priority: int = 0,
    ) -> Request:
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        request = Request("r", list(prompt), sampling, 1, resume_token_ids=resume, priority=priority)
        request.eviction = None if rule is None else Eviction(rule)
        self.engine.scheduler.add(request)
        return request

    def step(self, fetch_first: FetchFirst | None = None) -> None:
        self.engine.step(fetch_first)
        self.engine.scheduler.check()
        for request in self.engine.scheduler.running:
            if request.eviction is not None and request.eviction.tables is not None:
                assert len(request.block_table) == MOST_BLOCKS
                held = set(request.block_table)
                assert all(set(row) == held for row in request.eviction.tables.tolist())
                assert all(self.kv_cache.pool.num_held_once([block]) for block in held)
                assert request.num_findable_blocks == 0

    def run(self) -> None:
        while self.engine.scheduler.has_requests:
            self.step()
        assert self.kv_cache.pool.num_free_blocks == self.kv_cache.pool.num_blocks


def answer(request: Request) -> list[int]:
    return list(request.token_ids[request.num_prompt_tokens :])


def alone(prompt: Sequence[int], max_tokens: int, rule: EvictionRule | None = RULE) -> list[int]:
    """The answer that a request gets in an ample pool."""
    load = Load(200, budget=200)
    request = load.add(prompt, max_tokens, rule)
    load.run()
    return answer(request)


def test_an_answer_many_times_longer_than_the_pool_stays_within_the_maximum() -> None:
    load = Load(MOST_BLOCKS + 1)
    request = load.add([1, 2, 3], 600)
    load.run()
    assert len(answer(request)) == 600
    assert answer(request) == alone([1, 2, 3], 600)
    assert load.kv_cache.counters()["blocks_given_up"] == (602 - RULE.max_cache_size) // BLOCK_SIZE


def test_blocks_are_lost_only_after_the_first_token_of_the_answer() -> None:
    prompt = list(range(90))
    load = Load(40)
    request = load.add(prompt, 40)
    while not request.num_generated_tokens:
        load.step()
    assert request.num_kv_tokens == 90
    load.step()
    assert request.num_kv_tokens == RULE.max_cache_size + 91 % BLOCK_SIZE
    load.run()
    assert answer(request) == alone(prompt, 40)
    assert answer(request) != alone(prompt, 40, None)


def test_prompts_are_shared_until_blocks_are_lost_and_never_after() -> None:
    prompt = list(range(1, 62))
    load = Load(60)
    first = load.add(prompt, 100)
    load.run()
    findable = frozenset(load.kv_cache.pool._block_of_hash)
    # The prompt's blocks; the first token of the answer is in the block that the prompt has begun.
    assert len(findable) == 61 // BLOCK_SIZE
    before = load.runner.num_tokens
    second, plain = load.add(prompt, 100), load.add(prompt, 20, None)
    load.run()
    assert answer(second) == answer(first) == alone(prompt, 100)
    assert answer(plain) == alone(prompt, 20, None)
    assert second.num_cached_tokens >= 61 - 8 - BLOCK_SIZE
    assert load.runner.num_tokens - before < 61 + 100 + 20


@pytest.mark.parametrize("num_prompt", [3, 10, 20, 61])
def test_choices_of_one_prompt_wait_for_it_once_and_not_for_one_another(num_prompt: int) -> None:
    load = Load(100, budget=64)
    choices = [load.add(range(num_prompt), 3) for _ in range(6)]
    for _ in range(2):
        load.step()
    assert all(choice.num_generated_tokens for choice in choices)
    load.run()
    assert all(answer(choice) == alone(range(num_prompt), 3) for choice in choices)


@pytest.mark.parametrize("num_resumed", [1, 2, 13, 37, 150])
@pytest.mark.parametrize("num_prompt", [3, 27, 61])
def test_a_resumed_answer_goes_on_as_if_nothing_had_happened(num_prompt: int, num_resumed: int) -> None:
    prompt = list(range(5, 5 + num_prompt))
    whole = alone(prompt, 170)
    load = Load(20, budget=20)
    request = load.add(prompt, 170, resume=whole[:num_resumed])
    load.run()
    assert answer(request) == whole


def test_a_preempted_request_keeps_the_same_blocks_when_it_is_computed_again() -> None:
    load = Load(14, budget=16)
    prompt = list(range(30))
    request = load.add(prompt, 150)
    for num_tokens in (70, 110):
        while request.num_generated_tokens < num_tokens:
            load.step()
        load.add([7, num_tokens], 44, None, priority=1)
        while request.block_table:
            load.step()
    load.run()
    assert request.num_preemptions == 2
    assert answer(request) == alone(prompt, 150)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_random_loads_in_small_pools_give_every_request_its_tokens(seed: int) -> None:
    rng = random.Random(seed)
    load = Load(20, budget=16)
    wanted = []
    for _ in range(7):
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(3)] * rng.randrange(1, 22)
        rule = rng.choice([RULE, RULE, RULE._replace(aggregation=Aggregation.SUM), None])
        max_tokens = rng.randrange(1, 20 if rule is None else 120)
        request = load.add(prompt, max_tokens, rule, priority=rng.choice([0, 0, 1]))
        wanted.append((request, prompt, max_tokens, rule))
        for _ in range(rng.randrange(20)):
            load.step()
        if rng.random() < 0.3:
            victim = wanted.pop(rng.randrange(len(wanted)))[0]
            load.engine.scheduler.cancel(victim)
            load.engine.scheduler.check()
    load.run()
    for request, prompt, max_tokens, rule in wanted:
        assert answer(request) == alone(prompt, max_tokens, rule)
