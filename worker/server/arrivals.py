"""Requests that have come and that the engine's reports do not show yet, and whether a router knew of them.

The engine takes requests in between two steps and reports after the step, so for some hundred milliseconds nobody would
see them. What routers believe of a worker is held against both: what was reported, and what has arrived since.

Pure.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from headrace.protos.inference_pb2 import Belief


class _Arrival(NamedTuple):
    number: int
    num_tokens: int
    num_blocks: int


class Arrivals:
    """Counts the requests of one worker from when they come until a report shows them, in the order of the mailbox.

    `num_requests`, `num_tokens` (not expected to be cached) and `num_blocks` (KV blocks of `block_size` that they will
    take) are sums over them.
    """

    def __init__(self, block_size: int) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self.num_blocks = 0
        self._block_size = block_size
        self._num_ever = 0
        self._arrivals: deque[_Arrival] = deque()

    def add(self, num_tokens: int, num_cached_tokens: int) -> None:
        """A request of so many tokens has come, of which so many are expected to be cached."""
        num_cached_tokens = min(num_cached_tokens, num_tokens - 1)
        num_blocks = -(-(num_tokens + 1) // self._block_size) - num_cached_tokens // self._block_size
        self._num_ever += 1
        self._arrivals.append(_Arrival(self._num_ever, num_tokens - num_cached_tokens, num_blocks))
        self.num_requests += 1
        self.num_tokens += num_tokens - num_cached_tokens
        self.num_blocks += num_blocks

    def shown(self, num_taken: int) -> None:
        """A report shows the first `num_taken` requests that ever came."""
        while self._arrivals and self._arrivals[0].number <= num_taken:
            arrival = self._arrivals.popleft()
            self.num_requests -= 1
            self.num_tokens -= arrival.num_tokens
            self.num_blocks -= arrival.num_blocks


def is_contradicted(belief: Belief, num_requests: int, num_uncached_tokens: int) -> bool:
    """Whether a worker with so many requests, and so many tokens of prompts to compute, has more work than a router
    believed, by more than it allows for."""
    if not belief.HasField("slack_ms"):
        return False
    more_tokens = max(num_uncached_tokens - belief.num_uncached_tokens, 0)
    more_requests = max(num_requests - belief.num_requests, 0)
    return more_tokens * belief.ms_per_token + more_requests * belief.ms_per_request > belief.slack_ms
