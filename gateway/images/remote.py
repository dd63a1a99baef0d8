"""Fetches images from the web, for operators that allow it.

The request is made of what was read of a URL (`urls`). The host must be allowed. Its addresses are resolved once; all
of them must be public, and the connection is made to one of these, whatever the resolver says a moment later. Redirects
are not followed, and proxies of the environment not used.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httpcore

from headrace.gateway.images.refusal import ImageRefusal, Why, too_large
from headrace.gateway.images.urls import Domains, Target, target_of

MAX_FETCHES = 32
"""At a time. Further ones wait, within their time limit."""
MAX_FETCHES_OF_SOURCE = 8
"""Of them, those of one source (`Domains.source_of`), so that images of a slow host do not hold up those of others."""
_UNREACHABLE = "its host cannot be reached from here"
_LOG = logging.getLogger(__name__)

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]
"""The addresses of a host, for a port. Raises `OSError`."""
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
    """Whether an IP address, as a resolver gives it, is that of a public host. All others may belong to the network of
    the operator. An IPv4 address that is mapped into IPv6 counts as the IPv4 address."""
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


async def resolved(host: str, port: int) -> Sequence[str]:
    """The addresses that the system's resolver knows."""
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class _Forbidden(Exception):
    """The host has an address that is not public."""


class _Pinned(httpcore.AsyncNetworkBackend):
    """Connects to checked addresses only. TLS and the Host header keep the name."""

    def __init__(self, resolve: Resolve, permits: Callable[[str], bool]) -> None:
        self._resolve = resolve
        self._permits = permits
        self._sockets = httpcore.AnyIOBackend()

    async def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        addresses = await self._resolve(host, port)
        if not addresses or not all(map(self._permits, addresses)):
            raise _Forbidden
        for address in addresses[:-1]:
            try:
                return await self._sockets.connect_tcp(address, port, timeout, local_address, socket_options)
            except (httpcore.ConnectError, httpcore.ConnectTimeout):
                continue
        return await self._sockets.connect_tcp(addresses[-1], port, timeout, local_address, socket_options)

    async def connect_unix_socket(
        self,
        path: str,
        timeout: float | None = None,
        socket_options: Iterable[httpcore.SOCKET_OPTION] | None = None,
    ) -> httpcore.AsyncNetworkStream:
        raise _Forbidden

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass(slots=True)
class _Places:
    """Of one source, and how many fetches have one or wait for one."""

    turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_FETCHES_OF_SOURCE))
    num_users: int = 0


class RemoteImages:
    """Fetches images from allowed hosts."""

    def __init__(
        self,
        domains: Domains,
        timeout_s: float,
        *,
        resolve: Resolve = resolved,
        permits: Callable[[str], bool] = is_public,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """`timeout_s` is for one image, from the call to its last byte. `permits` says to which addresses a connection
        may be made."""
        self._domains = domains
        self._timeout_s = timeout_s
        self._backend = _Pinned(resolve, permits)
        self._tls = tls or ssl.create_default_context()
        self._turns = asyncio.Semaphore(MAX_FETCHES)
        self._places_of: dict[str, _Places] = {}
        """By source, while images of it are fetched or wait."""

    async def fetch(self, name: str, url: str, max_bytes: int) -> bytes:
        """The file that a URL names. `name` is the URL's field. Raises `ImageRefusal`."""
        target = target_of(name, url)
        source = self._domains.source_of(target)
        if source is None:
            raise ImageRefusal(
                Why.URL,
                name,
                f"{name}: the server fetches no images from this host; send the image as a data: URL, or have the "
                "host allowed with --allowed-media-domains",
            )
        try:
            async with asyncio.timeout(self._timeout_s), self._place_of(source), self._turns:
                return await self._read(name, target, max_bytes)
        except TimeoutError:
            raise _failed(name, f"it did not come within {self._timeout_s:g} s") from None
        except (_Forbidden, OSError, UnicodeError, httpcore.ConnectError, httpcore.ConnectTimeout) as error:
            # One sentence for all: what the network behind the gateway is like is nobody's business.
            _LOG.info("an image of %s could not be fetched: %r", target.host, error)
            raise _failed(name, _UNREACHABLE) from None
        except (httpcore.NetworkError, httpcore.ProtocolError, httpcore.TimeoutException):
            raise _failed(name, "its host broke off, or did not answer in HTTP") from None

    @asynccontextmanager
    async def _place_of(self, source: str) -> AsyncIterator[None]:
        """Context manager: one of the places of a source, when it is free."""
        places = self._places_of.setdefault(source, _Places())
        places.num_users += 1
        try:
            async with places.turns:
                yield
        finally:
            places.num_users -= 1
            if not places.num_users:
                del self._places_of[source]

    async def _read(self, name: str, target: Target, max_bytes: int) -> bytes:
        url = httpcore.URL(
            scheme=target.scheme.encode(), host=target.host.encode(), port=target.port, target=target.path.encode()
        )
        headers = [
            ("Host", target.authority),
            ("Accept", "image/png, image/jpeg, image/webp, image/gif"),
            ("Accept-Encoding", "identity"),
            ("User-Agent", "headrace"),
        ]
        async with (
            httpcore.AsyncConnectionPool(ssl_context=self._tls, network_backend=self._backend) as pool,
            pool.stream("GET", url, headers=headers) as response,
        ):
            if response.status in range(300, 400):
                raise _failed(name, "its host redirects to another URL, which is not followed", "give the final URL")
            if response.status != 200:
                raise _failed(name, f"its host answered with the status {response.status}")
            given = {key.lower(): value for key, value in response.headers}
            if given.get(b"content-encoding", b"identity").lower() != b"identity":
                raise _failed(name, "its host sends it compressed")
            length = given.get(b"content-length", b"")
            if length.isdigit() and int(length[:20]) > max_bytes:
                raise too_large(name, max_bytes)
            found = bytearray()
            async for part in response.aiter_stream():
                found += part
                if len(found) > max_bytes:
                    raise too_large(name, max_bytes)
            return bytes(found)


def _failed(name: str, why: str, remedy: str = "send it as a data: URL with base64") -> ImageRefusal:
    return ImageRefusal(Why.FETCH, name, f"{name}: the image could not be fetched: {why}; {remedy}")
