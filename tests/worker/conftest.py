"""An engine over the fake runner, checked after every step, and the small model of a module."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.cli.models.convert import convert
from headrace.worker.engine.build import Draft, build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.engine.scheduler import Scheduler
from headrace.worker.engine.step_cost import StepCosts, StepShape
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import FinishReason, Request, RequestState
from headrace.worker.request.step import RequestOutput
from headrace.worker.sampling.sampler import BatchSampler
from tests.gguf_models import write_gguf
from tests.worker.fake_runner import FakeRunner, expected_tokens

# Steps of a random load. The tests have twenty seeds: 6,000 steps in all, or 100,000 as a soak.
RANDOM_STEPS = 5000 if os.environ.get("HEADRACE_SOAK") else 300
VOCAB_SIZE = 997
BLOCK_SIZE = 4


@dataclass
class EngineUnderTest:
    """Runs requests and collects their outputs: after whole steps, or, if `is_pipelined`, while the next step runs, as
    in the worker's thread."""

    engine: Engine
    runner: FakeRunner
    tokens: dict[Request, list[int]] = field(default_factory=dict)
    last: dict[Request, RequestOutput] = field(default_factory=dict)
    arrivals: itertools.count[int] = field(default_factory=itertools.count)
    is_pipelined: bool = False
    fetch_first: Callable[[Request, int], bool] | None = None
    """See `Scheduler.schedule`."""
    is_checked: bool = True
    """Whether each step is followed by checks of everything, whose time grows with the number of blocks."""

    @property
    def scheduler(self) -> Scheduler:
        return self.engine.scheduler

    def request(self, prompt: list[int], max_tokens: int = 8, **options: object) -> Request:
        """Add a greedy request; `options` are fields of Request or of SamplingParams."""
        of_request = {
            name: options.pop(name)
            for name in ("priority", "resume_token_ids", "root_hash", "prediction", "images")
            if name in options
        }
        sampling = SamplingParams(**{"max_tokens": max_tokens, "seed": 0, "temperature": 0.0, **options})  # type: ignore[arg-type]
        arrival = next(self.arrivals)
        fields = {"root_hash": 1, "arrival_s": float(arrival), **of_request}
        request = Request(f"r{arrival}", prompt, sampling, **fields)  # type: ignore[arg-type]
        self.tokens[request] = list(request.resume_token_ids)
        self.scheduler.add(request)
        return request

    def step(self) -> list[RequestOutput]:
        """Run one step and check all invariants afterwards."""
        outputs: list[RequestOutput] = []
        if self.is_pipelined:
            self.engine.advance(outputs.extend, self.fetch_first)
        else:
            outputs += self.engine.step(self.fetch_first)
        if self.is_checked:
            self.scheduler.check()
        for output in outputs:
            request = output.request
            assert request not in self.last, "an output after the last one"
            assert output.start_pos == len(self.tokens[request]), "a gap or a repeat"
            self.tokens[request] += output.token_ids
            if output.is_last:
                self.last[request] = output
        return outputs

    def run(self) -> None:
        """Step until nothing is left; all blocks must be free then."""
        steps = 0
        while self.scheduler.has_requests or self.engine.has_outputs:
            self.step()
            steps += 1
            assert steps < 100_000, "no end in sight"
        assert self.scheduler.kv_cache.pool.num_free_blocks == self.scheduler.kv_cache.pool.num_blocks

    def finish(self, request: Request) -> FinishReason | None:
        return self.last[request].finish


class KnownCosts(StepCosts):
    """Fixed costs of steps, almost zero by default. Scheduling then does not depend on the speed of the machine."""

    def __init__(self, step_ms: float = 0.001, token_ms: float = 0.00001) -> None:
        super().__init__()
        for number in range(600):
            shape = StepShape(8 + number * 7 % 250, number * 13 % 5000, number * 17 % 900, number % 500, number % 9, 8)
            shape = shape._replace(changed=number % 2 == 0)
            self.prompts.observe(shape, step_ms + token_ms * shape.tokens)
            self.decode.observe(shape, step_ms + token_ms * shape.tokens)

    def observe(self, shape: StepShape, milliseconds: float, *, is_first: bool) -> None:
        """See StepCosts."""


