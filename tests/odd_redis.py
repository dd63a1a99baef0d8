"""A server at the port of Redis that is none: it answers everything with the same bytes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

ODD_ANSWERS = (
    b":x\r\n",
    b"$x\r\n",
    b"$-7\r\n",
    b"*x\r\n",
    b"*1\r\n" * 5000,
    b":7\r\n" * 9,
    b"+OK\r\n" * 9,
    b"*1\r\n$1\r\nx\r\n" * 9,
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x15\x03\x01\x00\x02\x02\x28",
)
"""Bytes of other protocols, broken ones of Redis' own, and answers to other commands."""


class OddRedis:
    """What it answers may be changed."""

    def __init__(self) -> None:
        self.answer = b""
        """Empty: it takes commands and says nothing."""
        self.num_commands = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer one connection."""
        while await reader.read(65536):
            self.num_commands += 1
            writer.write(self.answer)
        writer.close()


@asynccontextmanager
async def odd_redis(port: int) -> AsyncIterator[OddRedis]:
    """Such a server at a port of this host."""
    odd = OddRedis()
    server = await asyncio.start_server(odd.serve, "127.0.0.1", port)
    yield odd
    server.close()
