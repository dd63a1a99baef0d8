"""Who goes next when requests wait: higher priority first, fair shares between tenants, first come first within.

Start-time fair queueing (Goyal, Vin, Cheng 1996): each entry has a start tag, the virtual time at which its tenant's
earlier entries would have been served if every tenant had a server of its own with its weight as speed. The entry with
the least tag goes; its tag is the virtual time now. A tenant that floods the queue only moves its own tags away:

    A (weight 1)  a0:0  a1:10  a2:20  a3:30 ...
    B (weight 2)        b0:10  b1:15            came when virtual time was 10
    order         a0    a1 b0  b1  a2  a3 ...   equal tags in order of arrival

Pure. Not safe for threads.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import count
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")

DEFAULT_WEIGHT = 1.0


class Entry(NamedTuple):
    """What waits, and its place: entries compare in the order in which they go. `number` is unique."""

    negative_priority: int
    start: float
    number: int
    tenant: str

    @property
    def priority(self) -> int:
        """Higher goes first."""
        return -self.negative_priority


class FairQueue(Generic[T]):
    """Items of several tenants. The caller bounds its length. `weights` are the tenants' shares, 1 where none is
    given."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        assert all(weight > 0 for weight in self._weights.values()), "a tenant without a share would wait for ever"
        self._items: dict[Entry, T] = {}
        self._heap: list[Entry] = []
        self._finish: dict[str, float] = {}  # virtual time at which a tenant's entries so far are served
        self._now = 0.0
        self._numbers = count()

    def __len__(self) -> int:
        """Number of entries."""
        return len(self._items)

    def push(self, item: T, *, tenant: str, priority: int, charge: float) -> Entry:
        """Add an item. `charge` is its share of work, in any one unit."""
        assert charge > 0, "what costs nothing needs no share"
        start = max(self._now, self._finish.get(tenant, 0.0))
        self._finish[tenant] = start + charge / self._weights.get(tenant, DEFAULT_WEIGHT)
        entry = Entry(-priority, start, next(self._numbers), tenant)
        self._items[entry] = item
        heapq.heappush(self._heap, entry)
        return entry

    def first(self) -> T | None:
        """The item that goes next; None if there is none."""
        self._drop_removed()
        return self._items[self._heap[0]] if self._heap else None

    def pop(self) -> T:
        """Take the first item out. There is one."""
        self._drop_removed()
        entry = heapq.heappop(self._heap)
        self._now = max(self._now, entry.start)
        item = self._items.pop(entry)
        self._forget_idle()
        return item

    def remove(self, entry: Entry) -> None:
        """Take an entry out. No effect when it is out already."""
        self._items.pop(entry, None)
        self._forget_idle()

    def num_ahead(self, tenant: str, priority: int) -> int:
        """Entries that would go before a new one of this tenant and priority."""
        start = max(self._now, self._finish.get(tenant, 0.0))
        return sum((entry.negative_priority, entry.start) <= (-priority, start) for entry in self._items)

    def to_displace(self, tenant: str, priority: int) -> Entry | None:
        """The entry that should give way to a new one when there is no room; None if the new one should stay out.

        It is the newest one of the tenant that has most waiting, of the lowest priority there is: if that is lower
        than the new one's, or else if that tenant would still have no less than this one.
        """
        if not self._items:
            return None
        lowest = max(entry.negative_priority for entry in self._items)
        counts: dict[str, int] = {}
        newest: dict[str, Entry] = {}
        for entry in self._items:  # in order of arrival
            if entry.negative_priority == lowest:
                counts[entry.tenant] = counts.get(entry.tenant, 0) + 1
                newest[entry.tenant] = entry
        greediest = max(counts, key=lambda name: counts[name])
        if -lowest < priority or (-lowest == priority and counts[greediest] > counts.get(tenant, 0) + 1):
            return newest[greediest]
        return None

    def check(self) -> None:
        """Assert that the parts agree. For tests."""
        assert set(self._items) <= set(self._heap), "what waits has a place"
        assert {entry.tenant for entry in self._items} <= set(self._finish), "who waits has a share"
        assert len(self._finish) <= 2 * len(self._items) + 16, "who does not wait is forgotten"

    def item_of(self, entry: Entry) -> T:
        """The item of an entry that is in the queue."""
        return self._items[entry]

    def _drop_removed(self) -> None:
        while self._heap and self._heap[0] not in self._items:
            heapq.heappop(self._heap)

    def _forget_idle(self) -> None:
        """Nobody waits: all tenants are equal again. Keeps the memory of tenants bounded by the entries."""
        if not self._items:
            self._heap.clear()
            self._finish.clear()
            self._now = 0.0
        elif len(self._finish) > 2 * len(self._items) + 16:
            waiting = {entry.tenant for entry in self._items}
            self._finish = {name: at for name, at in self._finish.items() if name in waiting}
