"""The server under test: where it listens, its paths, and the headers that every request carries."""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

_PORTS = {"http": 80, "https": 443}
_SUFFIXES = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1")


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `base_path` stands before every path, without a slash at its end. `tls` is None for plain HTTP."""

    url: str
    """Without a path of the API, as results name it."""
    host: str
    port: int
    base_path: str
    tls: ssl.SSLContext | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def head(self, method: str, path: str) -> bytes:
        """The beginning of a request, which is the same for all with this path; lines of their own may follow."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        lines = [f"{method} {self.base_path}{path} HTTP/1.1", f"Host: {host}:{self.port}"]
        lines += [f"{name}: {value}" for name, value in self.headers.items()]
        return "\r\n".join((*lines, "")).encode()

    def request(self, method: str, path: str, body: bytes) -> bytes:
        """A whole HTTP/1.1 request."""
        return with_body(self.head(method, path), body)


def with_body(head: bytes, body: bytes) -> bytes:
    """A whole request, from its head and a body in JSON."""
    if not body:
        return head + b"\r\n"
    return b"%bContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (head, len(body), body)


def key_header() -> dict[str, str]:
    """The header with the key in OPENAI_API_KEY; none if that is not set."""
    key = os.environ.get("OPENAI_API_KEY")
    return {"Authorization": f"Bearer {key}"} if key else {}


def target_of(url: str, headers: Mapping[str, str], ca_file: Path | None, insecure: bool) -> Target:
    """The server that a URL names. Raises ValueError with the remedy if it names none, or if a header or `ca_file`
    cannot be used."""
    hint = "" if "://" in url else f"; did you mean http://{url}?"
    problem = f"{url[:200]!r} is not the URL of a server, such as http://127.0.0.1:8000{hint}"
    try:
        parts = urlsplit(url)
        port = parts.port or _PORTS[parts.scheme]
    except (KeyError, ValueError):
        raise ValueError(problem) from None
    if not parts.hostname:
        raise ValueError(problem)
    for name, value in headers.items():
        if not name.isascii() or not name or any(c in "\r\n: " for c in name) or any(c in "\r\n" for c in value):
            raise ValueError(f"{name[:100]!r} is not a header; give NAME=VALUE without line breaks")
    path = parts.path.rstrip("/")
    for suffix in _SUFFIXES:
        if path.endswith(suffix):
            path = path.removesuffix(suffix)
            break
    tls = None
    if parts.scheme == "https":
        try:
            tls = ssl.create_default_context(cafile=ca_file)
        except (OSError, ssl.SSLError) as error:
            raise ValueError(f"{ca_file} has no certificates that can be used: {error}") from None
        if insecure:
            tls.check_hostname = False
            tls.verify_mode = ssl.CERT_NONE
    host = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
    return Target(f"{parts.scheme}://{host}:{port}{path}", parts.hostname, port, path, tls, headers)
