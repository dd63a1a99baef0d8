"""A simulated smaller model: its proposals are right with a given probability, at the cost of a fit. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from headrace.sim.step_cost import StepCost
from headrace.worker.engine.step_cost import StepShape
from headrace.worker.kv.cache import KVCache
from headrace.worker.request.request import Request
from headrace.worker.speculation.controller import StepLine
from headrace.worker.speculation.proposer import MAX_MODEL_DRAFT, Draft, Source

# A token that no prompt and no answer has.
_WRONG = (1 << 32) - 1
FREE = StepLine(0.0, 0.0, 0.0)


class SimulatedDrafts:
    """Drafts for a simulated worker. Each token is right with probability `acceptance`. `cost` gives the cost of a step
    of the smaller model; with None it is 0, as for drafts from earlier text. Its prompts cost nothing."""

    source = Source.DRAFT
    max_tokens = MAX_MODEL_DRAFT
    has_branches = False

    def __init__(self, acceptance: float, cost: StepCost | None, right_token: Callable[[Request], int]) -> None:
        self._acceptance = acceptance
        self._cost = cost
        self._right_token = right_token
        self._random = random.Random(0)
        self._spent_ms = 0.0

    def can_serve(self, request: Request) -> bool:
        """Whether it drafts for a request: always."""
        return True

    def line(self, contexts: Sequence[int]) -> StepLine:
        """See `SmallerModel`."""
        if self._cost is None:
            return FREE
        streams = [(past, 1) for past in contexts]
        base_ms = self._cost.milliseconds(StepShape.of(streams))
        with_one_ms = self._cost.milliseconds(StepShape.of([*streams, streams[-1]]))
        return StepLine(base_ms, with_one_ms - base_ms, 0.0)

    def compute(
        self, streams: Sequence[Request], drafts: Sequence[Draft], line: StepLine, kv_cache: KVCache
    ) -> list[Draft]:
        """See `SmallerModel`."""
        own = [draft.source is Source.DRAFT for draft in drafts]
        for depth in range(max((len(draft.token_ids) for draft in drafts), default=0)):
            reached = [
                request.num_computed_tokens + depth
                for request, draft, is_own in zip(streams, drafts, own, strict=True)
                if is_own and len(draft.token_ids) > depth
            ]
            self._spent_ms += self.line(reached).base_ms if reached else 0.0
        return [
            draft._replace(token_ids=[self._token(request) for _ in draft.token_ids]) if is_own else draft
            for request, draft, is_own in zip(streams, drafts, own, strict=True)
        ]

    def take_spent_s(self) -> float:
        """See `SmallerModel`."""
        spent_ms, self._spent_ms = self._spent_ms, 0.0
        return spent_ms / 1000

    def warm_up(self, num_tokens: Sequence[int], num_steps: int) -> None:
        """Do nothing: there is nothing to warm up."""

    def _token(self, request: Request) -> int:
        return self._right_token(request) if self._random.random() < self._acceptance else _WRONG


class NoGrammars:
    """Grammar drafts for simulated requests, which have no grammars."""

    def forced_tokens(self, request: Request) -> Sequence[int]:
        """No tokens."""
        return ()

    def num_valid(self, request: Request, token_ids: Sequence[int]) -> int:
        """The number of all tokens."""
        return len(token_ids)

    def branch(self, request: Request) -> None:
        """No branch."""
