"""The states of images that were encoded, by the images' digests, in a bounded amount of memory.

Requests hold the states that they still have to compute with. Other states stay as long as there is room, and the least
recently used go first. So a second request with the same image needs no encoding, and neither does one that lost its KV
blocks to others.

    budget   | held by requests | promised: being encoded | kept for later requests | free |

Images of requests that wait to hold them are announced. So the tokens that still have to be encoded are known at any
time, without a look at the requests.

Pure.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from headrace.worker.request.images import ImageStates


@dataclass(slots=True)
class _Entry:
    """States, and the number of requests that hold them. None while they are promised."""

    num_bytes: int
    states: ImageStates | None = None
    num_holders: int = 0


@dataclass(slots=True)
class _Announced:
    """An image that so many requests wait to hold, and the number of its tokens."""

    num_tokens: int
    num_requests: int = 0


class StateStore:
    """States of images in at most `budget_bytes`. A single request may exceed that while it is alone, so that no image
    is too large for a small budget.

    `num_hits`, `num_misses` and `num_evictions` count images: those that a request found here or that were being
    encoded for another one, those that had to be encoded, and those that were dropped to make room.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.num_hits = self.num_misses = self.num_evictions = 0
        self._budget = budget_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """In the order of their last use."""
        self._num_bytes = self._num_held_bytes = 0
        self._announced: dict[bytes, _Announced] = {}
        self._num_missing_tokens = 0

    @property
    def num_missing_tokens(self) -> int:
        """Tokens of the announced images that are neither here nor promised. Each image counts once."""
        return self._num_missing_tokens

    @property
    def num_bytes(self) -> int:
        """Memory of all states, including promised ones."""
        return self._num_bytes

    @property
    def num_holders(self) -> int:
        """The number of holds on images, over all images."""
        return sum(entry.num_holders for entry in self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, digest: bytes) -> bool:
        """Whether the states are here or promised."""
        return digest in self._entries

    def announce(self, digest: bytes, num_tokens: int) -> None:
        """Count an image that a request waits to hold, until `withdraw` is called as often."""
        announced = self._announced.get(digest)
        if announced is None:
            announced = self._announced[digest] = _Announced(num_tokens)
            if digest not in self._entries:
                self._num_missing_tokens += num_tokens
        announced.num_requests += 1

    def withdraw(self, digest: bytes) -> None:
        """Undo one call of `announce`."""
        announced = self._announced[digest]
        announced.num_requests -= 1
        if not announced.num_requests:
            del self._announced[digest]
            if digest not in self._entries:
                self._num_missing_tokens -= announced.num_tokens

    def hold(self, wanted: dict[bytes, int]) -> list[bytes] | None:
        """Hold the states of these images, whose sizes in bytes are given, until `release` is called once for each.
        Returns those that the caller has to have encoded: they are promised now. None, with nothing held, if there is
        no room for all of them at present."""
        new = {digest: size for digest, size in wanted.items() if digest not in self._entries}
        of_others = sum(self._unheld_bytes(digest) for digest in wanted)
        needed = self._num_held_bytes + of_others + sum(new.values())
        if needed > self._budget and self._num_held_bytes:
            return None
        for digest in wanted:
            if digest not in new:
                self._hold(digest)
        self._evict(self._budget - sum(new.values()))
        for digest, size in new.items():
            self._add(digest, size)
            self._hold(digest)
        self.num_hits += len(wanted) - len(new)
        self.num_misses += len(new)
        return list(new)

    def states_of(self, digest: bytes) -> ImageStates | None:
        """The states of an image that is held; None while they are promised."""
        return self._entries[digest].states

    def put(self, digest: bytes, states: ImageStates) -> None:
        """Store the states of an image. If no request holds the image any more, they are kept only if there is room
        without eviction."""
        entry = self._entries.get(digest)
        if entry is None and self._num_bytes + states.num_bytes <= self._budget:
            entry = self._add(digest, states.num_bytes)
        if entry is not None and entry.states is None:
            entry.states = states

    def release(self, digest: bytes) -> bool:
        """Release one hold on an image. Returns True if its states were only promised and no other request waits for
        them; the promise is then forgotten."""
        entry = self._entries[digest]
        entry.num_holders -= 1
        if entry.num_holders:
            return False
        self._num_held_bytes -= entry.num_bytes
        if entry.states is None:
            self._drop(digest)
            return True
        self._evict(self._budget)
        return False

    def check(self) -> None:
        """Assert the sums. For tests."""
        entries = self._entries.values()
        assert self._num_bytes == sum(entry.num_bytes for entry in entries)
        assert self._num_held_bytes == sum(entry.num_bytes for entry in entries if entry.num_holders)
        assert all(entry.num_holders >= 0 and (entry.num_holders or entry.states) for entry in entries)
        assert self._num_bytes <= max(self._budget, self._num_held_bytes)
        missing = (one.num_tokens for digest, one in self._announced.items() if digest not in self._entries)
        assert self._num_missing_tokens == sum(missing)

    def _unheld_bytes(self, digest: bytes) -> int:
        entry = self._entries.get(digest)
        return entry.num_bytes if entry is not None and not entry.num_holders else 0

    def _hold(self, digest: bytes) -> None:
        entry = self._entries[digest]
        self._entries.move_to_end(digest)
        if not entry.num_holders:
            self._num_held_bytes += entry.num_bytes
        entry.num_holders += 1

    def _evict(self, most_bytes: int) -> None:
        """Drop states that nobody holds, least recently used first, until at most this much is left."""
        if self._num_bytes <= most_bytes:
            return
        for digest in [digest for digest, entry in self._entries.items() if not entry.num_holders]:
            if self._num_bytes <= most_bytes:
                return
            self._drop(digest)
            self.num_evictions += 1

    def _add(self, digest: bytes, num_bytes: int) -> _Entry:
        entry = self._entries[digest] = _Entry(num_bytes)
        self._num_bytes += num_bytes
        if digest in self._announced:
            self._num_missing_tokens -= self._announced[digest].num_tokens
        return entry

    def _drop(self, digest: bytes) -> None:
        self._num_bytes -= self._entries.pop(digest).num_bytes
        if digest in self._announced:
            self._num_missing_tokens += self._announced[digest].num_tokens
