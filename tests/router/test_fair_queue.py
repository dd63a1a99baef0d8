"""Priorities, shares and displacement of waiting requests."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.router.fair_queue import FairQueue


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
    assert queue.item_of(newest) == "a2"
    assert queue.to_displace("a", 0) is None
    assert queue.to_displace("b", -1) is None
    urgent = queue.to_displace("a", 1)
    assert urgent is not None
    assert queue.item_of(urgent) == "a2"


def test_equals_do_not_displace_each_other_in_turn() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.push("a0", tenant="a", priority=0, charge=1)
    queue.push("a1", tenant="a", priority=0, charge=1)
    queue.push("b0", tenant="b", priority=0, charge=1)
    assert queue.to_displace("b", 0) is None


Operation = st.one_of(
    st.tuples(st.just("push"), st.sampled_from("abcd"), st.integers(-1, 1), st.floats(1, 100)),
    st.tuples(st.just("pop")),
    st.tuples(st.just("remove"), st.integers(0, 1000)),
)


@given(st.lists(Operation, max_size=80))
def test_whatever_happens_each_item_leaves_once_and_tenants_stay_in_order(operations: list[tuple[object, ...]]) -> None:
    queue: FairQueue[int] = FairQueue({"a": 2.0})
    inside: dict[int, object] = {}
    for number, (what, *rest) in enumerate(operations):
        if what == "push":
            tenant, priority, charge = rest
            ahead = queue.num_ahead(str(tenant), int(str(priority)))
            assert 0 <= ahead <= len(queue)
            entry = queue.push(number, tenant=str(tenant), priority=int(str(priority)), charge=float(str(charge)))
            inside[number] = entry
        elif what == "pop" and inside:
            item = queue.pop()
            entry = inside.pop(item)
            assert entry == min([entry, *inside.values()])  # type: ignore[type-var]
        elif what == "remove" and inside:
            victim = list(inside)[int(str(rest[0])) % len(inside)]
            queue.remove(inside.pop(victim))  # type: ignore[arg-type]
        queue.check()
        assert len(queue) == len(inside)
    order = []
    while queue.first() is not None:
        order.append(queue.pop())
    assert sorted(order) == sorted(inside)
