"""A cheap load generator: raw HTTP/1.1 over asyncio that counts server-sent events without parsing each.

It shares the machine with the server under test, so its own CPU time would reduce the server's.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from dataclasses import dataclass

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
_DONE = b"data: [DONE]"
# A chat may begin with an event that has only a role.
_FIRST = {COMPLETIONS: re.compile(rb"data: "), CHAT: re.compile(rb'"content":\s*"[^"]')}


@dataclass(frozen=True, slots=True)
class Answer:
    """One streamed completion: times in seconds from its request, tokens as the server's usage counts them."""

    ttft_s: float
    total_s: float
    num_tokens: int


async def stream_completion(host: str, port: int, body: dict[str, object], path: str = COMPLETIONS) -> Answer:
    """POST to one of the two paths with `stream` and usage; read to the end."""
    payload = json.dumps({**body, "stream": True, "stream_options": {"include_usage": True}}).encode()
    start = time.perf_counter()
    reader, writer = await asyncio.open_connection(host, port, limit=1 << 20)
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(payload)}\r\nConnection: close\r\n\r\n".encode() + payload)
    received = bytearray()
    ttft_s = 0.0
    while chunk := await reader.read(1 << 16):
        received += chunk
        if not ttft_s and _FIRST[path].search(received):
            ttft_s = time.perf_counter() - start
        if _DONE in chunk:
            break
    total_s = time.perf_counter() - start
    writer.close()
    if _DONE not in received:
        raise RuntimeError(f"the stream did not end: {received[-500:]!r}")
    usage = received[received.rindex(b'"completion_tokens":') + len(b'"completion_tokens":') :]
    return Answer(ttft_s, total_s, int(usage.split(b",")[0].split(b"}")[0]))


async def closed_loop(
    host: str, port: int, bodies: list[dict[str, object]], concurrency: int, path: str = COMPLETIONS
) -> list[Answer]:
    """Send all bodies to a path, `concurrency` at a time."""
    gate = asyncio.Semaphore(concurrency)

    async def one(body: dict[str, object]) -> Answer:
        async with gate:
            return await stream_completion(host, port, body, path)

    return await asyncio.gather(*(one(body) for body in bodies))
