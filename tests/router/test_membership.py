"""The addresses that unauthenticated callers may register."""

from __future__ import annotations

import pytest

from headrace.protos.status import Reason, StatusError
from headrace.router.fleet.registry import check_target

FAR = "ipv4:10.0.0.7:4242"


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
