"""Get a status code from an HTTP server, with asyncio alone, because the serve process imports no HTTP client."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ssl

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


async def http_status(host: str, port: int, path: str, timeout_s: float = 1.0, *, scheme: str = "http") -> int | None:
    """Status code of GET `path`, or None if no HTTP answer came in time. A server on any address is asked at loopback.

    With https, certificates are not checked: nothing secret is sent, and only the code is read.
    """
    try:
        async with asyncio.timeout(timeout_s):
            tls = _unverified() if scheme == "https" else None
            reader, writer = await asyncio.open_connection(_ANY_ADDRESS.get(host, host), port, ssl=tls)
            try:
                authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
                request = f"GET {path} HTTP/1.1\r\nHost: {authority}\r\nConnection: close\r\n\r\n"
                writer.write(request.encode("ascii"))
                status_line = await reader.readline()
            finally:
                writer.close()
    except (OSError, TimeoutError, ValueError):
        return None
    words = status_line.split()
    return int(words[1]) if len(words) > 1 and words[0].startswith(b"HTTP/") and words[1].isdigit() else None


def _unverified() -> ssl.SSLContext:
    # Imported here, to keep the start of serve fast.
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
