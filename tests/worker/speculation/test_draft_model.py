"""A smaller model drafts: answers are those without, and it always knows the right tokens.

The fake smaller model reads its own blocks, as the fake target does, and then proposes the target's token in a share of
cases. If that share is 1, a rejected token shows that it read a wrong block, a wrong position or a stale token.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from headrace.worker.engine.build import Draft
from headrace.worker.grammar.constraint import ConstraintSource
from headrace.worker.model.batch import Batch
from headrace.worker.request.request import Request
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.penalties import SeenTokens
from headrace.worker.sampling.processors import Edits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.model_drafts import ModelDrafts
from tests.worker.conftest import (
    BLOCK_SIZE,
    VOCAB_SIZE,
    EngineUnderTest,
    KnownCosts,
    RandomRequests,
    make_engine,
    run_random_load,
)
from tests.worker.fake_runner import FakeRunner, expected_tokens
from tests.worker.images import Picture, prompt_of, ready
from tests.worker.speculation.test_engine_with_drafts import answered_alike
from tests.worker.vocabulary import EOS, grammars

# The smaller model's steps cost next to nothing, so that the controller asks for many tokens.
FREE_STEPS = KnownCosts(1e-6, 1e-8)


class FakeDraftRunner(FakeRunner):
    """A smaller model with its own blocks. Its next token is the target's with probability `right`."""

    def __init__(self, num_blocks: int, right: float, vocab_size: int = VOCAB_SIZE) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, vocab_size)
        self.right = right
        self.num_prompt_steps = 0

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """See FakeRunner. Logits of a wrong row are moved by one token."""
        super().bind(batch, keeps_logits=keeps_logits)
        self.num_prompt_steps += not batch.is_decode
        values = self._logits[0].values
        for row, index in enumerate(batch.sampled_tokens_indices.tolist()):
            chance = crc32(np.array([index, *values[row].nonzero()[0].tolist()], np.int64).tobytes()) / 2**32
            if chance >= self.right:
                values[row] = np.roll(values[row], 1)


def engine_with_model(
    right: float, *, num_blocks: int = 128, **options: Any
) -> tuple[EngineUnderTest, FakeDraftRunner]:
    runner = FakeDraftRunner(num_blocks, right)
    draft = Draft(runner, BatchSampler(), FREE_STEPS)
    return make_engine(num_blocks=num_blocks, speculation="draft", draft=draft, **options), runner


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("num_streams", [1, 8])
@pytest.mark.parametrize("right", [1.0, 0.8, 0.0])
def test_answers_are_those_without_drafts(num_streams: int, right: float, is_pipelined: bool) -> None:
    for requests in answered_alike(
        lambda: engine_with_model(right, max_num_batched_tokens=80)[0], num_streams, is_pipelined
    ):
        assert any(request.num_drafted for request in requests)
        if right == 1.0:
            assert all(request.num_accepted == request.num_drafted for request in requests)


def test_the_same_model_as_its_own_draft_is_always_right_and_takes_few_steps() -> None:
    engine, draft_runner = engine_with_model(1.0)
    request = engine.request([1, 2, 3], 64)
    engine.run()
    assert engine.tokens[request] == expected_tokens([1, 2, 3], 64, VOCAB_SIZE)
    assert request.num_accepted == request.num_drafted >= 48
    assert len(engine.runner.batch_sizes) <= 16
    speculation = engine.scheduler.speculation
    assert speculation is not None
    assert speculation.counters["draft_tokens_accepted"] == request.num_accepted
    assert draft_runner.num_tokens <= 3 + 64 + 16, "what the smaller model has computed is not computed again"


def test_it_catches_up_with_a_long_prompt_once_for_all_that_share_it() -> None:
    engine, runner = engine_with_model(1.0, num_blocks=256, max_num_batched_tokens=128)
    prompt = [number % 97 for number in range(200)]
    first = engine.request([*prompt, 1], 20)
    engine.run()
    assert first.num_accepted == first.num_drafted > 0
    steps, tokens = runner.num_prompt_steps, runner.num_tokens
    assert 0 < steps <= 3
    second = engine.request([*prompt, 2], 20)
    engine.run()
    assert second.num_cached_tokens >= 196
    assert second.num_accepted == second.num_drafted > 0
    assert runner.num_prompt_steps == steps, "its part of the cached blocks is found too"
    assert runner.num_tokens - tokens < 60


def test_a_prompt_that_is_dearer_than_its_drafts_are_worth_gets_none() -> None:
    runner = FakeDraftRunner(256, 1.0)
    engine = make_engine(
        256, speculation="draft", draft=Draft(runner, BatchSampler(), KnownCosts(1e-6, 1.0)), max_num_batched_tokens=128
    )
    request = engine.request(list(range(200)), 8)
    engine.run()
    assert request.num_drafted == runner.num_tokens == 0


