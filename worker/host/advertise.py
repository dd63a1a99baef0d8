"""The name and the address under which others reach this worker: its name with its host, and an address of the host if
the worker listens on all of them."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from urllib.parse import urlsplit

from headrace.worker.config import ConfigurationError

_ANY = ("0.0.0.0", "[::]", "::", "")


def fleet_address(routers: Sequence[str], redis_url: str | None) -> str | None:
    """HOST:PORT or unix:/path of a peer in the fleet's network: a router if one is given, else Redis."""
    if routers or redis_url is None:
        return routers[0] if routers else None
    parts = urlsplit(redis_url)
    if parts.scheme == "unix":
        return f"unix:{parts.path}"
    address = parts.netloc.rpartition("@")[2].partition(",")[0]
    return address if urlsplit(f"//{address}").port else f"{address}:6379"


def name_on_host(worker_id: str) -> str:
    """The name of a worker with its host, unless the id has that: `headrace serve` gives the same ids on all hosts."""
    host = socket.gethostname()
    return worker_id if host in worker_id else f"{worker_id} on {host}"


def advertised_address(listen: str, router: str | None) -> str:
    """`listen`, or, if that means all addresses of the host, the address from which packets to `router` leave.

    This is where a container or pod is reached, even if its host name is unknown elsewhere. Nothing is sent. `router`
    may be any peer in the network. ConfigurationError if its name cannot be resolved.
    """
    host, _, port = listen.rpartition(":")
    if listen.startswith("unix:") or host not in _ANY or router is None or router.startswith("unix:"):
        return listen
    router_host, _, router_port = router.removeprefix("dns:///").rpartition(":")
    try:
        found = socket.getaddrinfo(router_host.strip("[]"), int(router_port), type=socket.SOCK_DGRAM)
    except (OSError, ValueError) as error:
        raise ConfigurationError(
            f"cannot find the address at which {router} reaches this worker: {error}; set it with --advertise"
        ) from error
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        own = probe.getsockname()[0]
    return f"[{own}]:{port}" if family == socket.AF_INET6 else f"{own}:{port}"
