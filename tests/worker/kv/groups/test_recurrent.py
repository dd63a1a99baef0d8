"""Requests of a model with recurrent layers, over a runner whose states remember their tokens."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from headrace.worker.draft_heads.medusa_runner import LastStates
from headrace.worker.engine.build import Draft, build_engine
from headrace.worker.kv.chain import BlockKey
from headrace.worker.kv.groups.recurrent import StateBudget
from headrace.worker.kv.groups.state_slots import StateSlots
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.medusa import MedusaModel
from tests.worker.conftest import BLOCK_SIZE, CHEAP_STEPS, VOCAB_SIZE, EngineUnderTest, RandomRequests, run_random_load
from tests.worker.fake_runner import expected_tokens
from tests.worker.kv.groups.stateful_runner import StatefulRunner
from tests.worker.speculation.test_draft_model import FREE_STEPS, FakeDraftRunner
from tests.worker.speculation.test_medusa import FakeHeads, FakeTarget


def make_engine(
    num_blocks: int = 64,
    num_slots: int = 32,
    max_num_seqs: int = 8,
    step_tokens: int = 32,
    interval: int = 8,
    speculation: str = "off",
) -> EngineUnderTest:
    limits = StepLimits(max_num_seqs, step_tokens, step_tokens, is_exact=True)
    runner = StatefulRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE, num_slots)
    budget = StateBudget(num_slots, interval)
    engine = build_engine(
        runner, BatchSampler(), num_blocks, limits, step_costs=CHEAP_STEPS, groups=[budget], speculation=speculation
    )
    return EngineUnderTest(engine, runner)


def slots_of(engine: EngineUnderTest) -> StateSlots:
    states = engine.scheduler.kv_cache.states
    assert states is not None
    return states.slots


def tokens(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=count)


def assert_answers(engine: EngineUnderTest) -> None:
    for request, found in engine.tokens.items():
        assert found == expected_tokens(request.prompt_token_ids, len(found), VOCAB_SIZE)


def test_a_prompt_in_chunks_beside_others_has_the_states_of_its_own_tokens() -> None:
    engine = make_engine()
    for number in range(6):
        engine.request(tokens(number, 10 + 17 * number))
    engine.run()
    assert_answers(engine)


@pytest.mark.parametrize("length", [32, 33, 34, 35, 43])
def test_the_same_prompt_continues_behind_its_last_whole_block(length: int) -> None:
    """At least two tokens are computed after a hit."""
    engine = make_engine()
    prompt = tokens(1, length)
    first = engine.request(prompt, max_tokens=1)
    engine.run()
    second = engine.request(prompt, max_tokens=1)
    engine.run()
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == (length - 2) // BLOCK_SIZE * BLOCK_SIZE
    assert_answers(engine)


def test_the_next_turn_continues_behind_the_answer() -> None:
    engine = make_engine(num_blocks=100)
    first = engine.request(tokens(1, 21), max_tokens=60)
    engine.run()
    conversation = list(first.token_ids)
    second = engine.request([*conversation, *tokens(2, 9)], max_tokens=3)
    engine.run()
    assert second.num_cached_tokens == (len(conversation) - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert_answers(engine)


def test_an_answer_keeps_a_state_every_interval_and_the_last_one() -> None:
    engine = make_engine(num_blocks=100, num_slots=20, interval=16)
    slots = slots_of(engine)
    request = engine.request(tokens(1, 6), max_tokens=100)
    engine.run()
    others = [engine.request(tokens(10 + number, 6), max_tokens=1) for number in range(8)]
    engine.run()
    assert all(other in engine.last for other in others)
    cache = engine.scheduler.kv_cache
    saved = [index + 1 for index in range(26) if slots.is_saved(cache.hash_of(request, index))]
    assert slots.num_evictions > 0
    assert 26 in saved, "the last border of the answer"
    gaps = [after - before for before, after in itertools.pairwise(saved)]
    assert max(gaps) <= 4, "a state every 16 tokens"
    assert len(saved) < 10, "not at every border"


def test_a_beginning_that_two_requests_share_is_saved_for_the_third() -> None:
    """The chunk of the second request is cut where the first one's blocks end."""
    engine = make_engine(interval=64, step_tokens=64, num_blocks=100)
    shared = tokens(1, 21)
    requests = []
    for number in range(3):
        requests.append(engine.request([*shared, *tokens(10 + number, 30)], max_tokens=1))
        engine.run()
    assert [request.num_cached_tokens for request in requests] == [0, 0, 20]
    assert_answers(engine)


def test_a_beginning_that_is_shared_in_part_continues_from_the_state_before_its_end() -> None:
    engine = make_engine(interval=16, step_tokens=64, num_blocks=100)
    prompt = tokens(1, 61)
    engine.request(prompt, max_tokens=1)
    engine.run()
    second = engine.request([*prompt[:50], *tokens(2, 20)], max_tokens=1)
    engine.run()
    assert second.num_cached_tokens == 40, "there are states after 56, 40, 24 and 8 tokens"
    assert_answers(engine)