def test_a_request_with_images_gets_no_drafts_of_a_model_that_does_not_see_them() -> None:
    engine, runner = engine_with_model(1.0)
    prompt = ready(prompt_of([1, 2, 3], Picture(1, 9), [4, 5]))
    request = engine.request(prompt.token_ids, 20, images=prompt.images)
    text = engine.request([1, 2, 3], 20)
    engine.run()
    assert engine.tokens[request] == expected_tokens(prompt.token_ids, 20, VOCAB_SIZE)
    assert request.num_drafted == 0
    assert text.num_drafted > 0
    assert runner.blocks.max() < VOCAB_SIZE, "it never reads a token of an image"


def test_a_cancelled_and_a_preempted_request_leave_nothing_wrong_behind() -> None:
    engine, _ = engine_with_model(1.0, num_blocks=24, max_num_seqs=5, max_num_batched_tokens=40)
    requests = [engine.request([number] * 9, 40) for number in range(5)]
    for _ in range(3):
        engine.step()
    engine.scheduler.cancel(requests[0])
    engine.run()
    assert engine.scheduler.stats.preemptions > 0
    for number, request in enumerate(requests[1:], 1):
        assert engine.tokens[request] == expected_tokens([number] * 9, 40, VOCAB_SIZE)
        assert request.num_accepted == request.num_drafted > 0


def test_a_failing_draft_model_ends_no_request_and_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    engine, runner = engine_with_model(1.0)
    for _ in range(2):
        runner.fail_next = RuntimeError("no kernels")
        request = engine.request([5, 6, 7], 12)
        engine.run()
        assert engine.tokens[request] == expected_tokens([5, 6, 7], 12, VOCAB_SIZE)
        assert request.num_drafted == 0
    helped = engine.request([5, 6, 7], 12)
    engine.run()
    assert helped.num_accepted > 0
    with caplog.at_level(logging.CRITICAL):
        for _ in range(9):
            runner.fail_next = RuntimeError("no kernels")
            request = engine.request([5, 6, 7], 12)
            engine.run()
    assert runner.fail_next is not None, "it is asked again after eight failures"
    assert engine.tokens[request] == expected_tokens([5, 6, 7], 12, VOCAB_SIZE)


@pytest.mark.parametrize("size", [VOCAB_SIZE - 100, VOCAB_SIZE + 100])
def test_vocabularies_may_be_padded_to_other_sizes(size: int) -> None:
    runner = FakeDraftRunner(64, 1.0, size)
    engine = make_engine(speculation="draft", draft=Draft(runner, BatchSampler(), FREE_STEPS))
    requests = [
        engine.request([1, 2, 3], 20, **options)
        for options in ({}, {"logit_bias": ((VOCAB_SIZE - 1, 3.0),)}, {"bad_words": ((VOCAB_SIZE - 1,), (3,))})
    ]
    high = engine.request([VOCAB_SIZE - 1, 2, 3], 20)
    engine.run()
    for request in (requests[0], high):
        assert engine.tokens[request] == expected_tokens(request.prompt_token_ids, 20, VOCAB_SIZE)
    assert set(engine.tokens[requests[1]]) == {VOCAB_SIZE - 1}
    assert (high.num_drafted > 0) == (size > VOCAB_SIZE)


def test_an_answer_beyond_the_smaller_vocabulary_gets_no_more_drafts() -> None:
    """The smaller model has no embedding for its tokens, and penalties would change logits that are not there."""
    size, prompts = VOCAB_SIZE - 10, [[7, 8, number] for number in range(200)]
    answers = [expected_tokens(prompt, 40, VOCAB_SIZE) for prompt in prompts]
    within = next(number for number, answer in enumerate(answers) if max(answer) < size)
    beyond = [number for number, answer in enumerate(answers) if max(answer[:10]) < size <= max(answer[10:30])][:4]
    runner = FakeDraftRunner(128, 1.0, size)
    engine = make_engine(128, speculation="draft", draft=Draft(runner, BatchSampler(), FREE_STEPS))
    assert engine.scheduler.speculation is not None
    drafts = engine.scheduler.speculation.model_drafts
    assert drafts is not None
    requests = [engine.request(prompts[number], 40, repetition_penalty=1.1) for number in (within, *beyond)]
    engine.run()
    for request, number in zip(requests, (within, *beyond), strict=True):
        assert engine.tokens[request] == answers[number]
        assert request.num_drafted > 0
    assert runner.blocks.max() < size, "it gets no token that it does not know"
    assert [drafts.can_serve(request) for request in requests] == [True, False, False, False, False]


def test_the_tokens_of_a_request_are_counted_once_for_all_its_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    for kind in (SeenTokens, Edits):
        begin = kind.__init__

        def counted(self: Any, *args: Any, begin: Any = begin) -> None:
            made.append(1)
            begin(self, *args)

        monkeypatch.setattr(kind, "__init__", counted)
    engine, runner = engine_with_model(0.8)
    options = {"repetition_penalty": 1.3, "frequency_penalty": 0.2, "allowed_token_ids": tuple(range(0, VOCAB_SIZE, 3))}
    request = engine.request([number % 97 for number in range(10)], 60, **options)
    engine.run()
    assert len(runner.batch_sizes) > 20
    assert 0 < request.num_accepted < request.num_drafted, "some were taken back"
    assert sum(made) == 4, "the target's and the smaller model's"


