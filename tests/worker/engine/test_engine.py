"""The engine with the fake runner: every request gets the same tokens as if it were alone."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from zlib import crc32

import numpy as np
import pytest

from headrace.protos.status import Reason
from headrace.worker.engine.engine import MAX_FAILED_STEPS, EngineFailedError, EngineStats
from headrace.worker.engine.scheduler import SchedulerStats
from headrace.worker.engine.step_budget import MIN_CHUNK_ROOM, chunk_of
from headrace.worker.kv import chain
from headrace.worker.model.batch import Batch
from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import FinishReason, Request
from tests.worker.conftest import VOCAB_SIZE, EngineUnderTest, make_engine, run_random_load
from tests.worker.fake_runner import FakeRunner, expected_tokens, next_token


def right(request: Request, count: int) -> list[int]:
    return expected_tokens(request.prompt_token_ids, count, VOCAB_SIZE)


def test_a_request_gets_its_tokens_and_one_finish(engine: EngineUnderTest) -> None:
    request = engine.request([5, 6, 7], max_tokens=10)
    engine.run()
    assert engine.tokens[request] == right(request, 10)
    assert engine.finish(request) is FinishReason.LENGTH


def test_a_stop_token_ends_a_request_and_is_delivered(engine: EngineUnderTest) -> None:
    tokens = expected_tokens([1, 2], 10, VOCAB_SIZE)
    request = engine.request([1, 2], max_tokens=10, stop_token_ids=frozenset({tokens[3]}))
    engine.run()
    assert engine.tokens[request] == tokens[:4]
    assert (engine.finish(request), engine.last[request].stop_token_id) == (FinishReason.STOP, tokens[3])


@pytest.mark.parametrize("budget", [10, 11, 31, 64])
def test_a_prompt_longer_than_the_budget_is_computed_in_chunks(budget: int) -> None:
    engine = make_engine(max_num_batched_tokens=budget)
    request = engine.request(list(range(100)), max_tokens=6)
    engine.run()
    assert engine.tokens[request] == right(request, 6)
    assert engine.runner.num_tokens == 100 + 5


def test_a_repeated_prompt_is_found_in_the_cache(engine: EngineUnderTest) -> None:
    prompt = list(range(41))
    first = engine.request(prompt)
    engine.run()
    computed = engine.runner.num_tokens
    second = engine.request(prompt)
    engine.run()
    assert engine.tokens[first] == engine.tokens[second] == right(second, 8)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 39)
    assert engine.runner.num_tokens - computed == 2 + 7


def test_of_a_prompt_that_is_cached_whole_only_two_tokens_are_computed(engine: EngineUnderTest) -> None:
    prompt = list(range(40))
    engine.request(prompt)
    engine.run()
    second = engine.request(prompt)
    engine.run()
    assert second.num_cached_tokens == 38
    assert engine.tokens[second] == right(second, 8)


def test_a_prompt_that_turns_off_inside_a_block_copies_its_beginning(engine: EngineUnderTest) -> None:
    first = engine.request(list(range(40)))
    engine.run()
    computed = engine.runner.num_tokens
    second = engine.request([*range(35), 500, 501], max_tokens=6)
    engine.run()
    assert second.num_cached_tokens == 35
    assert engine.runner.num_tokens - computed == 2 + 5
    assert engine.tokens[second] == right(second, 6)
    third = engine.request(list(first.token_ids)[:47], max_tokens=3)
    engine.run()
    assert engine.tokens[third] == right(third, 3), "the copied block was changed"


def test_a_block_whose_beginning_is_copied_may_still_be_growing(engine: EngineUnderTest) -> None:
    first = engine.request(list(range(11)), max_tokens=30)
    engine.step()
    engine.step()
    second = engine.request(list(range(11)), max_tokens=30)
    engine.run()
    assert second.num_cached_tokens == 8
    assert engine.tokens[first] == engine.tokens[second] == right(first, 30)


def test_a_request_without_room_in_a_step_copies_nothing(engine: EngineUnderTest) -> None:
    """The copy would be lost if the step failed, and the request would not end with it."""
    engine.request(list(range(8)), max_tokens=1)
    engine.run()
    failing = engine.request(list(range(100, 131)), max_tokens=1)
    other = engine.request([*range(6), *range(200, 240)], max_tokens=6)
    engine.runner.fail_next = RuntimeError("kernel")
    engine.step()
    assert engine.last[failing].error is not None
    engine.run()
    assert engine.tokens[other] == right(other, 6)


def test_with_no_block_to_spare_nothing_is_copied() -> None:
    engine = make_engine(num_blocks=3)
    engine.request(list(range(12)), max_tokens=1)
    engine.run()
    second = engine.request([*range(10), 50, 51], max_tokens=1)
    engine.run()
    assert engine.tokens[second] == right(second, 1)


def test_the_generated_tokens_of_a_request_are_found_by_its_next_turn(engine: EngineUnderTest) -> None:
    first = engine.request(list(range(8)), max_tokens=9)
    engine.run()
    second = engine.request([*range(8), *engine.tokens[first], 1, 2], max_tokens=4)
    engine.run()
    assert second.num_cached_tokens == 16
    assert engine.tokens[second] == right(second, 4)


def test_different_roots_share_nothing(engine: EngineUnderTest) -> None:
    engine.request(list(range(40)), root_hash=1)
    engine.run()
    second = engine.request(list(range(40)), root_hash=2)
    engine.run()
    assert second.num_cached_tokens == 0


@pytest.mark.parametrize("tail", range(4))
def test_identical_prompts_that_arrive_together_are_computed_once(tail: int) -> None:
    engine = make_engine(num_blocks=200, max_num_seqs=16, max_num_batched_tokens=64)
    prompt = list(range(104 + tail))
    requests = [engine.request(prompt, max_tokens=1) for _ in range(16)]
    engine.run()
    assert all(engine.tokens[request] == right(request, 1) for request in requests)
    # A tail shorter than what a copy must gain is computed by each.
    each = 3 if tail == 3 else 2
    assert engine.runner.num_tokens == len(prompt) + 15 * each
    assert engine.scheduler.stats.prompt_tokens_computed == engine.runner.num_tokens
    assert engine.scheduler.stats.prompt_tokens_cached == 15 * (len(prompt) - each)
    assert engine.runner.batch_sizes == [1, 1, 15], "those who had only the tail to copy waited for each other"


def test_short_prompts_do_not_wait_for_a_long_one_and_the_long_one_goes_on() -> None:
    engine = make_engine(num_blocks=400, max_num_batched_tokens=32)
    long = engine.request(list(range(400)), max_tokens=1)
    engine.step()
    shorts = [engine.request([500 + i] * 10, max_tokens=1) for i in range(4)]
    engine.step()
    engine.step()
    assert all(short in engine.last for short in shorts)
    assert long.num_computed_tokens >= 32 + 2 * 31 // 4
    engine.run()
    assert engine.tokens[long] == right(long, 1)


@pytest.mark.parametrize("remaining", range(1, 12))
@pytest.mark.parametrize("room", range(12))
def test_a_chunk_never_leaves_a_token_alone(remaining: int, room: int) -> None:
    chunk = chunk_of(remaining, room)
    assert 0 <= chunk <= min(remaining, room)
    if remaining > 1:
        assert chunk != 1
        assert remaining - chunk != 1
    if room >= MIN_CHUNK_ROOM:
        assert chunk > 0


@pytest.mark.parametrize("seed", range(5))
def test_no_prompt_token_is_ever_computed_alone(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(num_blocks=100, max_num_seqs=6, max_num_batched_tokens=8)
    lonely = []
    bind = engine.runner.bind

    def watch(batch: Batch, *, keeps_logits: bool) -> None:
        num_padding = np.count_nonzero(batch.block_indices == engine.runner.padding_block)
        new = np.diff(batch.subsequence_begins)[: len(batch.past_lens) - num_padding]
        computed = batch.past_lens[: len(new)][new == 1].tolist()
        decoding = [request.num_computed_tokens for request in engine.scheduler.running if request.num_generated_tokens]
        lonely.extend(set(computed) - set(decoding))
        bind(batch, keeps_logits=keeps_logits)

    engine.runner.bind = watch  # type: ignore[method-assign]
    prefix = [rng.randrange(VOCAB_SIZE) for _ in range(30)]
    for _ in range(40):
        prompt = prefix[: rng.randint(2, 30)] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 9))]
        engine.request(prompt, max_tokens=rng.randint(1, 6))
        engine.step()
    engine.run()
    assert lonely == []


def test_limits_that_leave_prompts_no_room_are_refused() -> None:
    with pytest.raises(ValueError, match=r"max_num_mixed_tokens \(9\) must exceed max_num_seqs \(8\) by at least 2"):
        make_engine(max_num_seqs=8, max_num_batched_tokens=9)
    with pytest.raises(
        ValueError, match=r"max_num_mixed_tokens \(30\) must exceed .* at most max_num_batched_tokens \(20\)"
    ):
        make_engine(max_num_batched_tokens=20, max_num_mixed_tokens=30)


def test_no_step_is_larger_than_the_limits() -> None:
    engine = make_engine(max_num_seqs=3, max_num_batched_tokens=7)
    for i in range(9):
        engine.request([i] * (1 + 3 * i), max_tokens=5)
    before = 0
    while engine.scheduler.has_requests:
        engine.step()
        assert engine.runner.num_tokens - before <= 7
        before = engine.runner.num_tokens
    assert max(engine.runner.batch_sizes) == 3


def test_a_small_pool_gives_every_request_the_tokens_of_an_ample_one() -> None:
    engine = make_engine(num_blocks=24, max_num_seqs=8)
    requests = [engine.request([i] * 9, max_tokens=30) for i in range(16)]
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    for request in requests:
        assert engine.tokens[request] == right(request, 30)


def test_a_higher_priority_goes_first_and_keeps_its_blocks() -> None:
    engine = make_engine(num_blocks=16, max_num_seqs=2)
    low = [engine.request([i] * 8, max_tokens=20) for i in range(3)]
    engine.step()
    urgent = engine.request([50] * 8, max_tokens=40, priority=1)
    while urgent not in engine.last:
        assert urgent.num_generated_tokens > 0 or low[2].num_generated_tokens == 0
        engine.step()
    assert urgent.num_preemptions == 0
    engine.run()
    for request in [*low, urgent]:
        assert engine.tokens[request] == right(request, request.sampling.max_tokens)


def test_a_resumed_request_goes_on_where_it_stopped(engine: EngineUnderTest) -> None:
    whole = expected_tokens([1, 2, 3], 10, VOCAB_SIZE)
    request = engine.request([1, 2, 3], max_tokens=10, resume_token_ids=whole[:6])
    engine.run()
    assert engine.tokens[request] == whole


@pytest.mark.parametrize("num_resumed", [1, 3, 6, 13, 20])
def test_cached_tokens_are_never_more_than_the_prompt(engine: EngineUnderTest, num_resumed: int) -> None:
    prompt = list(range(10))
    whole = expected_tokens(prompt, 24, VOCAB_SIZE)
    engine.request(prompt, max_tokens=24)
    engine.run()
    before = engine.scheduler.stats.prompt_tokens_cached
    resumed = engine.request(prompt, max_tokens=24, resume_token_ids=whole[:num_resumed])
    engine.run()
    assert engine.tokens[resumed] == whole
    assert 8 <= resumed.num_cached_tokens <= 10
    assert engine.scheduler.stats.prompt_tokens_cached - before == resumed.num_cached_tokens


def test_a_resumed_request_has_told_the_log_probabilities_of_its_prompt(engine: EngineUnderTest) -> None:
    prompt = list(range(20))
    whole = expected_tokens(prompt, 6, VOCAB_SIZE)
    engine.request(prompt)
    engine.run()
    resumed = engine.request(prompt, max_tokens=6, resume_token_ids=whole[:2], num_prompt_logprobs=3)
    engine.run()
    assert (engine.tokens[resumed], resumed.num_cached_tokens) == (whole, 20)
    assert (len(resumed.prompt_logprobs), resumed.num_prompt_logprob_values) == (0, 0)


def test_who_was_cut_off_in_the_middle_of_an_answer_goes_before_those_that_have_nothing_yet() -> None:
    engine = make_engine(max_num_seqs=1, max_num_batched_tokens=16)
    first = engine.request([1, 2, 3], max_tokens=4)
    engine.step()
    new = engine.request([5, 6, 7], max_tokens=4)
    resumed = engine.request([8, 9], max_tokens=12, resume_token_ids=expected_tokens([8, 9], 12, VOCAB_SIZE)[:3])
    engine.run()
    assert (first.scheduled_s, resumed.scheduled_s, new.scheduled_s) == tuple(
        sorted(request.scheduled_s for request in (first, resumed, new))
    )


def test_what_was_cut_off_is_computed_before_shorter_prompts_unless_these_are_more_urgent() -> None:
    whole = expected_tokens([8, 9], 60, VOCAB_SIZE)
    engine = make_engine(max_num_batched_tokens=16)
    short = [engine.request([i, i, i, i], max_tokens=4) for i in range(6)]
    resumed = engine.request([8, 9], max_tokens=60, resume_token_ids=whole[:30])
    while not resumed.first_token_s:
        engine.step()
    assert all(request.num_generated_tokens == 0 for request in short[1:])
    engine.run()
    assert engine.tokens[resumed] == whole

    engine = make_engine(max_num_batched_tokens=16)
    urgent = engine.request([1] * 40, max_tokens=4, priority=1)
    between = engine.request([2] * 8, max_tokens=4, priority=1)
    resumed = engine.request([8, 9], max_tokens=60, resume_token_ids=whole[:30])
    while not between.first_token_s:
        engine.step()
    assert resumed.num_computed_tokens < 8
    engine.run()
    assert urgent.num_generated_tokens == 4


def test_a_cancelled_request_frees_its_blocks_and_gets_nothing_more(engine: EngineUnderTest) -> None:
    running = engine.request(list(range(20)), max_tokens=100)
    waiting = engine.request(list(range(20)), max_tokens=100)
    engine.step()
    engine.scheduler.cancel(running)
    engine.scheduler.cancel(waiting)
    engine.scheduler.cancel(waiting)
    assert engine.step() == []
    assert not engine.scheduler.has_requests
    assert engine.scheduler.kv_cache.pool.num_free_blocks == 64
    assert engine.scheduler.stats.requests_cancelled == 2


@pytest.mark.parametrize("budget", [10, 32, 64])
def test_logprobs_of_a_prompt_are_those_of_each_token_behind_those_before_it(budget: int) -> None:
    engine = make_engine(num_blocks=60, max_num_seqs=4, max_num_batched_tokens=budget)
    prompt = [5, 6, 7]
    prompt += expected_tokens(prompt, 30, VOCAB_SIZE)
    prompt += [1, 2]
    engine.request(prompt, max_tokens=1)
    engine.run()
    asked = engine.request(prompt, max_tokens=3, num_prompt_logprobs=1)
    other = engine.request([9] * 20, max_tokens=20)
    engine.run()
    assert len(asked.prompt_logprobs) == len(prompt) - 1
    assert asked.num_cached_tokens == 0, "logits of cached tokens are not to be had"
    for position, entry in enumerate(asked.prompt_logprobs, 1):
        best = next_token(prompt[:position], VOCAB_SIZE)
        assert entry.top_token_ids == (best,)
        assert (entry.rank == 1) == (prompt[position] == best)
    assert [entry.rank for entry in list(asked.prompt_logprobs)[2:32]] == [1] * 30
    assert engine.tokens[asked] == right(asked, 3)
    assert engine.tokens[other] == right(other, 20)


def test_logprobs_of_a_prompt_survive_a_preemption() -> None:
    engine = make_engine(num_blocks=16, max_num_seqs=4)
    first = engine.request([1] * 8, max_tokens=40)
    asked = engine.request(list(range(20)), max_tokens=30, num_prompt_logprobs=0)
    engine.run()
    assert asked.num_preemptions > 0
    assert len(asked.prompt_logprobs) == 19
    assert engine.tokens[asked] == right(asked, 30)
    assert engine.tokens[first] == right(first, 40)


@pytest.mark.parametrize("others", ["longer", "shorter"])
def test_steps_have_few_rows_of_logits_for_logprobs_of_prompts(others: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that is first in rank goes on, whoever else asks for them."""
    asked_most = []
    entries = []
    for most in (sys.maxsize, 10):
        engine = make_engine(num_blocks=200, max_num_seqs=16)
        engine.scheduler.max_prompt_rows = most
        rows: list[int] = []
        monkeypatch.setattr(FakeRunner, "bind", counted_rows(FakeRunner.bind, rows))
        first = engine.request(list(range(60)), max_tokens=2, num_prompt_logprobs=1)
        lengths = (80, 90, 100) if others == "longer" else (20,) * 12
        rest = [engine.request([number] * length, 2, num_prompt_logprobs=1) for number, length in enumerate(lengths)]
        plain = engine.request([7] * 50, max_tokens=4)
        engine.run()
        asked_most.append(max(rows))
        entries.append([list(request.prompt_logprobs) for request in (first, *rest)])
        for request in (first, *rest, plain):
            assert engine.tokens[request] == right(request, request.sampling.max_tokens)
            assert len(request.prompt_logprobs) == (0 if request is plain else request.num_prompt_tokens - 1)
        if most == 10 and others == "shorter":
            assert first.first_token_s < rest[-1].ended_s
        monkeypatch.undo()
    assert entries[0] == entries[1]
    assert asked_most[0] > 10
    assert asked_most[1] == 10