def test_requests_that_come_together_share_a_beginning() -> None:
    engine = make_engine(interval=64, step_tokens=96, num_blocks=200)
    shared = tokens(1, 24)
    requests = [engine.request([*shared, *tokens(10 + number, 11)], max_tokens=1) for number in range(6)]
    engine.run()
    assert sum(request.num_cached_tokens == 24 for request in requests) >= 4
    assert_answers(engine)


def test_with_few_slots_states_are_evicted_and_answers_stay() -> None:
    engine = make_engine(num_slots=8, max_num_seqs=4)
    for number in range(12):
        engine.request(tokens(number % 5, 20 + 3 * (number % 5)), max_tokens=9)
    engine.run()
    assert slots_of(engine).num_evictions > 0
    assert_answers(engine)


def test_a_preempted_request_continues_from_a_saved_state() -> None:
    engine = make_engine(num_blocks=16, max_num_seqs=3)
    requests = [engine.request(tokens(number, 18), max_tokens=30) for number in range(3)]
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    assert sum(request.num_preemptions for request in requests) > 0
    assert_answers(engine)


def test_a_resumed_request_continues_its_answer() -> None:
    engine = make_engine()
    prompt = tokens(3, 19)
    first = engine.request(prompt, max_tokens=20)
    engine.run()
    resumed = engine.request(prompt, max_tokens=20, resume_token_ids=engine.tokens[first][:11])
    engine.run()
    assert engine.tokens[resumed] == engine.tokens[first]


def test_a_failed_step_leaves_no_slot_behind() -> None:
    engine = make_engine()
    engine.request(tokens(1, 40))
    engine.step()
    engine.runner.fail_next = RuntimeError("the kernels failed")
    engine.step()
    engine.run()
    after = engine.request(tokens(1, 40))
    engine.run()
    assert_answers(engine)
    assert after in engine.last
    assert slots_of(engine).num_available == 32


def test_log_probabilities_of_a_prompt_compute_all_of_it() -> None:
    engine = make_engine()
    prompt = tokens(1, 37)
    engine.request(prompt, max_tokens=1)
    engine.run()
    scored = engine.request(prompt, max_tokens=1, num_prompt_logprobs=0)
    engine.run()
    assert scored.num_cached_tokens == 0
    assert len(scored.prompt_logprobs) == 36


@pytest.mark.parametrize("seed", range(5))
def test_a_random_load_keeps_every_promise(seed: int) -> None:
    rng = random.Random(seed)
    seqs = rng.randint(1, 6)
    engine = make_engine(
        num_blocks=rng.randint(20, 40),
        num_slots=2 * seqs + rng.randint(0, 12),
        max_num_seqs=seqs,
        step_tokens=rng.choice([16, 32, 64]),
        interval=rng.choice([4, 8, 16, 64]),
    )
    engine.is_pipelined = rng.random() < 0.5
    beginnings = [tokens(number, rng.randint(1, 40)) for number in range(4)]

    def arrive() -> object:
        prompt = [*rng.choice(beginnings), *tokens(rng.randrange(6), rng.randint(1, 12))]
        options = {"num_prompt_logprobs": 0} if rng.random() < 0.1 else {}
        return engine.request(prompt, rng.randint(1, 25), priority=rng.randint(0, 1), **options)

    run_random_load(engine, rng, arrive)  # type: ignore[arg-type]
    assert_answers(engine)
    slots = slots_of(engine)
    changes = slots.take_changes()
    assert all(slots.is_saved(block_hash) is is_saved for block_hash, is_saved in changes.items())
    assert sum(changes.values()) == slots.num_saved
    assert not slots.take_changes()
    assert engine.scheduler.stats.prompt_tokens_cached > 0
    slots = slots_of(engine)
    assert slots.num_available == slots.num_slots


def test_a_draft_continues_from_the_state_after_its_last_accepted_token() -> None:
    """Whether all of its tokens are right, or none, or some."""
    engine = make_engine(num_blocks=200, num_slots=40, speculation="ngram")
    prompt = tokens(1, 19)
    right = expected_tokens(prompt, 60, VOCAB_SIZE)
    wrong = [token + 1 if number % 7 == 3 else token for number, token in enumerate(right)]
    requests = [engine.request(prompt, 60, prediction=prediction) for prediction in (right, wrong)]
    engine.run()
    assert requests[0].num_accepted > 40
    assert 0 < requests[1].num_accepted < requests[1].num_drafted
    assert_answers(engine)
    following = engine.request([*requests[0].token_ids, *tokens(2, 9)], 3)
    engine.run()
    assert following.num_cached_tokens == (19 + 60 - 1) // BLOCK_SIZE * BLOCK_SIZE, "a state at each border is saved"
    assert_answers(engine)


