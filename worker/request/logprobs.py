"""Log-probabilities of single tokens, and of a whole prompt in compact form."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator

import msgspec


class TokenLogprobs(msgspec.Struct, frozen=True, gc=False):
    """Log-probabilities at one position: that of its token, the token's rank from 1, and the most probable tokens,
    best first. Natural logarithms. The token of an image has neither: 0 and rank 0."""

    logprob: float
    rank: int
    top_token_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


class PromptLogprobs:
    """Log-probabilities of a prompt's tokens from the second on, with the `num_top` most probable tokens at each
    position. Stores numbers in arrays: 8 bytes for a token instead of 70."""

    __slots__ = ("_logprobs", "_num_top", "_ranks", "_top_logprobs", "_top_token_ids")

    def __init__(self, num_top: int) -> None:
        self._num_top = num_top
        self._logprobs = array("f")
        self._ranks = array("I")
        self._top_logprobs = array("f")
        self._top_token_ids = array("I")

    def __len__(self) -> int:
        return len(self._logprobs)

    def __getitem__(self, position: int) -> TokenLogprobs:
        if not 0 <= position < len(self._logprobs):
            raise IndexError(position)
        top = slice(position * self._num_top, (position + 1) * self._num_top)
        return TokenLogprobs(
            self._logprobs[position],
            self._ranks[position],
            tuple(self._top_token_ids[top]),
            tuple(self._top_logprobs[top]),
        )

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return (self[position] for position in range(len(self)))

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        """Append the entries of the next tokens."""
        for entry in entries:
            assert len(entry.top_token_ids) == len(entry.top_logprobs) == self._num_top
            self._logprobs.append(entry.logprob)
            self._ranks.append(entry.rank)
            self._top_token_ids.extend(entry.top_token_ids)
            self._top_logprobs.extend(entry.top_logprobs)