@pytest.mark.parametrize("num_streams", [1, 3])
def test_drafts_follow_a_grammar_beside_penalties(num_streams: int) -> None:
    constraint = asyncio.run(
        grammars().constrain(ConstraintSource("regex", ("[a-f]{40}",)), end_token_ids=[EOS], generated=[])
    )
    options = {"constraint": constraint, "repetition_penalty": 1.3, "frequency_penalty": 0.3, "temperature": 0.7}
    engines = make_engine(), engine_with_model(1.0)[0]
    answers = []
    for engine in engines:
        if engine.scheduler.speculation is not None:
            engine.scheduler.speculation.looks_up = False
        requests = [engine.request([7, seed], 60, seed=seed, **options) for seed in range(num_streams)]
        engine.run()
        answers.append([engine.tokens[request] for request in requests])
    assert answers[0] == answers[1]
    assert all(0 < request.num_accepted == request.num_drafted for request in requests)


def test_a_request_whose_draft_fails_does_not_cost_others_their_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = engine_with_model(1.0)
    assert engine.scheduler.speculation is not None
    drafts = engine.scheduler.speculation.model_drafts
    assert isinstance(drafts, ModelDrafts)
    sample = BatchSampler.sample

    def raising(sampler: BatchSampler, requests: Sequence[Request], *others: Any) -> Any:
        if sampler is drafts._model._sampler and any(request.prompt_token_ids[0] == 9 for request in requests):
            raise ZeroDivisionError
        return sample(sampler, requests, *others)

    monkeypatch.setattr(BatchSampler, "sample", raising)
    good = [engine.request([number, 2], 200) for number in range(2)]
    for number in range(10):  # more than the failures after which it would be given up
        bad = engine.request([9, number], 4)
        while bad not in engine.last:
            engine.step()
        assert bad.num_drafted == 0
    assert all(drafts.can_serve(request) for request in good)
    engine.run()
    for request in good:
        assert engine.tokens[request] == expected_tokens(request.prompt_token_ids, 200, VOCAB_SIZE)
        assert request.num_accepted == request.num_drafted > 100


@pytest.mark.parametrize("seed", range(20))
def test_random_load_with_a_draft_model_keeps_every_promise(seed: int) -> None:
    rng = random.Random(seed)
    right = rng.choice([1.0, 1.0, 0.7, 0.2])
    engine, _ = engine_with_model(
        right,
        num_blocks=rng.randint(20, 64),
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(10, 60),
    )
    engine.is_pipelined = seed % 2 == 1
    requests = RandomRequests(engine, rng)
    requests.check(run_random_load(engine, rng, requests.arrive))
    if right == 1.0:
        for request in engine.tokens:
            assert request.num_accepted == request.num_drafted, "the smaller model has read a wrong token"
    assert any(request.num_accepted for request in engine.tokens)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_fails_in_a_random_load_every_request_ends_once_and_no_block_is_left(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of both models raise, rows of logits are no numbers, and sampling raises."""
    rng = random.Random(seed)
    engine, draft_runner = engine_with_model(
        rng.choice([1.0, 0.7]),
        num_blocks=rng.randint(20, 64),
        max_num_seqs=rng.randint(2, 8),
        max_num_batched_tokens=40,
    )
    engine.is_pipelined = seed % 2 == 1
    engine.scheduler.max_prompt_rows = rng.choice([8, 1000])
    failures = random.Random(seed + 100)
    run = engine.runner.run

    def spoiled() -> Logits:
        if failures.random() < 0.03:
            raise RuntimeError("no kernels")
        logits = run()
        if failures.random() < 0.1 and len(logits.values):
            logits.values[failures.randrange(len(logits.values))] = failures.choice([np.nan, np.inf, -np.inf])
        draft_runner.fail_next = RuntimeError("no kernels") if failures.random() < 0.05 else None
        return logits

    monkeypatch.setattr(engine.runner, "run", spoiled)
    for name in ("sample", "logprobs", "prompt_logprobs"):
        method = getattr(BatchSampler, name)

        def raising(*args: Any, method: Any = method) -> Any:
            if failures.random() < 0.02:
                raise ZeroDivisionError
            return method(*args)

        monkeypatch.setattr(BatchSampler, name, raising)
    requests = RandomRequests(engine, rng)
    cancelled = run_random_load(engine, rng, requests.arrive)
    ended = {request: output for request, output in engine.last.items() if request not in cancelled}
    assert set(engine.tokens) == {*ended, *cancelled}
    assert any(output.error is not None for output in ended.values())
    for request, output in ended.items():
        given = engine.tokens[request]
        assert (output.finish is None) == (output.error is not None)
        if 0 not in requests.right[request]:
            assert given == requests.right[request][: len(given)], "what came before the error is as it was"
        if output.finish is not None:
            assert len(given) == len(requests.right[request])
