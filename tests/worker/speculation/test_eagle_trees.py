"""Heads grow trees: answers are those without, each path is that of its own blocks, and a branch that is accepted takes
what the heads have computed along."""

from __future__ import annotations

import random

import pytest

from headrace.worker.request.request import Request
from headrace.worker.speculation.tree import TreeShape
from tests.worker.conftest import VOCAB_SIZE, EngineUnderTest, KnownCosts, RandomRequests, run_random_load
from tests.worker.fake_runner import expected_tokens
from tests.worker.speculation.test_eagle import engine_with_heads, sees_all
from tests.worker.speculation.test_engine_with_drafts import answered_alike

SHAPE = TreeShape(16, 5, 3)


@pytest.mark.parametrize(
    ("num_streams", "right", "second", "is_pipelined"),
    [(1, 0.5, 0.4, False), (8, 0.5, 0.4, True), (8, 1.0, 0.0, False)],
)
def test_answers_are_those_without_trees(num_streams: int, right: float, second: float, is_pipelined: bool) -> None:
    found = answered_alike(
        lambda: engine_with_heads(right, max_num_batched_tokens=80, second=second, tree=SHAPE)[0],
        num_streams,
        is_pipelined,
    )
    for number, requests in enumerate(found):
        assert any(request.num_drafted for request in requests)
        is_greedy = requests[0].sampling.is_greedy
        assert number > 1 or is_greedy
        assert any(request.num_accepted for request in requests) or not is_greedy


def steps_of(engine: EngineUnderTest, count: int) -> tuple[Request, int]:
    request = engine.request([1, 2, 3], count)
    engine.run()
    assert engine.tokens[request] == expected_tokens([1, 2, 3], count, VOCAB_SIZE)
    return request, len(engine.runner.batch_sizes)


def test_a_tree_takes_fewer_steps_than_a_draft() -> None:
    """Where the second best token is often right. Nothing is computed twice after a branch was accepted."""
    chain, _ = engine_with_heads(0.6, second=0.4, max_num_batched_tokens=64)
    tree, heads = engine_with_heads(0.6, second=0.4, max_num_batched_tokens=64, tree=SHAPE)
    _, without = steps_of(chain, 100)
    request, steps = steps_of(tree, 100)
    assert steps < 0.75 * without
    contexts = heads.contexts[request.request_id]
    assert sees_all(request, contexts)
    # In each step, the tokens of the step before, and up to three for each of the four further depths.
    assert heads.num_tokens <= (3 + 100) + steps * (1 + 3 * (SHAPE.depth - 1))


def test_trees_have_no_more_tokens_than_their_shape_and_the_step_allow() -> None:
    narrow = TreeShape(6, 5, 3)
    engine, _ = engine_with_heads(0.6, second=0.4, max_num_batched_tokens=64, tree=narrow)
    request = engine.request([1, 2, 3], 80)
    while engine.scheduler.has_requests:
        before = request.num_drafted
        engine.step()
        assert request.num_drafted - before <= narrow.num_tokens
    assert request.num_drafted > 40
    small, _ = engine_with_heads(0.6, second=0.4, max_num_batched_tokens=10, tree=SHAPE)
    steps_of(small, 60)
    assert 4 < max(small.runner.batch_sizes) <= 10


def test_where_tokens_cost_much_a_tree_is_pruned_to_its_first_token() -> None:
    engine, _ = engine_with_heads(0.6, second=0.4, tree=SHAPE, target_costs=KnownCosts(1.0, 1.0))
    cheap, _ = engine_with_heads(0.6, second=0.4, tree=SHAPE)
    counts = []
    for each in (engine, cheap):
        request, steps = steps_of(each, 60)
        counts.append(request.num_drafted / steps)
    assert counts[0] <= 1.0 < 3.0 < counts[1]


def test_more_requests_than_spare_blocks_get_drafts_all_the_same() -> None:
    engine, _ = engine_with_heads(
        0.6, second=0.4, max_num_seqs=12, num_blocks=256, max_num_batched_tokens=200, tree=SHAPE
    )
    requests = [engine.request([number, 2, 3], 24) for number in range(12)]
    engine.run()
    for number, request in enumerate(requests):
        assert engine.tokens[request] == expected_tokens([number, 2, 3], 24, VOCAB_SIZE)
        assert request.num_accepted > 0


@pytest.mark.parametrize("seed", range(4))
def test_random_load_with_trees_keeps_every_promise(seed: int) -> None:
    rng = random.Random(seed)
    engine, _ = engine_with_heads(
        rng.choice([0.6, 0.3]),
        second=rng.choice([0.4, 0.3]),
        num_blocks=rng.randint(20, 64),
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(10, 60),
        tree=TreeShape(rng.randint(2, 20), rng.randint(1, 6), rng.randint(2, 4)),
    )
    engine.is_pipelined = seed % 2 == 1
    requests = RandomRequests(engine, rng)
    requests.check(run_random_load(engine, rng, requests.arrive))
    assert any(request.num_accepted for request in engine.tokens)
