"""Requests of a model with sliding windows, over a runner that compares windows with whole contexts."""

from __future__ import annotations

import random

import pytest

from headrace.worker.engine.build import build_engine
from headrace.worker.kv.cache import MIN_COPIED_TOKENS, KVCache
from headrace.worker.kv.groups.window import PARTS_BESIDE, WindowBudget
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request, TokenPath
from headrace.worker.sampling.sampler import BatchSampler
from tests.worker.conftest import (
    BLOCK_SIZE,
    CHEAP_STEPS,
    VOCAB_SIZE,
    EngineUnderTest,
    RandomRequests,
    run_random_load,
)
from tests.worker.fake_runner import expected_tokens
from tests.worker.kv.groups.windowed_runner import WindowedRunner

WINDOW = 10


def make_engine(
    num_blocks: int = 64,
    num_slots: int = 40,
    max_num_seqs: int = 8,
    step_tokens: int = 32,
    window: int = WINDOW,
    speculation: str = "off",
) -> EngineUnderTest:
    limits = StepLimits(max_num_seqs, step_tokens, step_tokens, is_exact=True)
    runner = WindowedRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE, num_slots, window)
    budget = WindowBudget(window, num_slots, step_tokens // BLOCK_SIZE + PARTS_BESIDE)
    engine = build_engine(
        runner, BatchSampler(), num_blocks, limits, step_costs=CHEAP_STEPS, groups=[budget], speculation=speculation
    )
    return EngineUnderTest(engine, runner)


def cache_of(engine: EngineUnderTest) -> KVCache:
    return engine.scheduler.kv_cache


def parts_of(cache: KVCache) -> tuple[int, int]:
    """The slots, and those that requests hold."""
    figures = cache.figures()
    return figures.num_window_slots, figures.num_held_window_slots


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def assert_answers(engine: EngineUnderTest) -> None:
    for request, found in engine.tokens.items():
        assert found == expected_tokens(request.prompt_token_ids, len(found), VOCAB_SIZE)


def run_one(engine: EngineUnderTest, prompt: list[int], max_tokens: int = 1) -> Request:
    request = engine.request(prompt, max_tokens)
    engine.run()
    return request


def test_a_long_request_holds_the_parts_of_its_window() -> None:
    """However long it becomes, and of a prompt those of its chunk too."""
    engine = make_engine(num_blocks=100, num_slots=20)
    engine.request(tokens(1, 150), 200)
    held = []
    while engine.scheduler.has_requests:
        engine.step()
        held.append(parts_of(cache_of(engine))[1])
    assert max(held[:5]) == (32 + WINDOW + 2) // BLOCK_SIZE
    assert max(held[10:-1]) == -(-WINDOW // BLOCK_SIZE) + 1
    assert held[-1] == 0
    assert_answers(engine)


def test_prompts_in_chunks_beside_others_see_their_own_windows() -> None:
    engine = make_engine()
    for number in range(6):
        engine.request(tokens(number, 10 + 17 * number))
    engine.run()
    assert_answers(engine)


@pytest.mark.parametrize("length", [32, 33, 34, 35, 43])
def test_the_same_prompt_continues_behind_its_cached_blocks(length: int) -> None:
    """In the middle of a block too, like that of any model."""
    engine = make_engine()
    prompt = tokens(1, length)
    run_one(engine, prompt)
    of_block = (length - 2) % BLOCK_SIZE
    assert run_one(engine, prompt).num_cached_tokens == length - 2 - (of_block if of_block < MIN_COPIED_TOKENS else 0)
    assert_answers(engine)


def test_a_prefix_is_used_up_to_where_parts_of_a_window_exist() -> None:
    """Parts of the middle are given up first. A request that branches off there computes its prompt again, and the next
    one that branches off there does not."""
    engine = make_engine(num_blocks=200, num_slots=24)
    system = tokens(1, 60)
    run_one(engine, system + tokens(2, 100))
    run_one(engine, tokens(3, 60))  # takes the slots
    assert run_one(engine, system + tokens(4, 5)).num_cached_tokens == 0
    run_one(engine, tokens(5, 60))
    assert run_one(engine, system + tokens(6, 5)).num_cached_tokens == 60
    assert_answers(engine)


def test_the_next_turn_continues_behind_the_answer() -> None:
    """Though the middle of the conversation is gone, and other requests came between."""
    engine = make_engine(num_blocks=200, num_slots=24)
    first = engine.request(tokens(1, 21), max_tokens=60)
    engine.run()
    run_one(engine, tokens(2, 40))
    conversation = list(first.token_ids)
    second = run_one(engine, [*conversation, *tokens(3, 9)], 3)
    assert second.num_cached_tokens == len(conversation) - 1
    assert_answers(engine)


def test_the_number_of_tokens_computed_by_now_is_what_a_request_gets() -> None:
    engine = make_engine(num_blocks=200, num_slots=24)
    prompt = tokens(1, 160)
    run_one(engine, prompt)
    run_one(engine, tokens(2, 60))
    for length in (20, 60, 100, 140, 160):
        asking = Request("asking", prompt[:length], engine.last and next(iter(engine.last)).sampling, 1)
        cache = cache_of(engine)
        expected = cache.num_computed_by_now(asking)
        assert cache.reuse(asking) == expected
        cache.free(asking)
        cache.check()


def test_choices_copy_a_block_with_its_part() -> None:
    engine = make_engine()
    prompt = tokens(1, 47)
    run_one(engine, prompt)
    requests = [engine.request([*prompt, number], 20) for number in range(4)]
    engine.run()
    assert all(request.num_cached_tokens == 46 for request in requests)
    assert_answers(engine)


@pytest.mark.parametrize("accepted", [(), (7,), (8,)])
def test_a_branch_of_a_draft_has_parts_of_its_own(accepted: tuple[int, ...]) -> None:
    """Whether its tokens are accepted, or none."""
    engine = make_engine()
    request = engine.request(tokens(1, 38), 8)
    engine.step()
    engine.step()
    cache = cache_of(engine)
    assert cache.reserve(request, request.num_tokens + 3)
    held = parts_of(cache)[1]
    assert cache.add_branch(request, TokenPath((7, 7, 7)), 0) == 3 + cache.num_repeated(request)
    cache.check()
    assert parts_of(cache)[1] == held + 2
    cache.plan([])
    cache.end_branches(request, accepted)
    cache.check()
    assert parts_of(cache)[1] == held
    engine.run()
    assert_answers(engine)


def test_requests_wait_until_there_are_slots_for_their_windows() -> None:
    """Without preemption, although there are blocks for all of them. The first one counts too."""
    engine = make_engine(num_blocks=200, num_slots=32)
    for number in range(6):
        engine.request(tokens(number, 40), 30)
    engine.step()
    assert len(engine.scheduler.running) == (32 - 13) // (WINDOW // BLOCK_SIZE + PARTS_BESIDE)
    engine.run()
    assert engine.scheduler.stats.preemptions == 0
    assert_answers(engine)


def test_slots_come_from_what_other_requests_computed_in_the_step_before() -> None:
    """Nobody is preempted for parts that no query can reach."""
    cache = cache_of(make_engine(num_blocks=64, num_slots=14))
    first, last = (Request(name, tokens(1, 60), SamplingParams(max_tokens=1, seed=0), 1) for name in ("first", "last"))
    assert cache.reserve(last, 40)
    last.num_computed_tokens = 40
    assert cache.reserve(first, 40)
    cache.check()
    assert parts_of(cache) == (14, 10 + 3)
    for request in (first, last):
        cache.free(request)
    cache.check()


def test_a_request_with_a_copy_takes_all_blocks_and_slots() -> None:
    """The block that was copied too."""
    engine = make_engine(num_blocks=8, num_slots=8)
    first = tokens(1, 7)
    run_one(engine, first)
    assert run_one(engine, [*first, *tokens(2, 24)]).num_cached_tokens == 7
    assert_answers(engine)


def test_a_request_that_lost_its_blocks_is_computed_again() -> None:
    engine = make_engine(num_blocks=24, num_slots=40)
    for number in range(4):
        engine.request(tokens(number, 20), 30)
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    assert_answers(engine)


@pytest.mark.parametrize("speculation", ["off", "ngram"])
@pytest.mark.parametrize("seed", range(6))
def test_no_part_is_lost_or_wrong_in_random_loads(seed: int, speculation: str) -> None:
    """With cancelled, resumed and preempted requests, shared prefixes and drafts."""
    rng = random.Random(seed)
    num_slots = rng.choice([18, 24, 40])
    engine = make_engine(rng.choice([24, 40, 80]), num_slots, window=rng.choice([3, 8, 13]), speculation=speculation)
    requests = RandomRequests(engine, rng)
    requests.check(run_random_load(engine, rng, requests.arrive))
    assert parts_of(cache_of(engine)) == (num_slots, 0)
