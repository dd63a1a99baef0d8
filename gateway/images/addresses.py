"""Which addresses are those of public hosts (pure). All others may belong to the network of the operator."""

from __future__ import annotations

import ipaddress

# Prefixes behind which another address is, and those that Python takes for global.
_OTHERS = tuple(
    map(
        ipaddress.ip_network,
        (
            "::/96",  # IPv4-compatible, given up
            "64:ff9b::/96",  # NAT64
            "64:ff9b:1::/48",  # local NAT64
            "100::/64",  # discarded
            "2001::/23",  # Teredo among others
            "2002::/16",  # 6to4
            "5f00::/16",  # segment routing
            "fec0::/10",  # site-local, given up
            "100.64.0.0/10",  # shared by the customers of a carrier
            "192.0.0.0/24",  # protocol assignments
            "192.88.99.0/24",  # relays of 6to4
        ),
    )
)


def is_public(address: str) -> bool:
    """Whether an IP address, as a resolver gives it, is that of a public host. An IPv4 address that is mapped into IPv6
    counts as the IPv4 address."""
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        if found.scope_id is not None:
            return False
        found = found.ipv4_mapped or found
    if any(found.version == network.version and found in network for network in _OTHERS):
        return False
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)