def counted_rows(bind: Callable[..., None], rows: list[int]) -> Callable[..., None]:
    """Notes the rows of each step that are for log-probabilities of prompts."""

    def noted(runner: FakeRunner, batch: Batch, *, keeps_logits: bool) -> None:
        rows.append(sum(prompt.num_rows for prompt in batch.prompts))
        bind(runner, batch, keeps_logits=keeps_logits)

    return noted


def test_drafts_have_few_rows_of_logits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.worker.model.step_limits.MAX_LOGITS_BYTES", 12 * 4 * VOCAB_SIZE)
    engine = make_engine(max_num_seqs=4, speculation="ngram")
    requests = []
    for number in range(4):
        answer = expected_tokens([number] * 4, 20, VOCAB_SIZE)
        requests.append(engine.request([number] * 4, max_tokens=20, prediction=answer))
    engine.run()
    assert all(engine.tokens[request] == right(request, 20) for request in requests)
    assert max(engine.runner.batch_sizes) == 4 + 12


def test_warming_up_leaves_no_trace(engine: EngineUnderTest) -> None:
    prompt = list(range(30))
    engine.engine.warm_up(Request("warm", prompt, SamplingParams(max_tokens=2, seed=0, temperature=0.0), 1))
    assert engine.runner.num_tokens == 31
    assert engine.scheduler.kv_cache.pool.num_cached_blocks == 0
    assert engine.scheduler.kv_cache.pool.take_events() == ([], [])
    assert engine.scheduler.stats == SchedulerStats()
    assert engine.engine.stats == EngineStats()
    request = engine.request(prompt)
    engine.run()
    assert request.num_cached_tokens == 0
    assert engine.tokens[request] == right(request, 8)