CHEAP_STEPS = KnownCosts()
MakeEngine = Callable[..., EngineUnderTest]


def make_engine(
    num_blocks: int = 64,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    max_num_mixed_tokens: int | None = None,
    speculation: str = "off",
    draft: Draft | None = None,
    make_runner: Callable[[int, int, int], FakeRunner] = FakeRunner,
) -> EngineUnderTest:
    """A fresh engine over a fresh fake runner. Steps that streams have a part in are as large as others by default."""
    most = max_num_mixed_tokens or max_num_batched_tokens
    limits = StepLimits(max_num_seqs, max_num_batched_tokens, most, is_exact=True)
    runner = make_runner(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
    engine = build_engine(
        runner, BatchSampler(), num_blocks, limits, step_costs=CHEAP_STEPS, speculation=speculation, draft=draft
    )
    return EngineUnderTest(engine, runner)


class RandomRequests:
    """Makes requests for `run_random_load`, some of which share a prefix, are resumed or ask for log-probabilities.
    `bias` is the share of those whose answers may differ where they have token 0. `more` gives further options, given
    the right tokens."""

    def __init__(
        self,
        engine: EngineUnderTest,
        rng: random.Random,
        more: Callable[[list[int]], dict[str, Any]] | None = None,
        *,
        bias: float = 0.3,
    ) -> None:
        self.right: dict[Request, list[int]] = {}
        self._engine, self._rng, self._more, self._bias = engine, rng, more, bias
        self._prefixes = [[rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 30))] for _ in range(4)]

    def arrive(self) -> Request:
        """A new request."""
        rng = self._rng
        prompt = rng.choice(self._prefixes) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 8))]
        count = rng.randint(1, 20)
        tokens = expected_tokens(prompt, count, VOCAB_SIZE)
        resumed = tokens[: rng.randrange(count)] if rng.random() < 0.2 else []
        options: dict[str, Any] = {"num_prompt_logprobs": 0} if rng.random() < 0.1 else {}
        options |= {"num_logprobs": 1} if rng.random() < 0.2 else {}
        options |= {"logit_bias": ((0, -1.0),)} if rng.random() < self._bias else {}
        options |= self._more(tokens) if self._more is not None else {}
        priority = rng.choice([0, 0, 0, 1])
        request = self._engine.request(prompt, count, priority=priority, resume_token_ids=resumed, **options)
        self.right[request] = tokens
        return request

    def check(self, cancelled: set[Request]) -> None:
        """Assert that each answer is right, as far as it goes if it was cancelled."""
        for request, tokens in self._engine.tokens.items():
            if request in cancelled:
                assert tokens == self.right[request][: len(tokens)]
                assert request not in self._engine.last
            elif 0 not in self.right[request] or not request.sampling.logit_bias:
                assert tokens == self.right[request]
                assert self._engine.last[request].finish is FinishReason.LENGTH


def run_random_load(engine: EngineUnderTest, rng: random.Random, arrive: Callable[[], Request]) -> set[Request]:
    """Run steps in which requests from `arrive` come and some are cancelled, then run until none is left. Returns the
    requests that were cancelled before they finished."""
    alive: list[Request] = []
    cancelled = set()
    for _ in range(RANDOM_STEPS):
        if rng.random() < 0.3:
            alive.append(arrive())
        if alive and rng.random() < 0.05:
            request = alive.pop(rng.randrange(len(alive)))
            if request.state is not RequestState.FINISHED:
                cancelled.add(request)
            engine.scheduler.cancel(request)
        engine.step()
    engine.run()
    return cancelled


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the module's MODEL."""
    made = tmp_path_factory.mktemp("model")
    convert(write_gguf(request.module.MODEL, made / "m.gguf"), made)
    return made


@pytest.fixture
def engine() -> EngineUnderTest:
    return make_engine()
