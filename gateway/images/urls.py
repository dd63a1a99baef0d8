"""URLs of images, read once, by a grammar that has no room for two readings; and the hosts that are allowed (pure)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headrace.gateway.images.refusal import ImageRefusal, Why

MAX_URL_CHARS = 4096
_PORTS = {"http": 80, "https": 443}
_PART = r"[A-Za-z0-9\-._~!$&'()*+,;=:@%/]"
_URL = re.compile(
    rf"(?P<scheme>https?)://(?P<host>[a-z0-9._-]+|\[[0-9a-f:.]+\])(?::(?P<port>[0-9]{{1,5}}))?"
    rf"(?P<target>(?:/{_PART}*)?(?:\?(?:{_PART}|\?)*)?)(?:#.*)?",
    re.IGNORECASE | re.ASCII,
)
_DOMAIN = re.compile(r"(?:\*\.)?[a-z0-9._-]+(?::[0-9]{1,5})?|all", re.ASCII)


@dataclass(frozen=True, slots=True)
class Target:
    """The parts of a URL that a request needs."""

    scheme: str
    host: str
    """In lower case, without a dot at its end; an IPv6 address without brackets."""
    port: int
    path: str
    """With the query."""

    @property
    def authority(self) -> str:
        """Host and port as the Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


class Domains:
    """The hosts from which images may be fetched."""

    def __init__(self, names: Iterable[str]) -> None:
        """`NAME`, `*.NAME` for all below it, or `all`; with `:PORT` if it is not the scheme's own. Raises `ValueError`
        for other texts."""
        self._names = frozenset(name.lower() for name in names)
        for name in self._names:
            if _DOMAIN.fullmatch(name) is None:
                raise ValueError(f"{name[:100]!r} is not a domain: write images.example.com, *.example.com or all")

    def __bool__(self) -> bool:
        return bool(self._names)

    def source_of(self, target: Target) -> str | None:
        """What allows a host; None if nothing does. All hosts below a domain that is allowed so are one source; with
        `all`, each host is one."""
        end = "" if target.port == _PORTS[target.scheme] else f":{target.port}"
        labels = target.host.split(".")
        above = (f"*.{'.'.join(labels[i:])}" for i in range(1, len(labels)))
        found = next((name + end for name in (target.host, *above) if name + end in self._names), None)
        return target.host if found is None and not end and "all" in self._names else found


def target_of(name: str, url: str) -> Target:
    """Parse a URL. `name` is its field. Raises `ImageRefusal` unless the URL is plain."""
    found = _URL.fullmatch(url) if len(url) <= MAX_URL_CHARS else None
    scheme = "" if found is None else found["scheme"].lower()
    port = int((found and found["port"]) or _PORTS.get(scheme, 0))
    if found is None or not 0 < port < 1 << 16:
        problem = f"{name} must be a URL of at most {MAX_URL_CHARS} characters such as https://example.com/image.png"
        raise ImageRefusal(Why.URL, name, f"{problem}, without a user name, with other characters percent-encoded")
    target = found["target"]
    host = found["host"].lower().removeprefix("[").removesuffix("]").rstrip(".")
    return Target(scheme, host, port, target if target.startswith("/") else f"/{target}")
