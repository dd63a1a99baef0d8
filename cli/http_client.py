"""HTTP clients of commands: proxies, certificates, and the reasons of failed connections."""

from __future__ import annotations

import ipaddress
import os
import ssl
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from headrace.common.commands import CommandError

if TYPE_CHECKING:
    import httpx

_PROXY_VARIABLES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")
_PORTS = {"http": 80, "https": 443}


def http_client(*, direct: bool = False, **options: Any) -> httpx.Client:
    """A client with the proxies of the environment, or without any if `direct`. Raises CommandError if a proxy cannot
    be used."""
    import httpx

    try:
        return httpx.Client(trust_env=not direct, **options)
    except (ImportError, ValueError, httpx.InvalidURL):  # ImportError: a SOCKS proxy
        named = [
            name for each in _PROXY_VARIABLES for name in (each, each.lower()) if _is_unusable(os.environ.get(name))
        ]
        if not named:
            raise
        raise CommandError(
            f"{named[0]} names a proxy that cannot be used: give it as http://HOST:PORT, or unset the variable"
        ) from None


def _is_unusable(proxy: str | None) -> bool:
    """Whether a client cannot use the value of a proxy variable. A value without a scheme is one of HTTP."""
    if not proxy:
        return False
    try:
        parts = urlsplit(proxy if "://" in proxy else f"http://{proxy}")
        return parts.scheme not in _PORTS or parts.port == 0
    except ValueError:
        return True


def server_url(text: str) -> str:
    """The URL of a server, without /v1 or a slash at its end. Raises CommandError if the text is not such a URL."""
    try:
        parts = urlsplit(text)
        if parts.scheme in _PORTS and parts.hostname and parts.port != 0:
            return text.rstrip("/").removesuffix("/v1").rstrip("/")
    except ValueError:
        pass
    hint = "" if "://" in text else f"; did you mean http://{text}?"
    raise CommandError(f"{text[:200]!r} is not the URL of a server, such as http://127.0.0.1:8000{hint}")


def is_on_this_host(url: str) -> bool:
    """Whether a URL has a loopback address. No proxy can reach such a server."""
    host = urlsplit(url).hostname or ""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def is_same_server(url: str, other: str) -> bool:
    """Whether two URLs name one server. All loopback addresses are one host."""
    one = urlsplit(url)
    two = urlsplit(other)
    if (one.scheme, _port(one)) != (two.scheme, _port(two)):
        return False
    return one.hostname == two.hostname or (is_on_this_host(url) and is_on_this_host(other))


def _port(parts: SplitResult) -> int | None:
    return parts.port or _PORTS.get(parts.scheme)


def tls_problem(error: BaseException) -> str | None:
    """Why TLS failed, with a remedy, if an error of httpx has this reason; otherwise None."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        reason = cause.verify_message.rstrip(".")
        return f"its certificate is not accepted ({reason}); name its authority with --ca-file"
    if isinstance(cause, ssl.SSLError):
        return f"it does not speak TLS as expected ({cause.reason}); if it has no certificate, write http://"
    return None
