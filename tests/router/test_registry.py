"""Membership: the fixed list, leases and their end."""

from __future__ import annotations

import pytest

from headrace.protos.status import Reason, StatusError
from headrace.router.fleet.registry import Member, Registry


def test_the_fixed_list_stays_and_registered_workers_end_with_their_lease() -> None:
    registry = Registry(["s:1", "s:1"], lease_s=6)
    registry.register("w", "d:1", now_s=0)
    assert registry.members() == {"s:1": Member("s:1", ""), "d:1": Member("d:1", "w")}
    registry.expire(5.9)
    assert "d:1" in registry.members()
    registry.register("w", "d:1", now_s=5.9)
    registry.expire(11)
    assert "d:1" in registry.members()
    registry.expire(12)
    assert registry.members() == {"s:1": Member("s:1", "")}


def test_a_registered_address_of_the_fixed_list_is_one_member_with_a_name() -> None:
    registry = Registry(["s:1"])
    registry.register("w", "s:1", now_s=0)
    assert registry.members() == {"s:1": Member("s:1", "w")}


def test_the_newest_registration_of_a_name_or_of_an_address_holds() -> None:
    registry = Registry()
    registry.register("w", "d:1", now_s=0)
    registry.register("w", "d:2", now_s=1)
    assert registry.members() == {"d:2": Member("d:2", "w")}
    registry.register("v", "d:2", now_s=2)
    assert registry.members() == {"d:2": Member("d:2", "v")}


def test_a_late_deregistration_leaves_the_newer_registration() -> None:
    registry = Registry()
    registry.register("w", "d:2", now_s=0)
    registry.deregister("w", "d:1")
    registry.deregister("unknown", "d:1")
    assert "d:2" in registry.members()
    registry.deregister("w", "d:2")
    assert registry.members() == {}


@pytest.mark.parametrize(("worker_id", "address", "field"), [("", "d:1", "worker_id"), ("w", "", "address")])
def test_an_empty_name_or_address_is_refused(worker_id: str, address: str, field: str) -> None:
    with pytest.raises(StatusError) as caught:
        Registry().register(worker_id, address, now_s=0)
    assert (caught.value.reason, caught.value.field) == (Reason.INVALID_FIELD, field)


def test_the_number_of_members_is_bounded_but_renewals_pass() -> None:
    registry = Registry(max_workers=1)
    registry.register("w", "d:1", now_s=0)
    registry.register("w", "d:1", now_s=1)
    with pytest.raises(StatusError) as caught:
        registry.register("v", "d:2", now_s=1)
    assert caught.value.reason is Reason.QUEUE_FULL
    assert "--max-workers" in caught.value.message
    registry.register("v", "d:1", now_s=2)  # in the place of the one before it
    registry.register("v", "d:2", now_s=2)
    assert list(registry.members()) == ["d:2"]


def test_a_registration_says_whether_members_are_others() -> None:
    registry = Registry()
    assert registry.register("w", "d:1", now_s=0)
    assert not registry.register("w", "d:1", now_s=1)
    assert registry.register("w", "d:2", now_s=1)
    registry.expire(now_s=100)
    assert registry.register("w", "d:2", now_s=100)
