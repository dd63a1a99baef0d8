"""Requests that have arrived but are not in the engine's reports yet, and whether a router knew of them.

The engine receives requests between two steps and reports after the step, so new requests would be invisible for some
hundred milliseconds, and longer while a grammar is compiled or an adapter is read. A router's belief about a worker is
compared with the last report plus these arrivals.

Pure.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from headrace.protos.inference_pb2 import Belief


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request that counts: its tokens that are not expected to be cached, and the KV blocks that it will take."""

    num_tokens: int
    num_blocks: int


class Arrivals:
    """Counts the requests of one worker from their arrival until a report includes them. Reports include them in the
    order in which they were handed over to the engine.

    `num_requests`, `num_tokens` (not expected to be cached) and `num_blocks` (KV blocks of `block_size` that they will
    take) are sums over them.
    """

    def __init__(self, block_size: int) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.num_blocks = 0
        self._block_size = block_size
        self._num_shown = 0
        self._handed_over: deque[Arrival] = deque()

    def expect(self, num_tokens: int, num_cached_tokens: int) -> Arrival:
        """A request has arrived; `num_cached_tokens` of its tokens are expected to be cached. `hand_over` or `drop`
        follows."""
        num_cached_tokens = min(num_cached_tokens, num_tokens - 1)
        num_blocks = -(-(num_tokens + 1) // self._block_size) - num_cached_tokens // self._block_size
        arrival = Arrival(num_tokens - num_cached_tokens, num_blocks)
        self.num_requests += 1
        self.num_tokens += arrival.num_tokens
        self.num_blocks += arrival.num_blocks
        return arrival

    def hand_over(self, arrival: Arrival) -> None:
        """Record that the engine's mailbox has the request. It counts here until a report of the engine includes it."""
        self._handed_over.append(arrival)

    def drop(self, arrival: Arrival) -> None:
        """Stop counting the request, because a report includes it or because the engine will never get it."""
        self.num_requests -= 1
        self.num_tokens -= arrival.num_tokens
        self.num_blocks -= arrival.num_blocks

    def add(self, num_tokens: int, num_cached_tokens: int) -> None:
        """Count a request that has arrived and that the engine already has."""
        self.hand_over(self.expect(num_tokens, num_cached_tokens))

    def shown(self, num_taken: int) -> None:
        """Stop counting the requests that a report includes: the first `num_taken` that were ever handed over."""
        while self._handed_over and self._num_shown < num_taken:
            self.drop(self._handed_over.popleft())
            self._num_shown += 1


def is_contradicted(belief: Belief, num_requests: int, num_uncached_tokens: int) -> bool:
    """Whether a worker with this many requests and uncomputed prompt tokens has more work than a router believed, by
    more than the belief's slack."""
    if not belief.HasField("slack_ms"):
        return False
    more_tokens = max(num_uncached_tokens - belief.num_uncached_tokens, 0)
    more_requests = max(num_requests - belief.num_requests, 0)
    return more_tokens * belief.ms_per_token + more_requests * belief.ms_per_request > belief.slack_ms