def test_an_exception_in_a_step_ends_its_requests_and_nothing_else(engine: EngineUnderTest) -> None:
    failed = [engine.request([i] * 5, max_tokens=10) for i in range(3)]
    engine.step()
    engine.runner.fail_next = RuntimeError("kernel")
    engine.step()
    for request in failed:
        error = engine.last[request].error
        assert error is not None
        assert error.reason is Reason.INTERNAL
    after = engine.request([1] * 5, max_tokens=4)
    engine.run()
    assert engine.tokens[after] == right(after, 4)


def test_many_failed_steps_in_a_row_give_the_engine_up(engine: EngineUnderTest) -> None:
    def fail_a_step() -> None:
        request = engine.request([1] * 5)
        engine.runner.fail_next = RuntimeError("kernel")
        engine.step()
        assert engine.last[request].error is not None

    for _ in range(MAX_FAILED_STEPS - 1):
        fail_a_step()
    engine.request([2] * 5, max_tokens=1)
    engine.run()
    for _ in range(MAX_FAILED_STEPS - 1):
        fail_a_step()
    with pytest.raises(EngineFailedError, match="8 steps in a row failed"):
        fail_a_step()


def test_out_of_memory_in_a_step_says_that_trying_again_may_help(engine: EngineUnderTest) -> None:
    request = engine.request([1, 2, 3])
    engine.runner.fail_next = MemoryError()
    engine.step()
    error = engine.last[request].error
    assert error is not None
    assert (error.reason, error.retry_after_s) == (Reason.NO_CAPACITY, 1.0)


