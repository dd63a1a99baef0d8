"""Membership: the fixed list, leases and their end, and the addresses that unauthenticated callers may register."""

from __future__ import annotations

import pytest

from headrace.protos.status import Reason, StatusError
from headrace.router.fleet.registry import Member, Registry, check_target

FAR = "ipv4:10.0.0.7:4242"


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


@pytest.mark.parametrize(
    "address",
    [
        "unix:/run/headrace/worker-0.sock",
        "unix:///var/run/docker.sock",
        "unix-abstract:x",
        "127.0.0.1:6379",
        "127.9.9.9:1",
        "[::1]:6379",
        "[::ffff:127.0.0.1]:6379",
        "0.0.0.0:6379",
        "[::]:6379",
        "169.254.169.254:80",
        "224.0.0.1:1",
        "localhost:6379",
        "worker.example:50061",
        "dns:///localhost:1",
        "ipv4:127.0.0.1:1",
        "10.0.0.7",
        "10.0.0.7:http",
        "10.0.0.7:\u00b2",
        "10.0.0.7:123456",
        "",
    ],
)
@pytest.mark.parametrize("peer", [FAR, "ipv6:%5B2001:db8::7%5D:4242"])
def test_a_stranger_does_not_lead_a_router_to_its_own_host_or_to_names(address: str, peer: str) -> None:
    with pytest.raises(StatusError) as caught:
        check_target(address, peer)
    assert (caught.value.reason, caught.value.field) == (Reason.PERMISSION_DENIED, "address")
    assert "--join-token-file" in caught.value.message


@pytest.mark.parametrize("address", ["10.0.0.7:50061", "[2001:db8::7]:50061", "192.168.1.2:1"])
def test_a_stranger_registers_an_address_of_the_network(address: str) -> None:
    check_target(address, FAR)


@pytest.mark.parametrize("peer", ["unix:", "unix:/r.sock", "ipv4:127.0.0.1:4242", "ipv6:%5B::1%5D:4242"])
@pytest.mark.parametrize("address", ["unix:/w.sock", "127.0.0.1:50061", "localhost:1"])
def test_callers_of_this_host_register_any_address(address: str, peer: str) -> None:
    check_target(address, peer)
