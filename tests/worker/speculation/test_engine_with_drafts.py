"""The engine with drafts gives every request the same tokens as without, for any proposals."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest

from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput
from tests.worker.conftest import VOCAB_SIZE, EngineUnderTest, RandomRequests, make_engine, run_random_load
from tests.worker.fake_runner import expected_tokens

SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"num_logprobs": 2},
    {"temperature": 0.9, "num_logprobs": 1},
    {"temperature": 0.7, "top_p": 0.9, "top_k": 50},
    {"frequency_penalty": 0.5, "presence_penalty": 0.5, "temperature": 0.3, "num_logprobs": 1},
    {"repetition_penalty": 1.3, "num_logprobs": 0},
    {"logit_bias": ((3, 4.0), (5, -4.0)), "temperature": 0.4},
    {"min_tokens": 20, "stop_token_ids": frozenset(range(100))},
    {"stop_token_ids": frozenset(range(60)), "num_logprobs": 1},
    {"stop_token_ids": frozenset(range(60)), "presence_penalty": 0.1, "min_tokens": 3},
    {"allowed_token_ids": tuple(range(0, VOCAB_SIZE, 3))},
]


def answers(engine: EngineUnderTest, requests: list[Request]) -> list[tuple[Any, ...]]:
    """Tokens, log-probabilities and ends of requests, from steps until nothing is left."""
    given: dict[Request, list[RequestOutput]] = {request: [] for request in requests}
    while engine.scheduler.has_requests or engine.engine.has_outputs:
        for output in engine.step():
            given[output.request].append(output)
    return [
        (
            engine.tokens[request],
            [entry for output in given[request] for entry in output.logprobs],
            engine.last[request].finish,
            engine.last[request].stop_token_id,
            engine.last[request].error,
        )
        for request in requests
    ]


@cache
def plain_answers(num_streams: int, prompt_length: int) -> list[tuple[list[list[int]], list[tuple[Any, ...]]]]:
    """For each sampling, random prompts and their answers without drafts."""
    rng = random.Random(num_streams)
    found = []
    for sampling in SAMPLINGS:
        prompts = [[rng.randrange(VOCAB_SIZE) for _ in range(prompt_length)] for _ in range(num_streams)]
        engine = make_engine(max_num_batched_tokens=80, num_blocks=128)
        found.append((prompts, answers(engine, [engine.request(prompt, 30, seed=7, **sampling) for prompt in prompts])))
    return found


def answered_alike(
    with_drafts: Callable[[], EngineUnderTest], num_streams: int, is_pipelined: bool
) -> Iterator[list[Request]]:
    """Compare the answers of an engine with drafts with those of one without, for each sampling. Yields the requests of
    the former."""
    for (prompts, wanted), sampling in zip(plain_answers(num_streams, 29), SAMPLINGS, strict=True):
        engine = with_drafts()
        engine.is_pipelined = is_pipelined
        requests = [engine.request(prompt, 30, seed=7, **sampling) for prompt in prompts]
        assert answers(engine, requests) == wanted, sampling
        yield requests


def prediction_of(rng: random.Random, tokens: list[int], share_wrong: float) -> list[int]:
    return [rng.randrange(VOCAB_SIZE) if rng.random() < share_wrong else token for token in tokens]


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("num_streams", [1, 8])
@pytest.mark.parametrize("share_wrong", [0.0, 0.15, 1.0])
def test_answers_are_those_without_drafts(num_streams: int, share_wrong: float, is_pipelined: bool) -> None:
    rng = random.Random(num_streams)
    for (prompts, wanted), sampling in zip(plain_answers(num_streams, 9), SAMPLINGS, strict=True):
        engine = make_engine(max_num_batched_tokens=80, num_blocks=128, speculation="ngram")
        engine.is_pipelined = is_pipelined
        requests = [
            engine.request(prompt, 30, seed=7, prediction=prediction_of(rng, tokens, share_wrong), **sampling)
            for prompt, (tokens, *_) in zip(prompts, wanted, strict=True)
        ]
        assert answers(engine, requests) == wanted
        if share_wrong == 0.0:
            assert sum(request.num_accepted for request in requests) > 0
        assert all(request.num_accepted <= request.num_drafted for request in requests)


def test_a_right_prediction_takes_few_steps() -> None:
    right = expected_tokens([1, 2, 3], 32, VOCAB_SIZE)
    engine = make_engine(speculation="ngram")
    request = engine.request([1, 2, 3], 32, prediction=right)
    engine.run()
    assert engine.tokens[request] == right
    assert len(engine.runner.batch_sizes) <= 1 + 5
    assert request.num_accepted == request.num_drafted >= 24
    speculation = engine.scheduler.speculation
    assert speculation is not None
    assert speculation.counters["prediction_tokens_accepted"] == request.num_accepted


def test_routers_are_told_of_the_time_of_a_token() -> None:
    right = expected_tokens([1, 2, 3], 200, VOCAB_SIZE)
    for speculation in ("off", "ngram"):
        engine = make_engine(speculation=speculation)
        engine.request([1, 2, 3], 200, prediction=right)
        engine.run()
        rates = engine.scheduler.step_costs.rates
        assert (rates.tokens_per_stream > 4) == (speculation == "ngram")
        rates.observe_decode(8.0)
        assert rates.decode_token_ms == pytest.approx(rates.decode_step_ms / rates.tokens_per_stream)
        rates.tokens_per_stream = 1.0  # all engines of these tests share what steps cost


def test_a_step_delivers_several_tokens_with_their_logprobs() -> None:
    right = expected_tokens([1, 2, 3], 16, VOCAB_SIZE)
    engine = make_engine(speculation="ngram")
    engine.request([1, 2, 3], 16, prediction=right, num_logprobs=1)
    engine.step()
    (output,) = engine.step()
    assert list(output.token_ids) == right[1:9]
    assert len(output.logprobs) == 8
    engine.run()


def test_only_accepted_tokens_are_published() -> None:
    right = expected_tokens([1, 2, 3, 4], 40, VOCAB_SIZE)
    wrong = [right[0], *((token + 1) % VOCAB_SIZE for token in right[1:])]
    sequence = [1, 2, 3, 4, *right]
    found = []
    for speculation in ("off", "ngram"):
        engine = make_engine(speculation=speculation)
        first = engine.request([1, 2, 3, 4], 40, prediction=wrong)
        engine.run()
        assert (first.num_drafted > 0) == (speculation == "ngram")
        stored, _ = engine.scheduler.kv_cache.pool.take_events()
        again = engine.request(sequence, 4)
        engine.run()
        assert engine.tokens[again] == expected_tokens(sequence, 4, VOCAB_SIZE)
        found.append((stored, again.num_cached_tokens))
    assert found[0] == found[1]


def test_drafts_take_no_block_that_a_stream_needs() -> None:
    engine = make_engine(num_blocks=16, max_num_seqs=3, max_num_batched_tokens=40, speculation="ngram")
    requests = [
        engine.request([number] * 4, 12, prediction=expected_tokens([number] * 4, 12, VOCAB_SIZE))
        for number in range(3)
    ]
    engine.run()
    assert engine.scheduler.stats.preemptions == 0
    for number, request in enumerate(requests):
        assert engine.tokens[request] == expected_tokens([number] * 4, 12, VOCAB_SIZE)


@pytest.mark.parametrize("seed", range(20))
def test_random_load_with_drafts_cancels_and_preemptions_keeps_every_promise(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        num_blocks=rng.randint(16, 64),
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(10, 60),
        speculation=rng.choice(["ngram", "auto"]),
    )
    engine.is_pipelined = seed % 2 == 1

    def prediction(tokens: list[int]) -> dict[str, Any]:
        return {"prediction": prediction_of(rng, tokens, rng.choice([0.0, 0.1, 0.5]))}

    requests = RandomRequests(engine, rng, prediction)
    requests.check(run_random_load(engine, rng, requests.arrive))
    assert any(request.num_accepted for request in engine.tokens)