def test_tokens_come_with_their_own_log_probabilities_while_the_next_step_runs(engine: EngineUnderTest) -> None:
    engine.is_pipelined = True
    asked = [engine.request([i] * 5, max_tokens=6, num_logprobs=num_top) for i, num_top in enumerate([0, 2, 1])]
    engine.request([9] * 4, max_tokens=3)
    given: dict[Request, list[TokenLogprobs]] = {}
    while engine.scheduler.has_requests or engine.engine.has_outputs:
        for output in engine.step():
            given.setdefault(output.request, []).extend(output.logprobs)
    for request in asked:
        assert [entry.rank for entry in given.pop(request)] == [1] * 6, "greedy takes the best"
    assert list(given.values()) == [[]]


def test_a_block_computed_in_a_failed_step_is_not_found_afterwards(engine: EngineUnderTest) -> None:
    engine.request(list(range(20)), max_tokens=2)
    engine.runner.fail_next = RuntimeError("kernel")
    engine.step()
    again = engine.request(list(range(20)), max_tokens=2)
    engine.run()
    assert again.num_cached_tokens == 0


def test_of_two_that_computed_the_same_blocks_both_hold_the_ones_that_are_found(engine: EngineUnderTest) -> None:
    prompt = list(range(18))
    first = engine.request(prompt, max_tokens=4)
    asked = engine.request(prompt, max_tokens=4, num_prompt_logprobs=0)  # finds nothing: it wants all logits
    while first.num_generated_tokens < 2 or asked.num_generated_tokens < 2:
        engine.step()
    assert asked.num_cached_tokens == 0
    assert asked.block_table[:4] == first.block_table[:4]
    assert asked.block_table[4] != first.block_table[4]
    engine.run()
    assert engine.tokens[first] == engine.tokens[asked] == right(first, 4)


