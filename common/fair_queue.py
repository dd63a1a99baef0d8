"""The order of waiting requests: by priority, then in fair shares between tenants, then by arrival.

Start-time fair queueing (Goyal, Vin, Cheng 1996), charged when an entry is served. Each tenant has a start tag: its
served work, divided by its weight. The tenant with the lowest tag goes next, with its oldest entry; then its tag grows
by the entry's charge divided by the weight. An entry that is removed before its turn is not charged, so a tenant whose
clients give up and try again keeps its share. A new tenant starts at the tag that was served last. So it gets its share
from then on, but not for the past. A tenant that floods the queue only delays itself:

    A (weight 1)  a0:0  a1:10  a2:20  a3:30 ...
    B (weight 2)        b0:10  b1:15            came when tag 10 was served
    order         a0    a1 b0  b1  a2  a3 ...   equal tags in order of arrival

Each priority has its own queue, which shares among its tenants what higher priorities leave.

Pure. Not safe for threads.
"""

from __future__ import annotations

import bisect
import heapq
import math
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")

DEFAULT_WEIGHT = 1.0
# Maximum of outdated items in a heap, and of tags of tenants that do not wait.
_SLACK = 16


@dataclass(frozen=True, slots=True, eq=False)
class Entry(Generic[T]):
    """A waiting request. `charge` is its share of work; numbers increase in order of arrival."""

    item: T
    tenant: str
    priority: int
    charge: float
    number: int


