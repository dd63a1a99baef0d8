"""What the coordinator asks of every group beside the blocks themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from headrace.worker.request.request import Request

# At least this many tokens are computed after a cache hit. One would be enough for the logits, but different kernels
# compute a single token, with slightly different results (docs/decisions/exactness.md#prompt-chunks).
MIN_TOKENS_LEFT = 2

BlockAt: TypeAlias = Callable[[int], int | None]
"""The cached block with a request's block number `index`; None if there is none."""

Elsewhere: TypeAlias = Callable[[int], bool]
"""Whether a tier can bring what a group that keeps parts of blocks needs of the request's block number `index`."""


def nowhere(index: int) -> bool:
    """No tier brings anything."""
    del index
    return False


class Exchange(NamedTuple):
    """A request's block `place` was `own`, and is now `standing`, an older one with the same content."""

    place: int
    own: int
    standing: int


class CacheGroup(Protocol):
    """Keeps what layers of one kind need of each request's tokens. It follows the blocks of the pool."""

    def usable(self, request: Request, end: int, block_at: BlockAt, elsewhere: Elsewhere) -> int:
        """The largest number of cached blocks, at most `end` and at least those that the request holds, after which
        the request can continue, if what is missing and `elsewhere` is fetched."""
        ...

    def hold(self, request: Request, first: int, found: Sequence[int]) -> None:
        """The request continues after the blocks in its table. Those from `first` on are new. `found` are all cached
        blocks from there on that match its tokens; if there are more than it could use, others may begin alike."""
        ...

    def fits(self, request: Request, num_tokens: int) -> bool:
        """Whether there is room for the request up to `num_tokens` tokens, once it no longer keeps what its queries
        cannot reach."""
        ...

    def publish(self, request: Request, first: int, exchanges: Sequence[Exchange]) -> None:
        """The request's full blocks from index `first` on became findable. It now holds others of the same content for
        some of them."""
        ...

    def free(self, request: Request) -> None:
        """Give up all that is kept for the request."""
        ...

    def forget_all(self) -> None:
        """Forget all content. No request may hold any."""
        ...

    def check(self) -> None:
        """Assert that all of it is accounted for. For tests."""
        ...
