"""Runs plans and answers over HTTP, whole or streamed. The endpoints of all protocols use it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from headrace.gateway.access.caller import Caller
from headrace.gateway.chat.choice import Piece
from headrace.gateway.chat.generation import Account, Generator, Plan, Usage
from headrace.gateway.chat.output import ChatChoice


class AnswerStream(Protocol):
    """Makes the events of a streamed answer, from pieces or from the output of readers."""

    def piece(self, index: int, piece: Any) -> bytes:
        """Events for a piece of a choice; none if it shows nothing."""

    def end(self, usage: Usage) -> bytes:
        """The last events."""


class WholeAnswer(Protocol):
    """Gathers one choice of an answer that is not streamed."""

    def push(self, piece: Any) -> None:
        """Add the next piece."""


class StreamSink(Protocol):
    """The target of a stream, usually the exchange with its client."""

    @property
    def caller(self) -> Caller:
        """The caller of the request."""

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """Write events."""

    async def keep_alive(self, begun: asyncio.Event) -> None:
        """Run until cancelled: keep a stream without events alive. Until `begun` is set, the request may still be
        refused with a status."""


class Answering:
    """Runs plans."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    async def stream(
        self,
        sink: StreamSink,
        plans: Sequence[Plan],
        stream: AnswerStream,
        readers: Sequence[ChatChoice] = (),
        before_end: Callable[[Usage], Awaitable[None]] | None = None,
    ) -> None:
        """Answer with a stream. `readers`, one for each choice, turn its pieces into the input of the stream.

        `before_end` is awaited after generation, before the last events are made.
        """
        account = Account(plans)
        begun = asyncio.Event()
        keep_alive = asyncio.create_task(sink.keep_alive(begun))
        try:
            async with aclosing(self._generator.stream(plans, sink.caller)) as pieces:
                async for index, piece in pieces:
                    begun.set()
                    read = readers[index].push(piece) if readers else piece
                    events = stream.piece(index, read)
                    if read.ending is not None:
                        account.ended(index, read.ending)
                        if not account.num_open:
                            break
                    if events:
                        await sink.write(events)
            if before_end is not None:
                await before_end(account.usage)
            await sink.write(events + stream.end(account.usage), last=True)
        finally:
            keep_alive.cancel()

    async def gather(
        self,
        caller: Caller,
        plans: Sequence[Plan],
        choices: Sequence[WholeAnswer],
        readers: Sequence[ChatChoice] = (),
    ) -> Usage:
        """Fill the choices. `readers`, one for each choice, turn its pieces into the input of the choice."""
        account = Account(plans)
        pieces: AsyncGenerator[tuple[int, Piece], None] = self._generator.stream(plans, caller)
        async with aclosing(pieces):
            async for index, piece in pieces:
                read = readers[index].push(piece) if readers else piece
                choices[index].push(read)
                if read.ending is not None:
                    account.ended(index, read.ending)
        return account.usage
