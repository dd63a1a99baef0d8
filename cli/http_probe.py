"""Ask an HTTP server for one status code, with nothing but asyncio: the serve process imports no HTTP client."""

from __future__ import annotations

import asyncio

_ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


async def http_status(host: str, port: int, path: str, timeout_s: float = 1.0) -> int | None:
    """Status code of GET `path`, or None when no HTTP answer came in time. A server on any address is asked here."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(_ANY_ADDRESS.get(host, host), port)
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
