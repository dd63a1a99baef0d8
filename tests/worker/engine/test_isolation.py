"""An exception in sampling ends only its own request. All others get the same tokens as without it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from headrace.protos.status import Reason, StatusError
from headrace.worker.grammar import compiler as grammar_compiler
from headrace.worker.grammar.constraint import Constraint, ConstraintSource
from headrace.worker.model.batch import Ahead
from headrace.worker.request.logprobs import TokenLogprobs
from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput, Sampled
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from tests.worker.conftest import VOCAB_SIZE, EngineUnderTest, make_engine
from tests.worker.fake_runner import expected_tokens
from tests.worker.vocabulary import EOS, grammars

STAGES = ("sample", "logprobs", "prompt_logprobs")


@dataclass
class RaisingSampler:
    """Samples like `BatchSampler`, but raises for the requests in `raises_at`, by stage and number of generated tokens,
    regardless of other requests in the call."""

    inner: BatchSampler = field(default_factory=BatchSampler)
    raises_at: dict[Request, tuple[str, int]] = field(default_factory=dict)
    num_raised: int = 0

    def _look(self, stage: str, requests: Sequence[Request], already: int = 0) -> None:
        for request in requests:
            raises = self.raises_at.get(request)
            if raises is not None and raises[0] == stage and request.num_generated_tokens - already >= raises[1]:
                self.num_raised += 1
                raise RuntimeError("spoiled")

    def forced_tokens(self, request: Request) -> Sequence[int]:
        return self.inner.forced_tokens(request)

    def num_valid(self, request: Request, token_ids: Sequence[int]) -> int:
        return self.inner.num_valid(request, token_ids)

    def sample(self, requests: Sequence[Request], logits: Logits, ahead: Ahead | None = None) -> list[Sampled]:
        self._look("sample", requests)
        return self.inner.sample(requests, logits, ahead)

    def logprobs(
        self, requests: Sequence[Request], logits: Logits, sampled: Sequence[Sampled]
    ) -> list[TokenLogprobs | None]:
        self._look("logprobs", [request for request in requests if request.sampling.num_logprobs is not None], 1)
        return self.inner.logprobs(requests, logits, sampled)

    def prompt_logprobs(self, logits: Logits, token_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
        # It is not told of whom they are: the prompts of requests that raise here have a token of their own.
        if VOCAB_SIZE - 1 in token_ids:
            self.num_raised += 1
            raise RuntimeError("spoiled")
        return self.inner.prompt_logprobs(logits, token_ids, num_top)


def engine_with(sampler: BatchSampler, **options: Any) -> EngineUnderTest:
    engine = make_engine(**options)
    engine.engine = type(engine.engine)(engine.scheduler, engine.runner, sampler)
    return engine


SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"num_logprobs": 2},
    {"temperature": 0.8},
    {"temperature": 1.2, "num_logprobs": 1, "top_k": 7},
    {"frequency_penalty": 0.5, "temperature": 0.7, "top_p": 0.9},
    {"num_prompt_logprobs": 1, "num_logprobs": 0},
]


def add_load(engine: EngineUnderTest, rng: random.Random) -> dict[str, Request]:
    """Requests of every kind, the same for the same random numbers."""
    added = {}
    for number in range(24):
        prompt = [rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.randint(2, 40))]
        request = engine.request(prompt, max_tokens=rng.randint(1, 12), **SAMPLINGS[number % 6], root_hash=number)
        added[request.request_id] = request
        if rng.random() < 0.5:
            engine.step()
    return added


def outputs_of(engine: EngineUnderTest, run: Callable[[], None]) -> dict[Request, list[RequestOutput]]:
    """All outputs, by request."""
    found: dict[Request, list[RequestOutput]] = {}
    step = engine.step

    def collect() -> list[RequestOutput]:
        outputs = step()
        for output in outputs:
            found.setdefault(output.request, []).append(output)
        return outputs

    engine.step = collect  # type: ignore[method-assign]
    run()
    return found


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_others_get_the_tokens_and_log_probabilities_that_they_get_without_it(seed: int, *, is_pipelined: bool) -> None:
    def told(spoiled: int) -> tuple[dict[str, list[Any]], set[str], int]:
        """The outputs of each request, the requests that ended with an error, and the number of exceptions."""
        rng, choices = random.Random(seed), random.Random(100 + seed)
        sampler = RaisingSampler()
        engine = engine_with(sampler, num_blocks=200, max_num_seqs=8)
        engine.is_pipelined = is_pipelined
        request_of = engine.request

        def request(prompt: list[int], **options: Any) -> Request:
            is_spoiled, stage, behind = choices.random() < 0.35, choices.choice(STAGES), choices.randint(0, 6)
            if is_spoiled and spoiled and stage == "prompt_logprobs" and "num_prompt_logprobs" in options:
                prompt = [*prompt[:-1], VOCAB_SIZE - 1]
            made = request_of(prompt, **options)
            if is_spoiled and spoiled:
                sampler.raises_at[made] = (stage, behind)
            return made

        engine.request = request  # type: ignore[method-assign]
        outputs = outputs_of(engine, lambda: (add_load(engine, rng), engine.run())[1])
        failed = set()
        for made, given in outputs.items():
            error = given[-1].error
            if error is not None:
                assert error.reason is Reason.INTERNAL
                assert "could not go on with this request" in error.message
                failed.add(made.request_id)
        told_to = {
            made.request_id: [
                [(one.token_ids, one.logprobs, one.finish) for one in given if one.error is None],
                list(made.prompt_logprobs),
            ]
            for made, given in outputs.items()
        }
        return told_to, failed, sampler.num_raised

    undisturbed, none_failed, _ = told(0)
    disturbed, failed, num_raised = told(1)
    assert not none_failed
    assert failed
    assert num_raised >= len(failed)
    for request_id, (steps, prompt) in undisturbed.items():
        if request_id not in failed:
            assert disturbed[request_id] == [steps, prompt]
        else:
            given = disturbed[request_id][0]
            assert given == steps[: len(given)], "what came before the error is as it was"


@pytest.mark.parametrize("max_tokens", [2, 9])
@pytest.mark.parametrize("is_pipelined", [False, True])
def test_log_probabilities_that_cannot_be_read_end_the_request_that_wants_them(
    max_tokens: int, *, is_pipelined: bool
) -> None:
    sampler = RaisingSampler()
    engine = engine_with(sampler)
    engine.is_pipelined = is_pipelined
    other = engine.request([1, 2, 3], max_tokens=9, num_logprobs=1)
    asked = engine.request([4, 5, 6], max_tokens=max_tokens, num_logprobs=1)
    sampler.raises_at[asked] = ("logprobs", 1)
    engine.run()
    error = engine.last[asked].error
    assert error is not None
    assert (error.reason, "log-probabilities of its token" in error.message) == (Reason.INTERNAL, True)
    assert engine.tokens[asked] == expected_tokens([4, 5, 6], 1, VOCAB_SIZE)
    assert engine.tokens[other] == expected_tokens([1, 2, 3], 9, VOCAB_SIZE)
    after = engine.request([4, 5, 6], max_tokens=3, num_logprobs=1)
    engine.run()
    assert engine.tokens[after] == expected_tokens([4, 5, 6], 3, VOCAB_SIZE)


def test_a_prompt_whose_log_probabilities_cannot_be_read_ends_in_the_step_that_computes_it() -> None:
    sampler = RaisingSampler()
    engine = engine_with(sampler, max_num_batched_tokens=16)
    other = engine.request([1, 2, 3], max_tokens=9)
    asked = engine.request([VOCAB_SIZE - 1] * 100, num_prompt_logprobs=1)
    engine.step()
    engine.step()
    assert engine.last[asked].error is not None
    assert sampler.num_raised == 1, "it would go on for seven steps"
    engine.run()
    assert engine.tokens[other] == expected_tokens([1, 2, 3], 9, VOCAB_SIZE)


def test_what_runs_out_of_memory_for_the_batch_and_not_by_rows_ends_nobody() -> None:
    class Short(RaisingSampler):
        def sample(self, requests: Sequence[Request], logits: Logits, ahead: Ahead | None = None) -> list[Sampled]:
            if len(requests) > 1:
                raise MemoryError
            return super().sample(requests, logits, ahead)

    engine = engine_with(Short())
    requests = [engine.request([i] * 5, max_tokens=6, temperature=0.5 * (i % 2)) for i in range(4)]
    engine.run()
    alone = engine_with(RaisingSampler())
    for request in requests:
        lone = alone.request(list(request.prompt_token_ids), max_tokens=6, temperature=request.sampling.temperature)
        alone.run()
        assert engine.tokens[request] == alone.tokens[lone]


class Panic(BaseException):
    """Like a Rust panic, this is not an Exception."""


class PanickingPosition:
    """A position in a grammar that panics after some tokens, in one of its methods."""

    def __init__(self, inner: Any, method: str, left: int) -> None:
        self._inner, self._method, self._left = inner, method, left

    def deep_copy(self) -> PanickingPosition:
        return PanickingPosition(self._inner.deep_copy(), self._method, self._left)

    def consume_tokens(self, token_ids: list[int]) -> bool:
        self._left -= len(token_ids)
        self._panic("consume_tokens")
        return bool(self._inner.consume_tokens(token_ids))

    def unsafe_compute_mask_ptr(self, address: int, num_bytes: int) -> None:
        self._panic("unsafe_compute_mask_ptr")
        self._inner.unsafe_compute_mask_ptr(address, num_bytes)

    def _panic(self, method: str) -> None:
        if method == self._method and self._left <= 0:
            raise Panic("at the disco")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@pytest.mark.parametrize("method", ["consume_tokens", "unsafe_compute_mask_ptr"])
@pytest.mark.parametrize("behind", [0, 1, 5])
async def test_a_grammar_that_panics_ends_its_own_request(method: str, behind: int) -> None:
    compiler = grammars()
    source = ConstraintSource("regex", ("([a-z]{2,4} ){3}[a-z]{2,4}[.]",))

    async def constraint() -> Constraint:
        return await compiler.constrain(source, end_token_ids=[EOS])

    def run(panicking: Constraint | None, sound: Constraint) -> tuple[EngineUnderTest, list[Request]]:
        engine = make_engine(max_num_seqs=8)
        requests = [engine.request([i, i + 1], max_tokens=12, temperature=1.0, constraint=sound) for i in range(3)]
        requests.append(engine.request([7, 8], max_tokens=12, temperature=0.9))
        if panicking is not None:
            requests.append(engine.request([5, 6], max_tokens=12, temperature=1.0, constraint=panicking))
        engine.run()
        return engine, requests

    sound = await constraint()
    panicking = replace(sound, start=PanickingPosition(sound.start, method, behind), first=None)
    engine, requests = run(panicking, sound)
    reference, others = run(None, sound)
    assert [engine.tokens[one] for one in requests[:-1]] == [reference.tokens[one] for one in others]
    error = engine.last[requests[-1]].error
    assert error is not None
    assert error.reason is Reason.INTERNAL
    assert len(engine.tokens[requests[-1]]) <= max(1, behind)
    assert sound.grammar.is_spoiled, "what panicked is compiled anew for the next request"


async def test_a_panic_while_a_constraint_is_compiled_is_an_error_of_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def panic(*_: Any) -> Any:
        raise Panic

    monkeypatch.setattr(grammar_compiler, "_compiled", panic)
    with pytest.raises(StatusError) as caught:
        await grammars().constrain(ConstraintSource("regex", ("a",)), end_token_ids=[EOS])
    assert (caught.value.reason, caught.value.field) == (Reason.INTERNAL, "sampling.constraint.regex")
