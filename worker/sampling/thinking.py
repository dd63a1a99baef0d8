"""Ends reasoning after a number of tokens, by forcing the tokens that end it."""

from __future__ import annotations

from headrace.worker.request.params import ThinkingBudget
from headrace.worker.request.request import Request


class ThinkingEnd:
    """The end of reasoning in one request's answer. Its state follows from the answer's tokens, each of which is read
    once."""

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._num_read = 0
        self._num_thought = 0
        self._is_open = budget.is_open
        self._num_ends = 0
        self._forced: tuple[int, ...] = ()
        """The rest of the end that is being written."""
        self._end_if_exhausted()

    def next_token(self, request: Request) -> int | None:
        """The token that must come next; None if any may."""
        tokens = request.token_ids
        for place in range(request.num_prompt_tokens + self._num_read, len(tokens)):
            self._read(tokens[place], request, place)
            self._num_read += 1
        return self._forced[0] if self._forced else None

    def _read(self, token_id: int, request: Request, place: int) -> None:
        if self._forced:
            if token_id == self._forced[0]:
                self._forced = self._forced[1:]
                self._is_open = bool(self._forced)
                return
            # A constraint had something else. It decides how the reasoning ends.
            self._forced = ()
            self._is_open = False
        elif self._is_open:
            self._is_open = token_id != self._budget.closing
            self._num_thought += self._is_open
        elif self._budget.opening:
            first = place + 1 - len(self._budget.opening)
            is_whole = first >= request.num_prompt_tokens
            self._is_open = is_whole and tuple(request.token_ids[first : place + 1]) == self._budget.opening
        self._end_if_exhausted()

    def _end_if_exhausted(self) -> None:
        if self._is_open and self._num_thought >= self._budget.max_tokens:
            self._forced = self._budget.ends[min(self._num_ends, len(self._budget.ends) - 1)]
            self._num_ends += 1
