"""Which texts are encoded together.

A batch is as long as its longest text, and the rest is padding. So texts of about the same length go together: the
first in rank, and those nearest to it in length, as long as padding stays within a bound.

Rank is priority, then fair shares of the tenants: each text gets a virtual time at which its tenant would have had it
encoded if all tenants had equal shares (start-time fair queueing). The first in rank is in every next batch, so no text
waits longer than for those before it. Only the first `window` texts in rank are looked at, which keeps a late text from
overtaking many.

Pure.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from headrace.worker.request.request import Request

# The least tokens for which a text is worth a batch of its own instead of a place in another one.
_LEAST_TOKENS = 128


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """`window`: how many texts in rank a batch is chosen from. `max_tokens` of a batch, padding included; a longer text
    is alone. `max_padding` is the share of padding among the tokens of a batch."""

    window: int = 128
    max_tokens: int = 1024
    max_padding: float = 0.1


class _Waiting(NamedTuple):
    """A text with its rank: the smallest goes first."""

    priority: int
    virtual_time: float
    number: int
    request: Request


class Batcher:
    """The texts that wait."""

    def __init__(self, limits: BatchLimits) -> None:
        self.limits = limits
        self.num_tokens = 0
        """Of all that wait."""
        self._waiting: list[_Waiting] = []
        self._entries: dict[Request, _Waiting] = {}
        self._virtual_time = 0.0
        self._tenants: dict[str, float] = {}
        self._num_ever = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def requests(self) -> list[Request]:
        """Those that wait, first in rank first."""
        return [entry.request for entry in self._waiting]

    def add(self, request: Request) -> None:
        """A text comes."""
        start = max(self._virtual_time, self._tenants.get(request.tenant, 0.0))
        self._tenants[request.tenant] = start + request.num_tokens
        self._num_ever += 1
        entry = _Waiting(-request.priority, start, self._num_ever, request)
        bisect.insort(self._waiting, entry)
        self._entries[request] = entry
        self.num_tokens += request.num_tokens

    def remove(self, request: Request) -> bool:
        """A text is no longer wanted. False if it does not wait."""
        entry = self._entries.pop(request, None)
        if entry is None:
            return False
        del self._waiting[bisect.bisect_left(self._waiting, entry)]
        self.num_tokens -= request.num_tokens
        if not self._waiting:
            self._tenants.clear()
        return True

    def tokens_ahead(self, request: Request) -> int:
        """Tokens of those that go before a text that waits."""
        place = bisect.bisect_left(self._waiting, self._entries[request])
        return sum(entry.request.num_tokens for entry in self._waiting[:place])

    def take(self, num_places: int = 1) -> Sequence[Request]:
        """The next batch, longest text last; empty if none waits. With `num_places` batches to begin now, it is at most
        an equal part of what waits, so that no core idles."""
        if not self._waiting:
            return ()
        self._virtual_time = max(self._virtual_time, self._waiting[0].virtual_time)
        head = self._waiting[0].request
        window = [entry.request for entry in self._waiting[: self.limits.window]]
        window.sort(key=lambda request: request.num_tokens)
        part = -(-self.num_tokens // num_places)
        most = min(self.limits.max_tokens, max(part, _LEAST_TOKENS))
        low, high = self._around(window, window.index(head), most)
        batch = window[low : high + 1]
        for request in batch:
            self.remove(request)
        return batch

    def _around(self, window: Sequence[Request], place: int, most: int) -> tuple[int, int]:
        """The first and the last of the texts around a place, in order of length, that go with the one there."""
        low = high = place
        total = window[place].num_tokens
        while True:
            choices = []
            if low > 0:
                choices.append((window[high].num_tokens, window[low - 1].num_tokens, low - 1, high))
            if high + 1 < len(window):
                longest = window[high + 1].num_tokens
                choices.append((longest, longest, low, high + 1))
            best = None
            for longest, added, first, last in choices:
                size = longest * (last - first + 1)
                padding = 1 - (total + added) / size
                if size <= most and padding <= self.limits.max_padding and (best is None or padding < best[0]):
                    best = padding, added, first, last
            if best is None:
                return low, high
            total += best[1]
            _, _, low, high = best

    def check(self) -> None:
        """Assert the invariants. For tests."""
        assert len(self._waiting) == len(self._entries)
        assert self._waiting == sorted(self._waiting)
        assert self.num_tokens == sum(request.num_tokens for request in self._entries)
        assert self._waiting or not self._tenants