@pytest.mark.parametrize("accuracy", [1.0, 0.6])
def test_a_smaller_model_drafts_beside_states(accuracy: float) -> None:
    """It has keys and values in the same blocks, and no states."""
    num_blocks, num_slots = 128, 60
    runner = StatefulRunner(num_blocks, BLOCK_SIZE, VOCAB_SIZE, num_slots)
    draft = Draft(FakeDraftRunner(num_blocks, accuracy), BatchSampler(), FREE_STEPS)
    engine = EngineUnderTest(
        build_engine(
            runner,
            BatchSampler(),
            num_blocks,
            StepLimits(4, 32, 32, is_exact=True),
            step_costs=CHEAP_STEPS,
            groups=[StateBudget(num_slots, 8)],
            speculation="draft",
            draft=draft,
        ),
        runner,
    )
    requests = [engine.request(tokens(number, 19 + number), 40) for number in range(3)]
    engine.run()
    assert all(request.num_accepted > 0 for request in requests)
    assert_answers(engine)


class StatefulTarget(FakeTarget, StatefulRunner):
    """It has states, and last hidden states that Medusa heads read."""

    def __init__(self, num_blocks: int, num_slots: int) -> None:
        files: Any = None
        StatefulRunner.__init__(self, num_blocks, BLOCK_SIZE, VOCAB_SIZE, num_slots)
        self.states, self.contexts = LastStates(files), []


@pytest.mark.parametrize("wrong", [None, 2])
@pytest.mark.parametrize("is_pipelined", [False, True])
def test_medusa_heads_draft_beside_states_without_branches(wrong: int | None, is_pipelined: bool) -> None:
    """A wrong token of a draft is taken back from the states, too."""
    num_blocks, num_slots = 128, 60
    target = StatefulTarget(num_blocks, num_slots)
    draft = Draft(FakeHeads(target, wrong), BatchSampler(), FREE_STEPS, MedusaModel)
    made = build_engine(
        target,
        BatchSampler(),
        num_blocks,
        StepLimits(4, 32, 32, is_exact=True),
        step_costs=CHEAP_STEPS,
        groups=[StateBudget(num_slots, 8)],
        speculation="medusa",
        draft=draft,
    )
    engine = EngineUnderTest(made, target, is_pipelined=is_pipelined)
    assert not engine.scheduler.kv_cache.has_branches
    requests = [engine.request(tokens(number, 19 + number), 40) for number in range(3)]
    engine.run()
    assert all(request.num_accepted > 10 for request in requests)
    assert all(request.num_drafted - request.num_accepted > 0 for request in requests) is (wrong is not None)
    assert_answers(engine)
    assert slots_of(engine).num_available == num_slots


def test_without_slots_for_states_there_are_no_drafts() -> None:
    engine = make_engine(num_slots=4, max_num_seqs=2, speculation="ngram")
    prompt = tokens(1, 19)
    right = expected_tokens(prompt, 30, VOCAB_SIZE)
    requests = [engine.request([*prompt, number], 30, prediction=right) for number in range(2)]
    requests.append(engine.request(prompt, 30, prediction=right))
    engine.run()
    assert_answers(engine)


@pytest.mark.parametrize("seed", range(6))
def test_random_drafts_keep_every_promise(seed: int) -> None:
    """With cancelled, resumed and preempted requests, and shared prefixes."""
    rng = random.Random(seed)
    seqs = rng.randint(1, 6)
    num_slots = 2 * seqs + rng.choice([0, 5, 40])
    engine = make_engine(
        num_blocks=rng.choice([24, 40, 80]),
        num_slots=num_slots,
        max_num_seqs=seqs,
        interval=rng.choice([4, 8, 64]),
        speculation="ngram",
    )
    requests = RandomRequests(engine, rng)
    requests.check(run_random_load(engine, rng, requests.arrive))
    assert slots_of(engine).num_available == num_slots


def test_a_state_of_other_tokens_with_the_same_hash_is_not_found() -> None:
    slots = StateSlots(2)
    slot = slots.take()
    assert slots.save(slot, BlockKey(5, 1, b"abcd"))
    assert slots.find(BlockKey(5, 1, b"abcd")) == slot
    assert slots.find(BlockKey(5, 1, b"abce")) is None
    assert slots.find(BlockKey(5, 2, b"abcd")) is None
    slots.release(slot)
    slots.check({})
    slots.forget_all()
    assert not slots.is_saved(5)
    assert slots.num_available == 2


def test_a_state_that_is_replaced_is_evicted_first() -> None:
    slots = StateSlots(3)
    for block_hash in (1, 2, 3):
        slots.save(slot := slots.take(), BlockKey(block_hash, 0, b""))
        slots.release(slot)
    slots.evict_soon(2)
    slots.take()
    assert [slots.is_saved(block_hash) for block_hash in (1, 2, 3)] == [True, False, True]
