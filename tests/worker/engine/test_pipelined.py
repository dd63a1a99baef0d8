"""The engine of a pipeline: several steps on their way, with other requests each."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from headrace.worker.engine.build import build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.model.batch import Batch
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request, RequestState
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from tests.worker.conftest import CHEAP_STEPS
from tests.worker.fake_runner import FakeRunner, expected_tokens

VOCABULARY, BLOCK = 97, 4


class FakePipeline(FakeRunner):
    """A pipeline that computes nothing. Its later stages compute a step when its result is waited for."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK, VOCABULARY)
        self._on_way: deque[Batch] = deque()
        self.most_on_way = 0
        self.step_tokens: list[int] = []

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Begin a step."""
        del keeps_logits
        assert not any(set(batch.sampled) & set(other.sampled) for other in self._on_way)
        self._on_way.append(batch)
        self.step_tokens.append(len(batch.input_ids))
        self.most_on_way = max(self.most_on_way, len(self._on_way))

    def run(self) -> Logits:
        """End the first."""
        super().bind(self._on_way.popleft(), keeps_logits=True)
        return super().run()


def engine_of(
    num_blocks: int, steps_at_once: int, max_num_seqs: int = 16, max_num_mixed_tokens: int = 64
) -> tuple[Engine, FakePipeline]:
    runner = FakePipeline(num_blocks)
    limits = StepLimits(max_num_seqs, 64, max_num_mixed_tokens, is_exact=True)
    engine = build_engine(
        runner, BatchSampler(), num_blocks, limits, step_costs=CHEAP_STEPS, steps_at_once=steps_at_once
    )
    return engine, runner


def request_of(number: int, length: int, max_tokens: int) -> Request:
    prompt = [(31 * number + 7 * place) % VOCABULARY for place in range(length)]
    sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
    return Request(f"r{number}", prompt, sampling, number)


def run(engine: Engine) -> None:
    while engine.scheduler.has_requests:
        engine.step()
        engine.scheduler.check()


def assert_greedy(requests: Sequence[Request]) -> None:
    for request in requests:
        prompt = list(request.token_ids[: request.num_prompt_tokens])
        found = list(request.token_ids[request.num_prompt_tokens :])
        assert found == expected_tokens(prompt, request.sampling.max_tokens, VOCABULARY), request.request_id


@pytest.mark.parametrize("steps_at_once", [2, 3])
def test_all_stages_have_steps_of_other_requests(steps_at_once: int) -> None:
    engine, runner = engine_of(400, steps_at_once)
    requests = [request_of(number, 5 + number, 20) for number in range(8)]
    for request in requests:
        engine.scheduler.add(request)
    run(engine)
    assert runner.most_on_way == steps_at_once
    assert_greedy(requests)
    decode = [size for size in runner.batch_sizes if size <= 8]
    # Each step has its part of the streams.
    assert max(decode[20:40]) <= -(-8 // steps_at_once)


def test_one_request_is_in_one_step_at_a_time() -> None:
    engine, runner = engine_of(100, 2)
    request = request_of(1, 30, 12)
    engine.scheduler.add(request)
    run(engine)
    assert runner.most_on_way == 1
    assert_greedy([request])


def test_a_stream_does_not_wait_for_a_prompt_that_takes_a_whole_step() -> None:
    """A prompt in a step of its own has the tokens of one with streams, because these wait for its step."""
    engine, runner = engine_of(100, 2, max_num_mixed_tokens=24)
    stream, prompt = request_of(1, 4, 30), request_of(2, 120, 2)
    engine.scheduler.add(stream)
    for _ in range(3):
        engine.step()
    engine.scheduler.add(prompt)
    run(engine)
    assert 8 < max(runner.step_tokens) <= 24
    assert_greedy([stream, prompt])


def test_a_step_is_ended_before_it_is_given_up() -> None:
    """A step whose requests have been cancelled on its way gives nothing, and takes nothing from others."""
    engine, _ = engine_of(100, 2)
    requests = [request_of(number, 6, 12) for number in range(4)]
    for request in requests:
        engine.scheduler.add(request)
    for _ in range(5):
        engine.step()
    cancelled = requests[::2]
    for request in cancelled:
        engine.scheduler.cancel(request)
        engine.scheduler.check()
    run(engine)
    assert all(request.state is RequestState.FINISHED for request in requests)
    assert_greedy(requests[1::2])


@pytest.mark.parametrize("seed", range(12))
def test_answers_are_right_whatever_comes_and_goes(seed: int) -> None:
    """Requests arrive and are cancelled at any time, prompts share beginnings, and blocks are short."""
    rng = random.Random(seed)
    engine, _ = engine_of(rng.randint(24, 40), rng.randint(2, 4), max_num_seqs=6)
    alive: list[Request] = []
    for number in range(40):
        request = request_of(number % 5, rng.randint(3, 40), rng.randint(1, 16))
        request.arrival_s = number
        engine.scheduler.add(request)
        alive.append(request)
        for _ in range(rng.randint(0, 6)):
            engine.step()
            engine.scheduler.check()
        if rng.random() < 0.3:
            victim = rng.choice(alive)
            if victim.state is not RequestState.FINISHED:
                engine.scheduler.cancel(victim)
                alive.remove(victim)
                engine.scheduler.check()
    run(engine)
    done = [request for request in alive if request.state is RequestState.FINISHED]
    assert len(done) == len(alive) > 20
    assert_greedy(done)
    assert engine.scheduler.kv_cache.num_free_blocks == engine.scheduler.kv_cache.num_blocks
