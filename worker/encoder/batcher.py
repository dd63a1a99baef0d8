"""Chooses the texts that are encoded together.

A batch is as long as its longest text, and the rest is padding. So texts of about the same length go together: the
first in rank, and those nearest to it in length, as long as padding stays within a limit.

Rank is priority, then fair shares of the tenants (`headrace.common.fair_queue`). The next batch always contains the
first in rank, so a text waits only for those before it. Only the first `window` texts in rank are looked at, which
keeps a late text from overtaking many.

Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from headrace.common.fair_queue import Entry, FairQueue
from headrace.worker.request.request import Request

# The minimum number of tokens for which a text gets its own batch instead of a place in another one.
_LEAST_TOKENS = 128


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """A batch is chosen from the first `window` texts in rank. It has at most `max_tokens` tokens, padding included,
    unless it is a single longer text. At most the share `max_padding` of its tokens is padding."""

    window: int = 128
    max_tokens: int = 1024
    max_padding: float = 0.1


class Batcher:
    """Keeps the texts that wait, and chooses those of the next batch."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.num_tokens = 0
        """Number of tokens of all waiting texts."""
        self._queue: FairQueue[Request] = FairQueue()
        self._entries: dict[Request, Entry[Request]] = {}

    def __len__(self) -> int:
        """Number of waiting texts."""
        return len(self._entries)

    def requests(self) -> list[Request]:
        """The waiting texts, in order of rank."""
        return [entry.item for entry in self._queue.in_order()]

    def add(self, request: Request) -> None:
        """Add a text to those that wait, after those of the same rank."""
        charge = request.num_tokens
        self._entries[request] = self._queue.push(
            request, tenant=request.tenant, priority=request.priority, charge=charge
        )
        self.num_tokens += charge

    def remove(self, request: Request) -> bool:
        """Remove a text without charging its tenant. Returns False if it was not waiting."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return False
        self._queue.remove(entry)
        self.num_tokens -= request.num_tokens
        return True

    def tokens_ahead(self, request: Request) -> float:
        """Approximate number of tokens that would be encoded before a new text."""
        return self._queue.charge_ahead(request.tenant, request.priority)

    def take(self, num_places: int = 1) -> Sequence[Request]:
        """Remove and return the next batch, longest text last; empty if no text waits. With `num_places` free places,
        the batch is at most an equal part of all waiting texts, so that no core idles."""
        window = list(islice(self._queue.in_order(), self.limits.window))
        if not window:
            return ()
        head = window[0]
        window.sort(key=_num_tokens)
        part = -(-self.num_tokens // num_places)
        most = min(self.limits.max_tokens, max(part, _LEAST_TOKENS))
        low, high = _around(
            [entry.item.num_tokens for entry in window], window.index(head), most, self.limits.max_padding
        )
        batch = [self._queue.take(entry) for entry in window[low : high + 1]]
        for request in batch:
            del self._entries[request]
            self.num_tokens -= request.num_tokens
        return batch

    def check(self) -> None:
        """Assert the invariants. For tests."""
        self._queue.check()
        assert set(self.requests()) == set(self._entries)
        assert self.num_tokens == sum(request.num_tokens for request in self._entries)


def _num_tokens(entry: Entry[Request]) -> int:
    return entry.item.num_tokens


def _around(lengths: Sequence[int], place: int, most: int, max_padding: float) -> tuple[int, int]:
    """Choose the batch around the text at `place`. `lengths` are ascending. Returns the indices of the first and the
    last text; with padding, the batch has at most `most` tokens."""
    low = high = place
    total = lengths[place]
    while True:
        choices = []
        if low > 0:
            choices.append((lengths[high], lengths[low - 1], low - 1, high))
        if high + 1 < len(lengths):
            choices.append((lengths[high + 1], lengths[high + 1], low, high + 1))
        best = None
        for longest, added, first, last in choices:
            size = longest * (last - first + 1)
            padding = 1 - (total + added) / size
            if size <= most and padding <= max_padding and (best is None or padding < best[0]):
                best = padding, added, first, last
        if best is None:
            return low, high
        total += best[1]
        _, _, low, high = best
