"""The address at which others reach this worker, when it listens on all of its own."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from headrace.worker.config import ConfigurationError

_ANY = ("0.0.0.0", "[::]", "::", "")


def way_to_the_fleet(routers: Sequence[str], redis_url: str | None) -> str | None:
    """HOST:PORT (or unix:/path) of somebody in the fleet's network: a router if one is named, else Redis."""
    if routers or redis_url is None:
        return routers[0] if routers else None
    parts = urlsplit(redis_url)
    if parts.scheme == "unix":
        return f"unix:{parts.path}"
    address = parts.netloc.rpartition("@")[2].partition(",")[0]
    return address if urlsplit(f"//{address}").port else f"{address}:6379"


def advertised_address(listen: str, router: str | None) -> str:
    """`listen` itself, unless that is every address of the host: then the one from which packets leave for the router.

    A container or pod is reached there, whatever its host name means elsewhere. Nothing is sent there; `router` may be
    anybody in that network. Raises ConfigurationError if the router's name is not known.
    """
    host, _, port = listen.rpartition(":")
    if listen.startswith("unix:") or host not in _ANY or router is None or router.startswith("unix:"):
        return listen
    router_host, _, router_port = router.removeprefix("dns:///").rpartition(":")
    try:
        found = socket.getaddrinfo(router_host.strip("[]"), int(router_port), type=socket.SOCK_DGRAM)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot tell at which address this worker is reached from {router}: {error}; say it with --advertise"
        ) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own = probe.getsockname()[0]
    return f"[{own}]:{port}" if family == socket.AF_INET6 else f"{own}:{port}"
