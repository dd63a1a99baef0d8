"""Priorities, shares and displacement of waiting requests."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.common.fair_queue import Entry, FairQueue


def drained(queue: FairQueue[str]) -> list[str]:
    order = []
    while queue.first() is not None:
        order.append(queue.pop())
    return order


def test_one_tenant_is_served_first_come_first() -> None:
    queue: FairQueue[str] = FairQueue()
    for name in "abc":
        queue.push(name, tenant="t", priority=0, charge=10)
    assert drained(queue) == ["a", "b", "c"]


def test_a_higher_priority_goes_before_all_lower_ones() -> None:
    queue: FairQueue[str] = FairQueue()
    for name, priority in (("low", -1), ("ordinary", 0), ("high", 5), ("high too", 5)):
        queue.push(name, tenant="t", priority=priority, charge=10)
    assert drained(queue) == ["high", "high too", "ordinary", "low"]


def test_an_entry_can_be_taken_out_of_its_turn_and_is_charged() -> None:
    queue: FairQueue[str] = FairQueue()
    entries = [
        queue.push(f"{tenant}{number}", tenant=tenant, priority=0, charge=10) for number in range(3) for tenant in "ab"
    ]
    assert queue.take(entries[4]) == "a2"
    queue.check()
    assert drained(queue) == ["b0", "a0", "b1", "a1", "b2"]


def test_a_flood_of_one_tenant_does_not_hold_up_another() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(100):
        queue.push(f"flood {number}", tenant="a", priority=0, charge=10)
    for number in range(3):
        queue.push(f"other {number}", tenant="b", priority=0, charge=10)
    assert drained(queue)[:6] == ["flood 0", "other 0", "flood 1", "other 1", "flood 2", "other 2"]


def test_who_comes_late_gets_its_share_from_then_on_and_none_for_the_past() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(20):
        queue.push("a", tenant="a", priority=0, charge=10)
    for _ in range(10):
        queue.pop()
    for _ in range(10):
        queue.push("b", tenant="b", priority=0, charge=10)
    assert Counter(drained(queue)[:8]) == {"a": 4, "b": 4}


def test_shares_follow_weights_and_charges() -> None:
    queue: FairQueue[str] = FairQueue({"a": 3.0})
    for _ in range(60):
        queue.push("a", tenant="a", priority=0, charge=10)
        queue.push("b", tenant="b", priority=0, charge=10)
    first = Counter(drained(queue)[:40])
    assert 29 <= first["a"] <= 31
    for _ in range(60):
        queue.push("long", tenant="b", priority=0, charge=40)
        queue.push("short", tenant="c", priority=0, charge=10)
    first = Counter(drained(queue)[:40])
    assert 31 <= first["short"] <= 33


def test_what_was_removed_does_not_go() -> None:
    queue: FairQueue[str] = FairQueue()
    entries = [queue.push(name, tenant="t", priority=0, charge=1) for name in "abc"]
    queue.remove(entries[0])
    queue.remove(entries[0])
    assert (len(queue), drained(queue)) == (2, ["b", "c"])


def test_the_greediest_of_the_lowest_priority_gives_way() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(3):
        queue.push(f"a{number}", tenant="a", priority=0, charge=1)
    queue.push("vip", tenant="v", priority=9, charge=1)
    newest = queue.to_displace("b", 0)
    assert newest is not None
    assert newest.item == "a2"
    assert queue.to_displace("a", 0) is None
    assert queue.to_displace("b", -1) is None
    urgent = queue.to_displace("a", 1)
    assert urgent is not None
    assert urgent.item == "a2"


def test_equals_do_not_displace_each_other_in_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a0", tenant="a", priority=0, charge=1)
    queue.push("a1", tenant="a", priority=0, charge=1)
    queue.push("b0", tenant="b", priority=0, charge=1)
    assert queue.to_displace("b", 0) is None


def test_queues_that_share_their_room_give_way_to_each_other() -> None:
    full: FairQueue[str] = FairQueue()
    other: FairQueue[str] = FairQueue()
    for number in range(3):
        full.push(f"a{number}", tenant="a", priority=0, charge=1)
    for name, tenant in (("b0", "b"), ("a3", "a")):
        other.push(name, tenant=tenant, priority=0, charge=1)

    def victim(tenant: str, priority: int = 0) -> str | None:
        entry = other.to_displace(tenant, priority, [full])
        return None if entry is None else entry.item

    assert victim("c") == victim("b") == "a2", "the greediest of all queues, where it has most"
    assert victim("a") == "a2", "the tenant makes room for itself where it has more"
    assert full.to_displace("a", 0, [other]) is None
    assert victim("c", -1) is None
    other.push("low", tenant="b", priority=-1, charge=1)
    assert victim("c") == "low"
    assert (full.to_displace("c", -1, [other]), full.to_displace("c", -2, [other])) == (None, None)
    assert FairQueue[str]().to_displace("c", 0, [FairQueue()]) is None


Operation = st.one_of(
    st.tuples(st.just("push"), st.sampled_from("abcd"), st.integers(-1, 1), st.floats(1, 100)),
    st.tuples(st.just("pop")),
    st.tuples(st.just("remove"), st.integers(0, 1000)),
)


@given(st.lists(Operation, max_size=80))
def test_whatever_happens_each_item_leaves_once_and_tenants_stay_in_order(operations: list[tuple[object, ...]]) -> None:
    queue: FairQueue[int] = FairQueue({"a": 2.0})
    inside: dict[int, Entry[int]] = {}
    for number, (what, *rest) in enumerate(operations):
        if what == "push":
            tenant, priority, charge = rest
            ahead = queue.num_ahead(str(tenant), int(str(priority)))
            assert 0 <= ahead <= len(queue)
            entry = queue.push(number, tenant=str(tenant), priority=int(str(priority)), charge=float(str(charge)))
            inside[number] = entry
        elif what == "pop" and inside:
            taken = inside.pop(queue.pop())
            for entry in inside.values():
                assert entry.priority <= taken.priority
                if (entry.priority, entry.tenant) == (taken.priority, taken.tenant):
                    assert entry.number > taken.number
        elif what == "remove" and inside:
            victim = list(inside)[int(str(rest[0])) % len(inside)]
            queue.remove(inside.pop(victim))
        queue.check()
        assert len(queue) == len(inside)
    assert sorted(drained(queue)) == sorted(inside)


@given(st.lists(Operation, max_size=40), st.sampled_from("abcd"), st.integers(-1, 1))
def test_the_number_ahead_is_the_number_that_goes_before(
    operations: list[tuple[object, ...]], tenant: str, priority: int
) -> None:
    queue: FairQueue[int] = FairQueue({"a": 2.0, "b": 0.3})
    entries: list[Entry[int]] = []
    for what, *rest in operations:
        if what == "push":
            charge = float(str(rest[2]))
            entries.append(queue.push(0, tenant=str(rest[0]), priority=int(str(rest[1])), charge=charge))
        elif what == "pop" and len(queue):
            queue.pop()
        elif what == "remove" and entries:
            queue.remove(entries[int(str(rest[0])) % len(entries)])
    ahead = queue.num_ahead(tenant, priority)
    charge_ahead = queue.charge_ahead(tenant, priority)
    queue.push(1, tenant=tenant, priority=priority, charge=1)
    order = list(queue.in_order())
    charges = sum(entry.charge for entry in order[:ahead])
    longest = sum(max(entry.charge for entry in order if entry.tenant == name) for name in {e.tenant for e in order})
    assert charge_ahead == pytest.approx(charges, abs=longest)
    assert drained(queue) == [entry.item for entry in order]
    assert order[ahead].item == 1


@given(
    st.lists(st.tuples(st.integers(1, 8), st.integers(1, 30), st.floats(1, 50)), min_size=2, max_size=4),
    st.integers(0, 2**32),
)
@settings(max_examples=30, deadline=None)
def test_shares_follow_weights_however_many_give_up_and_try_again(
    tenants: list[tuple[int, int, float]], seed: int
) -> None:
    """Each tenant keeps some requests waiting. A request that is not served within a number of turns gives up and is
    replaced."""
    weights = {str(number): float(weight) for number, (weight, _, _) in enumerate(tenants)}
    queue: FairQueue[str] = FairQueue(weights)
    rng = random.Random(seed)
    waiting: dict[str, list[tuple[int, Entry[str]]]] = {name: [] for name in weights}
    served = dict.fromkeys(weights, 0.0)
    for turn in range(150):
        for (name, entries), (_, patience, charge) in zip(waiting.items(), tenants, strict=True):
            for until, entry in entries:
                if until <= turn:
                    queue.remove(entry)
            entries[:] = [(until, entry) for until, entry in entries if until > turn and entry in queue]
            while len(entries) < 4:
                entry = queue.push(name, tenant=name, priority=0, charge=rng.uniform(0.5, 1.0) * charge)
                entries.append((turn + patience, entry))
        entry = queue.first()
        assert entry is not None
        served[queue.pop()] += entry.charge / weights[entry.tenant]
        queue.check()
    # The bound of start-time fair queueing, at any moment: one entry of each.
    slack = max(charge / weight for weight, _, charge in tenants)
    assert max(served.values()) - min(served.values()) <= 2 * slack + 1e-6


def test_entries_that_gave_up_leave_nothing_behind() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("patient", tenant="a", priority=1, charge=1)
    for number in range(1000):
        queue.remove(queue.push("impatient", tenant=f"b{number % 50}", priority=0, charge=100))
        queue.remove(queue.push("impatient", tenant=f"b{number % 50}", priority=1, charge=100))
        queue.check()
    assert len(queue) == 1


def test_work_of_a_higher_priority_does_not_put_newcomers_of_a_lower_one_back() -> None:
    queue: FairQueue[str] = FairQueue()
    for _ in range(4):
        queue.push("old", tenant="old", priority=0, charge=10)
    for _ in range(100):
        queue.push("vip", tenant="vip", priority=1, charge=10)
        queue.pop()
    queue.push("new", tenant="new", priority=0, charge=10)
    assert drained(queue)[:2] == ["old", "new"]