def test_what_is_computed_behind_a_hash_of_other_content_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "next_hash", lambda parent, content: 10 * parent + 1)  # blind to the content
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=4)  # looks for more blocks after each one
    first = engine.request([1] * 14)
    engine.run()
    other = engine.request([2] * 4 + [1] * 10)
    engine.run()
    assert engine.tokens[first] == right(first, 8)
    assert engine.tokens[other] == right(other, 8)
    again = engine.request([2] * 4 + [1] * 10)
    engine.run()
    assert again.num_cached_tokens == 0
    assert engine.tokens[again] == right(again, 8)


@pytest.mark.parametrize("seed", range(4))
def test_colliding_hashes_cost_hits_and_never_a_token(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "next_hash", lambda parent, content: 2 + crc32(content, parent) % 40)
    rng = random.Random(seed)
    engine = make_engine(num_blocks=40, max_num_seqs=4, max_num_batched_tokens=6)
    for _ in range(60):
        engine.request([rng.randrange(2) for _ in range(rng.randint(1, 30))], max_tokens=rng.randint(1, 10))
        for _ in range(rng.randint(0, 4)):
            engine.step()
    engine.run()
    for request, tokens in engine.tokens.items():
        assert tokens == right(request, request.sampling.max_tokens)


@pytest.mark.parametrize("seed", range(20))
def test_random_load_with_cancels_and_preemptions_keeps_every_promise(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        num_blocks=rng.randint(16, 64), max_num_seqs=rng.randint(1, 8), max_num_batched_tokens=rng.randint(10, 40)
    )
    engine.is_pipelined = seed % 2 == 1
    prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))] for _ in range(4)]

    def arrive() -> Request:
        prompt = rng.choice(prefixes) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 8))]
        options = {"num_prompt_logprobs": 0} if rng.random() < 0.1 else {}
        options |= {"num_logprobs": 1} if rng.random() < 0.2 else {}
        priority = rng.choice([0, 0, 0, 1])
        return engine.request(prompt, max_tokens=rng.randint(1, 20), priority=priority, **options)

    cancelled = run_random_load(engine, rng, arrive)
    for request, tokens in engine.tokens.items():
        if request in cancelled:
            assert tokens == right(request, len(tokens))
            assert request not in engine.last
        else:
            assert tokens == right(request, request.sampling.max_tokens)
            assert engine.last[request].finish is FinishReason.LENGTH
