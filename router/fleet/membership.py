"""Decides which addresses an unauthenticated caller may register. The router connects to these addresses from inside
its network, so a caller must not choose them freely.

Pure. Not used with a join token or mutual TLS, which authenticate all callers.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address

from headrace.common.transport.channels import stays_on_host
from headrace.protos.status import Reason, StatusError


def check_target(address: str, peer: str) -> None:
    """Raise StatusError (PERMISSION_DENIED) if the caller at `peer`, in gRPC's notation, may not register this address.

    Callers on this host may register any address. Other callers may register only IP addresses of other hosts. Unix
    sockets, loopback addresses and host names are refused, because they can lead back to this host.
    """
    if _is_local(peer):
        return
    host, _, port = address.rpartition(":")
    try:
        target = ip_address(host.strip("[]"))
    except ValueError:
        target = None
    mapped = getattr(target, "ipv4_mapped", None) or target
    if mapped is None or not re.fullmatch("[0-9]{1,5}", port) or not _is_of_another_host(mapped):
        raise StatusError(
            Reason.PERMISSION_DENIED,
            "a worker on another host must register with IP:PORT, not with a host name, a unix socket or a loopback "
            "address; use --join-token-file or --tls-dir to allow these",
            field="address",
        )


def _is_of_another_host(target: IPv4Address | IPv6Address) -> bool:
    return not (target.is_loopback or target.is_unspecified or target.is_link_local or target.is_multicast)


def _is_local(peer: str) -> bool:
    """Whether a peer such as ipv4:10.0.0.7:4242, ipv6:%5B::1%5D:4242 or unix: is on this host."""
    kind, _, rest = peer.partition(":")
    return stays_on_host(peer if kind == "unix" else rest.replace("%5B", "[").replace("%5D", "]"))
