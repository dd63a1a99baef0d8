"""Decides which addresses an unknown caller may register, because a router connects to them from inside its network.

Pure. Not used with a join token or mutual TLS, where all callers are known.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address, ip_address

from headrace.common.transport.channels import stays_on_host
from headrace.protos.status import Reason, StatusError


def check_target(address: str, peer: str) -> None:
    """Raise StatusError (PERMISSION_DENIED) if a caller at `peer`, as gRPC writes it, may not register this address.

    Callers of this host may register any. Others may register IP addresses that are not this host's own: no unix
    sockets, no loopback, and no names, which may stand for either.
    """
    if _is_local(peer):
        return
    host, _, port = address.rpartition(":")
    try:
        target = ip_address(host.strip("[]"))
    except ValueError:
        target = None
    mapped = getattr(target, "ipv4_mapped", None) or target
    if mapped is None or not port.isdigit() or not _is_of_another_host(mapped):
        raise StatusError(
            Reason.PERMISSION_DENIED,
            "a worker of another host registers with IP:PORT, and not with a name, a unix socket or loopback; "
            "known callers may, with --join-token-file or --tls-dir",
            field="address",
        )


def _is_of_another_host(target: IPv4Address | IPv6Address) -> bool:
    return not (target.is_loopback or target.is_unspecified or target.is_link_local or target.is_multicast)


def _is_local(peer: str) -> bool:
    """Whether a peer such as ipv4:10.0.0.7:4242, ipv6:%5B::1%5D:4242 or unix: is of this host."""
    kind, _, rest = peer.partition(":")
    return stays_on_host(peer if kind == "unix" else rest.replace("%5B", "[").replace("%5D", "]"))
