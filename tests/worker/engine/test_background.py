"""Requests in the background take only what others leave."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from headrace.protos.priorities import BACKGROUND_PRIORITY
from headrace.worker.engine.forecast import Forecast
from headrace.worker.engine.step_cost import StepCosts, StepShape
from headrace.worker.engine.thread import load_of
from headrace.worker.request.request import Request, RequestState
from tests.worker.conftest import VOCAB_SIZE, EngineUnderTest, KnownCosts, make_engine
from tests.worker.fake_runner import expected_tokens


def background(engine: EngineUnderTest, prompt: list[int], max_tokens: int = 20) -> Request:
    return engine.request(prompt, max_tokens=max_tokens, priority=BACKGROUND_PRIORITY)


def progress(requests: Sequence[Request]) -> list[int]:
    return [request.num_computed_tokens for request in requests]


class Costs(StepCosts):
    """A decode step takes 100 ms, and a sequence more in it `sequence_ms`."""

    def __init__(self, sequence_ms: float) -> None:
        super().__init__()
        for number in range(600):
            sequences = 1 + number % 9
            shape = StepShape(sequences, 0, 0, sequences * (number % 50), sequences, 0, number % 2 == 0)
            self.decode.observe(shape, 100 + sequence_ms * sequences)
            self.prompts.observe(shape, 100 + sequence_ms * sequences)

    def observe(self, shape: StepShape, milliseconds: float, *, is_first: bool) -> None:
        """See StepCosts."""


def test_nothing_of_it_is_computed_where_it_would_slow_others() -> None:
    engine = make_engine()
    engine.scheduler.step_costs = Costs(sequence_ms=50)
    running = background(engine, [1] * 4)
    engine.step()
    engine.step()
    stream = engine.request([2] * 4, max_tokens=6)
    late = background(engine, [3] * 8)
    before = progress([running, late])
    while stream.state is not RequestState.FINISHED:
        engine.step()
        assert progress([running, late]) == before
        assert running.state is RequestState.RUNNING
    engine.run()
    assert engine.tokens[running] == expected_tokens([1] * 4, 20, VOCAB_SIZE)
    assert engine.tokens[late] == expected_tokens([3] * 8, 20, VOCAB_SIZE)


def test_streams_go_along_where_they_cost_next_to_nothing() -> None:
    engine = make_engine()
    engine.scheduler.step_costs = Costs(sequence_ms=0.1)
    running = background(engine, [1] * 4)
    engine.step()
    stream = engine.request([2] * 4, max_tokens=6)
    engine.step()  # the prompt of the stream is computed alone
    before = running.num_computed_tokens
    late = background(engine, [3] * 8)
    while stream.state is not RequestState.FINISHED:
        engine.step()
    assert running.num_computed_tokens > before
    assert late.num_computed_tokens == 0, "a prompt makes a step long"
    engine.run()
    assert engine.tokens[running] == expected_tokens([1] * 4, 20, VOCAB_SIZE)


def test_it_gives_its_place_to_others() -> None:
    engine = make_engine(max_num_seqs=2)
    first, second = background(engine, [1] * 4), background(engine, [2] * 4)
    engine.step()
    stream = engine.request([3] * 4, max_tokens=4)
    engine.step()
    assert [first.state, second.state, stream.state] == [
        RequestState.RUNNING,
        RequestState.WAITING,
        RequestState.RUNNING,
    ]
    other = engine.request([4] * 4, max_tokens=4)
    engine.step()
    assert (first.state, other.state) == (RequestState.WAITING, RequestState.RUNNING)
    load = load_of(engine.scheduler)
    assert (load.num_running, load.num_running_background, load.num_waiting_background) == (2, 0, 2)
    engine.run()
    for request, prompt in ((first, [1] * 4), (second, [2] * 4)):
        assert engine.tokens[request] == expected_tokens(prompt, 20, VOCAB_SIZE)


def test_it_gives_its_blocks_to_others() -> None:
    engine = make_engine(num_blocks=8)
    running = background(engine, [1] * 16, max_tokens=8)
    engine.step()
    stream = engine.request([2] * 24, max_tokens=4)
    engine.step()
    assert (running.state, stream.state) == (RequestState.WAITING, RequestState.RUNNING)
    engine.run()
    assert engine.tokens[running] == expected_tokens([1] * 16, 8, VOCAB_SIZE)


def test_nobody_is_told_to_wait_for_it() -> None:
    engine = make_engine(num_blocks=8, max_num_seqs=2)
    engine.scheduler.step_costs = KnownCosts(step_ms=1000.0, token_ms=1000.0)
    forecast = Forecast(engine.scheduler, 0.5)
    for prompt in ([1] * 12, [2] * 12):
        background(engine, prompt)
    engine.step()
    forecast.observe()
    new = Request("new", [3] * 4, engine.scheduler.running[0].sampling, root_hash=1)
    assert forecast.wait_s(new)[0] == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_every_answer_is_right_under_any_load(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(num_blocks=rng.randint(12, 40), max_num_seqs=rng.randint(2, 6))
    engine.scheduler.step_costs = Costs(sequence_ms=rng.choice([0.01, 50.0]))
    requests: list[tuple[Request, list[int], int]] = []
    for _ in range(200):
        if rng.random() < 0.3:
            prompt = [rng.randrange(1, 5)] * rng.randint(1, 20)
            number = rng.randint(1, 12)
            priority = rng.choice([BACKGROUND_PRIORITY, BACKGROUND_PRIORITY, 0, 1])
            requests.append((engine.request(prompt, max_tokens=number, priority=priority), prompt, number))
        if engine.scheduler.has_requests:
            engine.step()
        if requests and rng.random() < 0.03:
            engine.scheduler.cancel(requests.pop(rng.randrange(len(requests)))[0])
    engine.run()
    for request, prompt, number in requests:
        assert engine.tokens[request] == expected_tokens(prompt, number, VOCAB_SIZE)