class _Level(Generic[T]):
    """The entries of one priority, by tenant; no tenant is without entries.

    The heap has at least one item for each tenant that waits: (tag, number of the oldest entry, tenant). Tags and
    numbers only grow, so an outdated item is never too late. It is corrected when it reaches the top.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        self.waiting: dict[str, OrderedDict[int, Entry[T]]] = {}
        self.heap: list[tuple[float, int, str]] = []
        self.tags: dict[str, float] = {}  # of all tenants that wait, and of some that waited
        self.charges: dict[str, float] = {}  # sum of the charges of each tenant's waiting entries
        self.now = 0.0  # the tag that was served last
        self._weights = weights

    def push(self, entry: Entry[T]) -> None:
        tenant = entry.tenant
        entries = self.waiting.get(tenant)
        if entries is not None:
            entries[entry.number] = entry
            self.charges[tenant] += entry.charge
            return
        self.waiting[tenant] = OrderedDict({entry.number: entry})
        self.charges[tenant] = entry.charge
        self.tags[tenant] = tag = self.tag_of(tenant)
        heapq.heappush(self.heap, (tag, entry.number, tenant))
        self._compact()

    def first(self) -> Entry[T]:
        heap = self.heap
        while True:
            tag, number, tenant = heap[0]
            entries = self.waiting.get(tenant)
            if entries is None:
                heapq.heappop(heap)
                continue
            entry = next(iter(entries.values()))
            if (tag, number) == (self.tags[tenant], entry.number):
                return entry
            heapq.heapreplace(heap, (self.tags[tenant], entry.number, tenant))

    def serve(self, entry: Entry[T]) -> None:
        tag = self.tags[entry.tenant]
        self.now = max(self.now, tag)
        self.tags[entry.tenant] = tag + self.cost_of(entry)
        self.remove(entry)

    def remove(self, entry: Entry[T]) -> None:
        entries = self.waiting[entry.tenant]
        del entries[entry.number]
        self.charges[entry.tenant] -= entry.charge
        if not entries:
            del self.waiting[entry.tenant], self.charges[entry.tenant]
            self._compact()

    def in_order(self) -> Iterator[Entry[T]]:
        """The entries in the order in which they would be served."""
        rest = {name: iter(entries.values()) for name, entries in self.waiting.items()}
        if len(rest) == 1:
            yield from rest.popitem()[1]
            return
        heap = [(self.tags[name], entry.number, entry) for name, entry in ((name, next(rest[name])) for name in rest)]
        heapq.heapify(heap)
        while heap:
            tag, _, entry = heap[0]
            yield entry
            following = next(rest[entry.tenant], None)
            if following is None:
                heapq.heappop(heap)
            else:
                heapq.heapreplace(heap, (tag + self.cost_of(entry), following.number, following))

    def tag_of(self, tenant: str) -> float:
        """The tag of the tenant's next entry."""
        return max(self.now, self.tags.get(tenant, 0.0))

    def cost_of(self, entry: Entry[T]) -> float:
        """The amount by which serving an entry increases its tenant's tag."""
        return entry.charge / self._weights.get(entry.tenant, DEFAULT_WEIGHT)

    def num_ahead(self, tenant: str) -> int:
        """Entries that go before a new one of this tenant."""
        own: Mapping[int, Entry[T]] = self.waiting.get(tenant, {})
        until = sum(map(self.cost_of, own.values()), start=self.tag_of(tenant))
        number = len(own)
        for other, entries in self.waiting.items():
            tag = self.tags[other]
            for entry in entries.values() if other != tenant else ():
                if tag > until:
                    break
                number += 1
                tag += self.cost_of(entry)
        return number

    def charge_ahead(self, tenant: str) -> float:
        """Charges that would be served before a new entry of this tenant, to within an entry of each other tenant."""
        ahead = self.charges.get(tenant, 0.0)
        until = self.tag_of(tenant) + ahead / self._weights.get(tenant, DEFAULT_WEIGHT)
        for other, charge in self.charges.items():
            if other != tenant:
                ahead += min(charge, max(until - self.tags[other], 0.0) * self._weights.get(other, DEFAULT_WEIGHT))
        return ahead

    def _compact(self) -> None:
        """Keep the sizes of heap and tags within a constant factor of the number of waiting tenants."""
        most = 2 * len(self.waiting) + _SLACK
        if len(self.heap) > most:
            self.heap = [(self.tags[name], next(iter(entries)), name) for name, entries in self.waiting.items()]
            heapq.heapify(self.heap)
        if len(self.tags) > most:
            # New tenants start at `now`, so dropping these tags loses nothing.
            self.tags = {name: tag for name, tag in self.tags.items() if tag > self.now or name in self.waiting}
        if len(self.tags) > most:
            self.tags = {name: self.tags[name] for name in self.waiting}

    def check(self) -> None:
        assert self.waiting, "a priority without entries is removed"
        assert all(self.waiting.values()), "a tenant without entries is forgotten"
        assert self.waiting.keys() == self.charges.keys(), "who waits is charged"
        for name, entries in self.waiting.items():
            assert math.isclose(self.charges[name], sum(entry.charge for entry in entries.values())), "by the sum"
        placed = {name for _, _, name in self.heap}
        assert self.waiting.keys() <= placed, "what waits has a place"
        assert self.waiting.keys() <= self.tags.keys(), "who waits has a tag"
        most = 2 * len(self.waiting) + _SLACK
        assert len(self.heap) <= most, "dead items go"
        assert len(self.tags) <= most, "who does not wait is forgotten"
        for tag, number, name in self.heap:
            if name in self.waiting:
                assert (tag, number) <= (self.tags[name], next(iter(self.waiting[name]))), "nothing comes too late"


