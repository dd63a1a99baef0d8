"""Beam searches of the engine over the fake runner find what a plain search finds, and share blocks."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest

from headrace.protos.status import Reason
from headrace.worker.request.params import BeamParams, EarlyStopping
from headrace.worker.request.request import FinishReason, Request, RequestState
from headrace.worker.request.stop_texts import StopTexts
from tests.worker.beam_reference import Answer, log_softmax, search
from tests.worker.conftest import BLOCK_SIZE, RANDOM_STEPS, VOCAB_SIZE, EngineUnderTest, make_engine
from tests.worker.fake_runner import FakeRunner, next_token
from tests.worker.images import Picture, prompt_of, ready

STOPS = frozenset({3, 5})
STOPPING = {False: EarlyStopping.HEURISTIC, True: EarlyStopping.ALWAYS, "never": EarlyStopping.NEVER}
PROMPT = list(range(40, 57))
TOKEN_TEXTS = [f" {token_id}" for token_id in range(VOCAB_SIZE)]


def logits_after(context: Sequence[int]) -> npt.NDArray[np.float32]:
    """See `_logits_after`."""
    return _logits_after(tuple(context))


@lru_cache(maxsize=20_000)
def _logits_after(context: tuple[int, ...]) -> npt.NDArray[np.float32]:
    """Logits that depend on the whole context, with a few likely tokens, the stop tokens among them."""
    likely = np.array([*STOPS, *(crc32(bytes([number])) % VOCAB_SIZE for number in range(12))])
    rng = np.random.default_rng(crc32(np.asarray(context, np.int64).tobytes()))
    logits = np.zeros(VOCAB_SIZE, np.float32)
    logits[likely] = 6.0 + 2.0 * rng.standard_normal(len(likely))
    logits[next_token(context, VOCAB_SIZE)] = 8.0
    return logits


class DenseRunner(FakeRunner):
    """Gives those logits."""

    def logits_after(self, context: Sequence[int]) -> npt.NDArray[np.float32]:
        """See FakeRunner."""
        return logits_after(context)


def dense(**options: Any) -> EngineUnderTest:
    return make_engine(**{"max_num_seqs": 16, "num_blocks": 128, "make_runner": DenseRunner, **options})


def ask(
    engine: EngineUnderTest,
    prompt: list[int],
    width: int,
    max_tokens: int = 12,
    *,
    length_penalty: float = 1.0,
    early_stopping: bool | str = False,
    **options: Any,
) -> Request:
    beams = BeamParams(width, length_penalty, STOPPING[early_stopping])
    return engine.request(prompt, max_tokens, stop_token_ids=STOPS, beam_search=beams, **options)


def right(prompt: Sequence[int], width: int, max_tokens: int = 12, **options: Any) -> list[Answer]:
    return search(
        lambda contexts: log_softmax(np.stack([logits_after(context) for context in contexts])),
        prompt,
        width=width,
        max_tokens=max_tokens,
        stops=STOPS,
        **options,
    )


def check(engine: EngineUnderTest, request: Request, answers: Sequence[Answer]) -> None:
    """Assert that the request got these answers, in one output."""
    last = engine.last[request]
    assert last.error is None
    assert engine.tokens[request] == []
    assert [list(one.token_ids) for one in last.hypotheses] == [answer.token_ids for answer in answers]
    assert [one.score for one in last.hypotheses] == pytest.approx([answer.score for answer in answers], abs=1e-5)
    for one in last.hypotheses:
        ends = one.token_ids[-1] in STOPS
        assert one.stop_token_id == (one.token_ids[-1] if ends else None)
        assert ends or len(one.token_ids) == request.sampling.max_tokens
    first = last.hypotheses[0]
    assert last.finish is (FinishReason.LENGTH if first.stop_token_id is None else FinishReason.STOP)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [-1.5, 0.0, 1.0, 2.0])
def test_answers_are_those_of_a_plain_search(width: int, early_stopping: bool | str, length_penalty: float) -> None:
    engine = dense()
    options: dict[str, Any] = {"length_penalty": length_penalty, "early_stopping": early_stopping}
    request = ask(engine, PROMPT, width, **options)
    engine.run()
    check(engine, request, right(PROMPT, width, **options))


@pytest.mark.parametrize("is_whole", [False, True])
def test_beams_behind_images_see_them(is_whole: bool) -> None:
    """In chunks or whole, beside a search over another image, and again from the cache."""
    engine = dense(max_num_seqs=8, max_num_batched_tokens=16)
    prompts = [prompt_of([1, 2, 3], Picture(number, 17), [4, 5], Picture(9, 6), [6]) for number in (1, 2)]
    for _ in range(2):
        requests = []
        for prompt in prompts:
            tokens, images = ready(prompt, is_whole=is_whole)
            requests.append(ask(engine, tokens, 3, images=images))
        engine.run()
        for prompt, request in zip(prompts, requests, strict=True):
            check(engine, request, right(prompt.token_ids, 3))
    assert all(request.num_cached_tokens >= 20 for request in requests)


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5, 8, 9])
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 9])
def test_prompts_and_answers_may_end_anywhere_in_a_block(num_prompt: int, max_tokens: int) -> None:
    engine = dense()
    request = ask(engine, PROMPT[:num_prompt], 4, max_tokens)
    engine.run()
    check(engine, request, right(PROMPT[:num_prompt], 4, max_tokens))


def test_no_answer_ends_before_its_least_tokens() -> None:
    engine = dense()
    prompt = PROMPT[:12]
    request = ask(engine, prompt, 4, min_tokens=7)
    engine.run()
    check(engine, request, right(prompt, 4, min_tokens=7))
    assert min(len(one.token_ids) for one in engine.last[request].hypotheses) > 7
    assert min(len(answer.token_ids) for answer in right(prompt, 4)) <= 7, "the case needs shorter answers"


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("early_stopping", [False, True])
def test_answers_end_at_texts_across_tokens(width: int, early_stopping: bool) -> None:
    # The penalty favours short answers.
    options: dict[str, Any] = {"early_stopping": early_stopping, "min_tokens": 8, "length_penalty": -1.5}
    second, third = (TOKEN_TEXTS[token_id] for token_id in right(PROMPT, width, **options)[0].token_ids[1:3])
    texts = second[-1] + third[:2], "never"

    def is_complete(token_ids: Sequence[int]) -> bool:
        return any(text in "".join(TOKEN_TEXTS[token_id] for token_id in token_ids) for text in texts)

    engine = dense()
    beams = BeamParams(width, -1.5, STOPPING[early_stopping], stop=texts)
    request = engine.request(PROMPT, 12, stop_token_ids=STOPS, beam_search=beams, min_tokens=8)
    assert request.beams is not None
    request.beams.end_at(StopTexts(texts, [text.encode() for text in TOKEN_TEXTS], ()))
    engine.run()
    answers = right(PROMPT, width, is_text_complete=is_complete, **options)
    found = [list(one.token_ids) for one in engine.last[request].hypotheses]
    assert found == [answer.token_ids for answer in answers]
    assert any(is_complete(token_ids) for token_ids in found), "the case needs an answer that a text ends"


def test_a_search_of_one_beam_is_greedy_until_a_stop_token() -> None:
    engine = dense()
    beam = ask(engine, PROMPT, 1, early_stopping=True)
    greedy = engine.request(PROMPT, 12, stop_token_ids=STOPS)
    engine.run()
    assert list(engine.last[beam].hypotheses[0].token_ids) == engine.tokens[greedy]


def test_a_cached_prompt_is_not_computed_again() -> None:
    engine = dense()
    first = ask(engine, PROMPT, 4)
    engine.run()
    computed = engine.runner.num_tokens
    second = ask(engine, PROMPT, 4)
    engine.run()
    assert second.num_cached_tokens == len(PROMPT) - 2
    assert engine.runner.num_tokens - computed == computed - second.num_cached_tokens
    for request in (first, second):
        check(engine, request, right(PROMPT, 4))


def test_beams_share_the_blocks_of_the_prompt_and_of_what_they_have_in_common() -> None:
    prompt = [*range(100, 180)]
    engine = dense()
    pool = engine.scheduler.kv_cache.pool
    ask(engine, prompt, 8, 24, min_tokens=24)
    most = 0
    while engine.scheduler.has_requests:
        engine.step()
        most = max(most, pool.num_blocks - pool.num_free_blocks)
    alone = len(prompt) // BLOCK_SIZE
    assert most <= alone + 8 * 24 // BLOCK_SIZE // 2, "eight beams that share nothing would hold twice as many"


def test_log_probabilities_are_those_of_the_tokens() -> None:
    engine = dense()
    request = ask(engine, PROMPT, 4, num_logprobs=2)
    engine.run()
    check(engine, request, right(PROMPT, 4))
    for one in engine.last[request].hypotheses:
        context = list(PROMPT)
        for token_id, entry in zip(one.token_ids, one.logprobs, strict=True):
            logprobs = log_softmax(logits_after(context))
            order = np.argsort(-logprobs, kind="stable")
            assert entry.logprob == pytest.approx(logprobs[token_id], abs=1e-5)
            assert entry.rank == 1 + int(np.flatnonzero(order == token_id)[0])
            assert entry.top_token_ids == tuple(order[:2].tolist())
            assert entry.top_logprobs == pytest.approx(logprobs[order[:2]].tolist(), abs=1e-5)
            context.append(token_id)
        assert sum(entry.logprob for entry in one.logprobs) / len(one.token_ids) == pytest.approx(one.score, abs=1e-5)


def test_log_probabilities_of_the_prompt_come_with_the_answers() -> None:
    engine = dense()
    request = ask(engine, PROMPT, 3, num_prompt_logprobs=1)
    other = engine.request(PROMPT, 5, num_prompt_logprobs=1)
    engine.run()
    check(engine, request, right(PROMPT, 3))
    assert list(request.prompt_logprobs) == list(other.prompt_logprobs)
    assert len(request.prompt_logprobs) == len(PROMPT) - 1


def test_streams_beside_a_search_get_their_tokens() -> None:
    engine = dense()
    streams = [engine.request(PROMPT[:number], 20) for number in (3, 9, 14)]
    request = ask(engine, PROMPT, 4)
    late = engine.request(list(range(200, 260)), 6, num_logprobs=1)
    engine.run()
    check(engine, request, right(PROMPT, 4))
    for stream in (*streams, late):
        alone = dense()
        same = alone.request(list(stream.prompt_token_ids), stream.sampling.max_tokens)
        alone.run()
        assert engine.tokens[stream] == alone.tokens[same]


def test_drafts_of_streams_beside_a_search_are_verified() -> None:
    engine = dense(speculation="ngram")
    alone = dense()
    same = alone.request([7, 8] * 8, 20)
    alone.run()
    stream = engine.request([7, 8] * 8, 20, prediction=alone.tokens[same])
    request = ask(engine, PROMPT, 4, 16)
    engine.run()
    check(engine, request, right(PROMPT, 4, 16))
    assert engine.tokens[stream] == alone.tokens[same]
    assert stream.num_accepted, "the case needs drafts"


def test_a_search_waits_until_all_of_its_beams_have_places() -> None:
    engine = dense(max_num_seqs=6)
    stream = engine.request(PROMPT, 10)
    search_ = ask(engine, PROMPT, 6)
    behind = engine.request(PROMPT, 10)
    engine.step()
    assert (stream.state, search_.state, behind.state) == (
        RequestState.RUNNING,
        RequestState.WAITING,
        RequestState.WAITING,
    )
    engine.run()
    check(engine, search_, right(PROMPT, 6))


def test_a_search_that_loses_its_blocks_finds_the_same_answers() -> None:
    engine = dense(num_blocks=24)
    first = engine.request(list(range(300, 330)), 50)
    request = ask(engine, PROMPT, 6, 14, min_tokens=14)
    engine.run()
    assert request.num_preemptions
    check(engine, request, right(PROMPT, 6, 14, min_tokens=14))
    assert len(engine.tokens[first]) == 50


def test_a_search_takes_the_blocks_of_requests_behind_it() -> None:
    engine = dense(num_blocks=24)
    request = ask(engine, PROMPT, 6, 14, min_tokens=14)
    behind = engine.request(list(range(300, 330)), 50)
    engine.run()
    assert behind.num_preemptions
    check(engine, request, right(PROMPT, 6, 14, min_tokens=14))
    assert len(engine.tokens[behind]) == 50


def test_in_the_background_a_search_gives_its_places_to_others() -> None:
    engine = dense(max_num_seqs=6)
    background = ask(engine, PROMPT, 6, priority=-(2**31))
    for _ in range(4):
        engine.step()
    stream = engine.request(PROMPT, 4)
    engine.step()
    assert background.num_preemptions == 1
    assert stream.state is RequestState.RUNNING
    engine.run()
    check(engine, background, right(PROMPT, 6))


def test_a_cancelled_search_gives_back_all_blocks() -> None:
    for num_steps in range(1, 12):
        engine = dense()
        request = ask(engine, PROMPT, 4, 12, min_tokens=12)
        for _ in range(num_steps):
            engine.step()
        engine.scheduler.cancel(request)
        engine.run()
        assert request not in engine.last


def test_a_step_that_fails_ends_a_search() -> None:
    engine = dense()
    request = ask(engine, PROMPT, 4)
    for _ in range(3):
        engine.step()
    engine.runner.fail_next = RuntimeError("kernel")
    engine.run()
    error = engine.last[request].error
    assert error is not None
    assert error.reason is Reason.INTERNAL


def test_logits_that_are_not_numbers_end_only_that_search() -> None:
    class Broken(DenseRunner):
        def logits_after(self, context: Sequence[int]) -> npt.NDArray[np.float32]:
            logits = super().logits_after(context)
            return logits * np.float32(np.nan) if context[0] == 999 and len(context) > 6 else logits

    engine = dense(make_runner=Broken)
    broken = ask(engine, [999, 1, 2, 4], 3)
    request = ask(engine, PROMPT, 3)
    engine.run()
    error = engine.last[broken].error
    assert error is not None
    assert "not numbers" in str(error)
    check(engine, request, right(PROMPT, 3))


def test_a_failure_while_candidates_are_read_ends_only_its_search(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = dense()
    broken, request = ask(engine, [9, 8, 7], 2), ask(engine, PROMPT, 3)
    sampler = engine.engine._isolated._sampler
    genuine = sampler.candidates

    def candidates(logits: Any, num_top: Sequence[int]) -> Any:
        if broken.beams is not None and broken.beams.num_candidates in num_top:
            raise RuntimeError("broken")
        return genuine(logits, num_top)

    monkeypatch.setattr(sampler, "candidates", candidates)
    engine.run()
    assert engine.last[broken].error is not None
    check(engine, request, right(PROMPT, 3))


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_blocks", [40, 90])
def test_under_random_load_every_search_is_right(seed: int, num_blocks: int) -> None:
    """Searches and streams that share prefixes come, are preempted, and are cancelled."""
    rng = random.Random(seed)
    engine = dense(num_blocks=num_blocks, max_num_seqs=12)
    engine.is_pipelined = seed % 2 == 1
    searches: dict[Request, list[Answer]] = {}
    cancelled = set()
    for _ in range(RANDOM_STEPS // 3):
        if rng.random() < 0.2:
            prompt = PROMPT[: rng.randint(1, len(PROMPT))] + [rng.randrange(60, 64) for _ in range(rng.randint(0, 3))]
            width, length, penalty = rng.choice([1, 2, 4, 8]), rng.randint(1, 12), rng.choice([0.0, 1.0])
            request = ask(engine, prompt, width, length, length_penalty=penalty)
            searches[request] = right(prompt, width, length, length_penalty=penalty)
        if rng.random() < 0.2:
            engine.request(PROMPT[: rng.randint(1, len(PROMPT))], rng.randint(1, 20))
        open_ = [request for request in searches if request.state is not RequestState.FINISHED]
        if open_ and rng.random() < 0.05:
            request = rng.choice(open_)
            cancelled.add(request)
            engine.scheduler.cancel(request)
        engine.step()
    engine.run()
    for request, answers in searches.items():
        if request not in cancelled:
            check(engine, request, answers)
    assert len(searches) > len(cancelled)
    assert not list(itertools.chain(*(request.beam_tails for request in searches)))
