"""Heads draft: answers are those without, and they always know the right tokens.

The fake target writes the id of each token as its feature. The fake heads read a sequence back through features and
their own blocks, check one against the other, and then propose the target's token in a share of cases.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from headrace.worker.draft_heads.features import FeatureStore
from headrace.worker.engine.build import Draft, build_engine
from headrace.worker.engine.engine import Engine
from headrace.worker.model.batch import Batch
from headrace.worker.model.step_limits import StepLimits
from headrace.worker.request.request import Request
from headrace.worker.request.step import BlockCopy
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.eagle import EagleModel
from headrace.worker.speculation.eagle_trees import EagleTrees, num_spare_blocks
from headrace.worker.speculation.tree import TreeShape
from tests.worker.conftest import (
    BLOCK_SIZE,
    CHEAP_STEPS,
    VOCAB_SIZE,
    EngineUnderTest,
    KnownCosts,
    RandomRequests,
    run_random_load,
)
from tests.worker.draft_heads.files import FloatArray
from tests.worker.fake_runner import FakeRunner, expected_tokens, next_token
from tests.worker.speculation.test_engine_with_drafts import answered_alike

FREE_STEPS = KnownCosts(1e-6, 1e-8)
SOAK = bool(os.environ.get("HEADRACE_SOAK"))
# bfloat16 represents whole numbers up to 256.
BASE = 32


def feature_of(token_ids: Any) -> FloatArray:
    ids = np.asarray(token_ids)
    return np.stack([ids // BASE, ids % BASE], -1).astype(np.float32)


def token_of(features: FloatArray) -> list[int]:
    found: list[int] = (features[..., 0] * BASE + features[..., 1]).astype(int).tolist()
    return found


class FakeTarget(FakeRunner):
    """Keeps the token ids of its steps as features."""

    def __init__(self, num_blocks: int, num_spare: int = 0) -> None:
        super().__init__(num_blocks, BLOCK_SIZE, VOCAB_SIZE)
        self.store = FeatureStore(num_blocks, BLOCK_SIZE, 2, num_spare)

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """See FakeRunner."""
        super().bind(batch, keeps_logits=keeps_logits)
        self.store.write(batch, feature_of(batch.input_ids))


class FakeHeads:
    """Heads with a slot for each token but the first. Their next token is the target's with probability `right`; the
    second best is with probability `second`, if that is not 0. They have `num_spare` spare blocks."""

    def __init__(
        self, store: FeatureStore, num_blocks: int, right: float, *, second: float = 0.0, num_spare: int = 0
    ) -> None:
        self.store, self.right, self.second = store, right, second
        self.vocab_size, self.block_size = VOCAB_SIZE, BLOCK_SIZE
        self.num_tokens = 0
        self.contexts: dict[str, list[list[int]]] = {}
        self.spare_blocks = range(num_blocks + 1, num_blocks + 1 + num_spare)
        self._read = np.full((num_blocks + 1 + num_spare, BLOCK_SIZE), -1)
        self._tokens = np.full((num_blocks + 1 + num_spare, BLOCK_SIZE), -1)
        self._padding = num_blocks
        self._logits = np.zeros((0, VOCAB_SIZE), np.float32)

    def bind(self, batch: Batch, *, keeps_logits: bool) -> None:
        """Compute logits in which one token is better than all others, or two that stand out."""
        self._copy_slots(self.store.take_copies())
        blocks, offsets = self.store.places(batch)
        self._read[blocks, offsets] = token_of(self.store.read(blocks, offsets))
        self._tokens[blocks, offsets] = batch.input_ids
        self.num_tokens += int(np.count_nonzero(blocks != self._padding))
        logits = np.zeros((len(batch.sampled_tokens_indices), VOCAB_SIZE), np.float32)
        for row, (index, request) in enumerate(zip(batch.sampled_tokens_indices.tolist(), batch.sampled, strict=True)):
            context = self._context(request, int(batch.position_ids[index]), int(batch.input_ids[index]))
            self.contexts.setdefault(request.request_id, []).append(context)
            chance = crc32(np.array(context, np.int64).tobytes()) / 2**32
            found = next_token(context, VOCAB_SIZE)
            best = found if chance < self.right else found - 1
            if self.second:
                logits[row, found if self.right <= chance < self.right + self.second else found - 2] = 8.0
                logits[row, best] = 9.0
            else:
                logits[row, best] = 1.0
        self._logits = logits
        positions = batch.position_ids[batch.sampled_tokens_indices].tolist()
        ids = batch.input_ids[batch.sampled_tokens_indices].tolist()
        for request, position, token_id in zip(batch.sampled, positions, ids, strict=True):
            index, offset = divmod(position + 1, BLOCK_SIZE)
            if index < len(request.block_table):
                self.store.set(request.block_table[index], offset, feature_of(token_id))

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy slots and features of blocks."""
        self._copy_slots(copies)
        for source, destination in copies:
            self.store.copy(source, destination)

    def _copy_slots(self, copies: Sequence[BlockCopy]) -> None:
        for source, destination in copies:
            self._read[destination], self._tokens[destination] = self._read[source], self._tokens[source]

    def run(self) -> Logits:
        """The logits of the last step."""
        return Logits(self._logits)

    def _context(self, request: Request, position: int, token_id: int) -> list[int]:
        """The sequence up to a slot. The last slot of a block that is shared may have the next token of another
        request, so that token is taken from the feature after it."""
        table = np.asarray(request.block_table)
        slots = np.arange(position + 1)
        blocks, offsets = table[slots // BLOCK_SIZE], slots % BLOCK_SIZE
        read, tokens = self._read[blocks, offsets], self._tokens[blocks, offsets]
        tokens[-1] = token_id
        is_shared = offsets[:-1] == BLOCK_SIZE - 1
        assert (is_shared | (tokens[:-1] == read[1:])).all(), "a feature of another token"
        return [*read.tolist(), token_id]


def engine_with_heads(
    right: float,
    *,
    num_blocks: int = 128,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 32,
    second: float = 0.0,
    tree: TreeShape | None = None,
    target_costs: KnownCosts = CHEAP_STEPS,
) -> tuple[EngineUnderTest, FakeHeads]:
    num_spare = 0 if tree is None else num_spare_blocks(tree, BLOCK_SIZE)
    target = FakeTarget(num_blocks, num_spare)
    heads = FakeHeads(target.store, num_blocks, right, second=second, num_spare=num_spare)
    kind = EagleModel if tree is None else partial(EagleTrees, shape=tree)
    limits = StepLimits(max_num_seqs, max_num_batched_tokens, max_num_batched_tokens, is_exact=True)
    engine: Engine = build_engine(
        target,
        BatchSampler(),
        num_blocks,
        limits,
        step_costs=target_costs,
        speculation="eagle3",
        draft=Draft(heads, BatchSampler(), FREE_STEPS, kind, heads.store.forget),
    )
    return EngineUnderTest(engine, target), heads


@pytest.mark.parametrize("is_pipelined", [False, True])
@pytest.mark.parametrize("num_streams", [1, 8])
@pytest.mark.parametrize("right", [1.0, 0.7, 0.0])
def test_answers_are_those_without_heads(num_streams: int, right: float, is_pipelined: bool) -> None:
    for requests in answered_alike(
        lambda: engine_with_heads(right, max_num_batched_tokens=80)[0], num_streams, is_pipelined
    ):
        assert any(request.num_drafted for request in requests)
        if right == 1.0:
            assert all(request.num_accepted == request.num_drafted for request in requests)


def test_right_heads_take_few_steps_and_compute_verified_tokens_once_more() -> None:
    engine, heads = engine_with_heads(1.0)
    request = engine.request([1, 2, 3], 64)
    engine.run()
    assert engine.tokens[request] == expected_tokens([1, 2, 3], 64, VOCAB_SIZE)
    assert request.num_accepted == request.num_drafted >= 48
    assert len(engine.runner.batch_sizes) <= 16
    assert heads.num_tokens <= 2 * (3 + 64)
    speculation = engine.scheduler.speculation
    assert speculation is not None
    assert speculation.counters["eagle3_tokens_accepted"] == request.num_accepted


def test_a_prefix_hit_finds_features_and_the_heads_part_of_blocks() -> None:
    engine, heads = engine_with_heads(1.0, num_blocks=256, max_num_batched_tokens=128)
    prompt = [number % 97 for number in range(200)]
    first = engine.request([*prompt, 1], 20)
    engine.run()
    assert first.num_accepted == first.num_drafted > 0
    computed = heads.num_tokens
    second = engine.request([*prompt, 2], 20)
    engine.run()
    assert second.num_cached_tokens >= 196
    assert second.num_accepted == second.num_drafted > 0
    assert heads.num_tokens - computed < 60


def test_after_blocks_without_features_the_heads_see_the_rest() -> None:
    engine, heads = engine_with_heads(1.0, num_blocks=256, max_num_batched_tokens=128)
    prompt = [number % 97 for number in range(40)]
    engine.request(prompt, 2)
    engine.run()
    heads.store.forget(range(256))  # as if a disk had filled them
    request = engine.request([*prompt[:36], 7, 8, 9, 10, 11, 12, 13], 24)
    engine.run()
    assert request.num_cached_tokens == 36
    assert engine.tokens[request] == expected_tokens(request.prompt_token_ids, 24, VOCAB_SIZE)
    assert request.num_drafted > 0
    whole = engine.request([1, 2, 3, 4, 5], 24)
    engine.run()
    assert whole.num_accepted == whole.num_drafted > 0


def test_without_features_of_the_latest_tokens_there_are_no_drafts_until_there_are_some() -> None:
    engine, heads = engine_with_heads(1.0, num_blocks=64)
    request = engine.request([1, 2, 3, 4, 5], 24)
    engine.step()
    heads.store.forget(range(64))
    engine.step()
    assert request.num_drafted == 0
    engine.run()
    assert request.num_drafted > 0
    assert engine.tokens[request] == expected_tokens([1, 2, 3, 4, 5], 24, VOCAB_SIZE)


def sees_all(request: Request, contexts: Iterable[Sequence[int]]) -> bool:
    """Whether the heads began at the request's first token each time. They begin later if a block has no features."""
    return all(context[0] == request.token_ids[0] for context in contexts)


@pytest.mark.parametrize("seed", range(20 if SOAK else 8))
def test_random_load_with_heads_keeps_every_promise(seed: int) -> None:
    rng = random.Random(seed)
    right = rng.choice([1.0, 1.0, 0.7, 0.2])
    engine, heads = engine_with_heads(
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
            has_seen_all = sees_all(request, heads.contexts.get(request.request_id, ()))
            is_right = request.num_accepted == request.num_drafted
            assert is_right or not has_seen_all, "the heads have read a wrong token or feature"
    assert any(request.num_accepted for request in engine.tokens)
