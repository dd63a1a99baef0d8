"""The interface of cache groups: what the coordinator asks of each group, in addition to the blocks of the pool."""

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
    """Return False: no tier will bring this block."""
    del index
    return False


class Exchange(NamedTuple):
    """The request's block at index `place` was `own`, and is now `standing`, an older block with the same content."""

    place: int
    own: int
    standing: int


class CacheGroup(Protocol):
    """Keeps what the layers of one kind need of each request's tokens. It follows the blocks of the pool."""

    def usable(self, request: Request, end: int, block_at: BlockAt, elsewhere: Elsewhere) -> int:
        """The largest number of cached blocks after which the request can continue: at most `end`, and at least the
        blocks that the request holds. Blocks that are missing here count as present if a tier has them
        (`elsewhere`)."""
        ...

    def hold(self, request: Request, first: int, found: Sequence[int]) -> None:
        """Note that the request continues after the blocks in its table. Those from `first` on are new. `found` are all
        cached blocks from there on that match its tokens. If there are more than it can use, other requests may begin
        alike."""
        ...

    def fits(self, request: Request, num_tokens: int) -> bool:
        """Whether there is room for the request's first `num_tokens` tokens, after releasing what its queries can no
        longer reach."""
        ...

    def publish(self, request: Request, first: int, exchanges: Sequence[Exchange]) -> None:
        """Note that the request's full blocks from index `first` on have become findable. Some of them were replaced by
        other blocks of the same content."""
        ...

    def free(self, request: Request) -> None:
        """Give up all that is kept for the request."""
        ...

    def forget_all(self) -> None:
        """Forget all content. No request may hold any."""
        ...

    def check(self) -> None:
        """Assert that everything is accounted for. For tests."""
        ...