class FairQueue(Generic[T]):
    """Items of several tenants. The caller bounds its length. `weights` are the tenants' shares, 1 where none is
    given."""

    def __init__(self, weights: Mapping[str, float] | None = None) -> None:
        self._weights = dict(weights or {})
        assert all(weight > 0 for weight in self._weights.values()), "a tenant without a share would wait for ever"
        self._levels: dict[int, _Level[T]] = {}
        self._priorities: list[int] = []  # of the levels, ascending
        self._num_entries = 0
        self._numbers = count()

    def __len__(self) -> int:
        """Number of entries."""
        return self._num_entries

    def push(self, item: T, *, tenant: str, priority: int, charge: float) -> Entry[T]:
        """Add an item. `charge` is its share of work, in any one unit; `pop` charges it to the tenant."""
        assert charge > 0, "what costs nothing needs no share"
        level = self._levels.get(priority)
        if level is None:
            level = self._levels[priority] = _Level(self._weights)
            bisect.insort(self._priorities, priority)
        entry = Entry(item, tenant, priority, charge, next(self._numbers))
        level.push(entry)
        self._num_entries += 1
        return entry

    def first(self) -> Entry[T] | None:
        """The entry that goes next; None if there is none."""
        return self._levels[self._priorities[-1]].first() if self._priorities else None

    def pop(self) -> T:
        """Remove the first entry and charge its tenant. The queue must not be empty."""
        entry = self.first()
        assert entry is not None, "the queue is empty"
        return self.take(entry)

    def take(self, entry: Entry[T]) -> T:
        """Remove an entry, which need not be the first, and charge its tenant."""
        self._levels[entry.priority].serve(entry)
        self._took(entry)
        return entry.item

    def in_order(self) -> Iterator[Entry[T]]:
        """The entries in the order in which `pop` would return them. The queue must not change while they are read."""
        for priority in reversed(self._priorities):
            yield from self._levels[priority].in_order()

    def remove(self, entry: Entry[T]) -> None:
        """Remove an entry before its turn, without charging its tenant. No effect if it was removed already."""
        if entry in self:
            self._levels[entry.priority].remove(entry)
            self._took(entry)

    def __contains__(self, entry: Entry[T]) -> bool:
        """Whether an entry of this queue still waits."""
        level = self._levels.get(entry.priority)
        return level is not None and entry.number in level.waiting.get(entry.tenant, ())

    def num_ahead(self, tenant: str, priority: int) -> int:
        """Entries that would go before a new one of this tenant and priority."""
        number = 0
        for other in reversed(self._priorities):
            level = self._levels[other]
            if other > priority:
                number += sum(map(len, level.waiting.values()))
            elif other == priority:
                number += level.num_ahead(tenant)
        return number

    def charge_ahead(self, tenant: str, priority: int) -> float:
        """Sum of the charges that would go before a new entry of this tenant and priority. Takes time proportional to
        the number of tenants. Exact to within one entry of each tenant."""
        charge = 0.0
        for other in reversed(self._priorities):
            level = self._levels[other]
            if other > priority:
                charge += sum(level.charges.values())
            elif other == priority:
                charge += level.charge_ahead(tenant)
        return charge

    def to_displace(self, tenant: str, priority: int, others: Iterable[FairQueue[T]] = ()) -> Entry[T] | None:
        """The entry to remove in favour of a new one when there is no room; None if the new one should be refused. It
        may be an entry of the `others`, with which this queue shares its room.

        It belongs to the tenant with most entries in the lowest priority of all these queues, if that priority is lower
        than the new one's, or if that tenant would still have at least as many entries as this one. Otherwise it is an
        entry of this tenant, if another queue would still have at least as many of them. It is the newest one in the
        queue where its tenant has most.
        """
        queues = [queue for queue in (self, *others) if queue._priorities]
        lowest = min((queue._priorities[0] for queue in queues), default=priority + 1)
        if lowest > priority:
            return None
        waiting = [queue._levels[lowest].waiting for queue in queues if queue._priorities[0] == lowest]
        numbers = Counter[str]()
        for each in waiting:
            numbers.update({name: len(entries) for name, entries in each.items()})
        victim = max(numbers, key=numbers.__getitem__)
        keeps = 0
        if lowest == priority and numbers[victim] <= numbers[tenant] + 1:
            own = self._levels.get(priority)
            victim = tenant
            keeps = 1 + (len(own.waiting.get(tenant, ())) if own is not None else 0)
        entries = max((each[victim] for each in waiting if victim in each), key=len, default=None)
        if entries is None or len(entries) <= keeps:
            return None
        return entries[next(reversed(entries))]

    def check(self) -> None:
        """Assert that the parts agree. For tests."""
        assert self._priorities == sorted(self._levels), "each priority has its place"
        assert self._num_entries == sum(
            len(entries) for level in self._levels.values() for entries in level.waiting.values()
        )
        for level in self._levels.values():
            level.check()

    def _took(self, entry: Entry[T]) -> None:
        """Remove an empty level. Without entries, all tenants are equal again."""
        self._num_entries -= 1
        if not self._levels[entry.priority].waiting:
            del self._levels[entry.priority]
            self._priorities.remove(entry.priority)
