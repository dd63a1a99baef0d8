"""Medusa heads draft: answers are those without, and states are those of the right positions.

The fake target's last hidden state stands for the tokens up to its position. The fake heads continue them.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from headrace.worker.draft_heads.medusa_runner import LastStates
from headrace.worker.engine.build import Draft, build_engine
from headrace.worker.model.batch import Batch
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.medusa import MedusaModel
from tests.worker.conftest import (
    BLOCK_SIZE,
    CHEAP_STEPS,
    VOCAB_SIZE,
    EngineUnderTest,
    KnownCosts,
    RandomRequests,
    run_random_load,
)
from tests.worker.fake_runner import FakeRunner, expected_tokens, next_token
from tests.worker.images import Picture, prompt_of, ready
from tests.worker.speculation.test_engine_with_drafts import answered_alike

NUM_HEADS = 4
FREE_STEPS = KnownCosts(1e-6, 1e-8)


class FakeTarget(FakeRunner):
    """Its last hidden state is a number that stands for the context."""

    def __init__(self, num_blocks: int, states: LastStates) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
        self.states = states
        self.contexts: list[list[int]] = []

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """See FakeRunner."""
        super().bind(batch, keeps_logits=keeps_logits)
        rows = []
        ends = (batch.subsequence_begins[1:] - 1).tolist()
        for index in batch.sampled_tokens_indices.tolist():
            sequence = int(np.searchsorted(batch.subsequence_begins, index, side="right")) - 1
            context = self._read(batch, sequence)
            rows.append([len(self.contexts)])
            self.contexts.append(context[: len(context) - (ends[sequence] - index)])
        found: Any = SimpleNamespace(get_tensor=lambda name: SimpleNamespace(data=np.array(rows, np.float32)))
        self.states.read(batch, found)


class FakeHeads:
    """Heads that continue a context, and one head that is wrong. With `is_second`, the first head's second token is
    right instead of its best after every other context."""

    vocab_size, block_size, num_heads, size = VOCAB_SIZE, BLOCK_SIZE, NUM_HEADS, 1

    def __init__(self, target: FakeTarget, wrong: int | None, *, is_second: bool = False) -> None:
        self.states = target.states
        self._target, self._wrong, self._is_second = target, wrong, is_second
        self.num_rows = [0] * NUM_HEADS

    def compute(self, head: int, states: npt.NDArray[np.float32]) -> Logits:
        """One-hot logits."""
        logits = np.zeros((len(states), VOCAB_SIZE), np.float32)
        self.num_rows[head] += len(states)
        for row, state in zip(logits, states, strict=True):
            context = list(self._target.contexts[int(state[0])])
            for _ in range(head + 2):
                context.append(next_token(context, VOCAB_SIZE))
            row[context[-1] - (head == self._wrong)] = 1.0
            if self._is_second and head == 0 and context[-1] % 2:
                row[context[-1] - 1] = 2.0
        return Logits(logits)


def engine_with_heads(
    wrong: int | None,
    *,
    num_blocks: int = 128,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    is_second: bool = False,
    has_branches: bool | None = None,
) -> tuple[EngineUnderTest, FakeHeads]:
    files: Any = None
    target = FakeTarget(num_blocks, LastStates(files))
    heads = FakeHeads(target, wrong, is_second=is_second)
    limits = StepLimits(max_num_seqs, max_num_batched_tokens, max_num_batched_tokens, is_exact=True)
    draft = Draft(heads, BatchSampler(), FREE_STEPS, MedusaModel)
    engine = build_engine(
        target, BatchSampler(), num_blocks, limits, step_costs=CHEAP_STEPS, speculation="medusa", draft=draft
    )
    assert engine.scheduler.speculation is not None
    assert engine.scheduler.speculation.model_drafts is not None
    engine.scheduler.speculation.model_drafts.has_branches = is_second if has_branches is None else has_branches
    return EngineUnderTest(engine, target), heads


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("num_streams", [1, 8])
@pytest.mark.parametrize(("wrong", "is_second"), [(None, False), (2, False), (None, True)])
def test_answers_are_those_without_heads(
    num_streams: int, wrong: int | None, is_second: bool, is_pipelined: bool
) -> None:
    for requests in answered_alike(
        lambda: engine_with_heads(wrong, max_num_batched_tokens=80, is_second=is_second)[0], num_streams, is_pipelined
    ):
        assert any(request.num_drafted for request in requests)


def test_right_heads_take_few_steps() -> None:
    engine, heads = engine_with_heads(None)
    request = engine.request([1, 2, 3], 61)
    engine.run()
    assert engine.tokens[request] == expected_tokens([1, 2, 3], 61, VOCAB_SIZE)
    assert request.num_accepted == request.num_drafted >= 40
    assert len(engine.runner.batch_sizes) <= 20
    speculation = engine.scheduler.speculation
    assert speculation is not None
    assert speculation.counters["medusa_tokens_accepted"] == request.num_accepted
    assert sum(heads.num_rows) == request.num_drafted, "no head is computed in vain"


def test_heads_draft_after_images_because_they_read_only_states() -> None:
    engine, _ = engine_with_heads(None)
    prompt = ready(prompt_of([1, 2, 3], Picture(1, 9), [4, 5]))
    request = engine.request(prompt.token_ids, 30, images=prompt.images, repetition_penalty=1.0)
    engine.run()
    assert engine.tokens[request] == expected_tokens(prompt.token_ids, 30, VOCAB_SIZE)
    assert request.num_accepted > 10


def test_a_branch_takes_the_place_of_a_wrong_draft() -> None:
    steps, accepted = [], []
    for has_branches in (False, True):
        engine, _ = engine_with_heads(None, is_second=True, has_branches=has_branches)
        request = engine.request([1, 2, 3], 60)
        engine.run()
        assert engine.tokens[request] == expected_tokens([1, 2, 3], 60, VOCAB_SIZE)
        steps.append(len(engine.runner.batch_sizes))
        accepted.append(request.num_accepted)
    assert steps[1] < 0.8 * steps[0]
    assert accepted[1] > 1.1 * accepted[0]


@pytest.mark.parametrize("seed", range(8))
def test_random_load_with_medusa_heads_keeps_every_promise(seed: int) -> None:
    rng = random.Random(seed)
    wrong, is_second = rng.choice([None, 0, 3]), rng.random() < 0.5
    engine, _ = engine_with_heads(
        wrong,
        num_blocks=rng.randint(20, 64),
        max_num_seqs=rng.randint(1, 8),
        max_num_batched_tokens=rng.randint(10, 60),
        is_second=is_second,
    )
    engine.is_pipelined = seed % 2 == 1
    requests = RandomRequests(engine, rng, bias=0.0)
    requests.check(run_random_load(engine, rng, requests.arrive))
    if wrong is None and not is_second:
        for request in engine.tokens:
            assert request.num_accepted == request.num_drafted, "a state of another position was read"
    assert any(request.num_accepted for request in engine.tokens) or wrong == 0
