"""Heads in the format of Medusa propose the next tokens from the model's last hidden state, each head for another
place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from headrace.worker.kv.cache import KVCache
from headrace.worker.request.request import Request
from headrace.worker.request.step import Sampled
from headrace.worker.sampling.logits import Logits
from headrace.worker.sampling.sampler import BatchSampler
from headrace.worker.speculation.draft_model import (
    Asked,
    DraftModel,
    DraftTimes,
    Progress,
    Proposal,
)
from headrace.worker.speculation.proposer import Source

FloatArray = npt.NDArray[np.float32]
_LOWEST = np.float32(-3e38)


class States(Protocol):
    """Last hidden states; see `headrace.worker.draft_heads.medusa_runner.LastStates`."""

    def of(self, request: Request) -> FloatArray | None:
        """The last hidden state `[size]` before the request's latest token; None if it is not known."""
        ...


class MedusaHeads(Protocol):
    """Computes heads; see `headrace.worker.draft_heads.medusa_runner.MedusaRunner`."""

    vocab_size: int
    block_size: int
    num_heads: int
    size: int
    """Of a hidden state."""

    @property
    def states(self) -> States:
        """The model's last hidden states."""
        ...

    def compute(self, head: int, states: FloatArray) -> Logits:
        """Logits `[rows, vocab_size]` of a head after these states `[rows, size]`."""
        ...


class MedusaModel(DraftModel):
    """The heads, for the requests of one scheduler. They have no keys and values, so they never have to catch up. Head
    h gives token h of a draft, drawn as if the tokens before it were part of the answer. A branch begins with the
    second token of the first head, and continues as the draft does."""

    source: ClassVar[Source] = Source.MEDUSA
    has_branches: ClassVar[bool] = True
    _reads_tokens: ClassVar[bool] = False

    def __init__(
        self,
        runner: MedusaHeads,
        sampler: BatchSampler,
        kv_cache: KVCache,
        times: DraftTimes,
        vocab_size: int,
    ) -> None:
        super().__init__(runner, sampler, kv_cache, times, vocab_size)  # type: ignore[arg-type]  # it runs no steps
        self._heads = runner
        self.max_tokens = runner.num_heads

    def can_serve(self, request: Request) -> bool:
        """Whether the state before the request's latest token is known."""
        return super().can_serve(request) and self._heads.states.of(request) is not None

    def num_behind(self, request: Request) -> int:
        """Always one, because the latest token needs no computation."""
        return 1

    def catch_up(self, request: Request, num_tokens: int) -> None:
        """Does nothing, because the heads never have to catch up."""

    def propose(self, asked: Sequence[Asked]) -> list[Proposal]:
        """See `DraftModel.propose`."""
        found: list[list[int]] = [[] for _ in asked]
        others: dict[int, int | None] = {}
        shadows = [self._shadow(request, Progress(), constraint) for request, _, constraint, _ in asked]
        states = [self._heads.states.of(request) for request, *_ in asked]
        active = [place for place, state in enumerate(states) if state is not None]
        for head in range(self.max_tokens):
            active = [place for place in active if len(found[place]) == head < asked[place].num_tokens]
            if not active:
                break
            requests = [shadows[place] for place in active]
            rows = np.stack([state for place in active if (state := states[place]) is not None])
            logits = self._compute(head, rows)
            sampled = self._sampler.sample(requests, logits)
            if head == 0:
                branching = [row for row, place in enumerate(active) if asked[place].has_branch]
                found_others = self._others(requests, logits, sampled, branching)
                others = {active[row]: other for row, other in zip(branching, found_others, strict=True)}
            active = [
                place
                for place, entry in zip(active, sampled, strict=True)
                if self._take(shadows[place], found[place], entry.token_id)
            ]
        for (request, *_), shadow in zip(asked, shadows, strict=True):
            self._keep(request, shadow)
        return [Proposal(token_ids, others.get(place)) for place, token_ids in enumerate(found)]

    def _others(
        self, requests: Sequence[Request], logits: Logits, sampled: Sequence[Sampled], rows: Sequence[int]
    ) -> list[int | None]:
        """For each of `rows` the token that is drawn without the one that was sampled; None if there is no other."""
        if not rows:
            return []
        firsts = [sampled[row].token_id for row in rows]
        values = logits.values[np.asarray(rows)]
        values[np.arange(len(rows)), firsts] = _LOWEST
        branching = [requests[row] for row in rows]
        entries = self._sampler.sample(branching, Logits(values))
        for request in branching:
            if request.sampling.has_edits:  # the sampler has followed the second token
                self._sampler.take_back(request, request.num_tokens)
        return [
            entry.token_id if 0 <= entry.token_id < self._vocab_size and entry.token_id != first else None
            for entry, first in zip(entries, firsts, strict=True)
        ]

    def warm_up(self, num_tokens: Sequence[int], num_steps: int) -> None:
        """Compute all heads a few times, before there are requests, to build kernels and learn costs."""
        for _ in range(num_steps):
            for head in range(self.max_tokens):
                self._compute(head, np.zeros((1, self._heads.size), np.float32))
        self.spent_s = 0.0

    def _compute(self, head: int, states: FloatArray) -> Logits:
        start_s = time.perf_counter()
        logits = self._heads.compute(head, states)
        seconds = time.perf_counter() - start_s
        self.spent_s += seconds
        self.times.observe([(0, 1)] * len(states), 0, 1000 * seconds)
        return logits
