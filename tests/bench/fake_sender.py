"""A sender for tests whose answers are coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.bench.record import Record


class FakeSender:
    """See `sender.Sender`. A request takes as long as its `send`."""

    async def send(self, request: bytes, record: Record) -> None:
        """Answer a request."""
        raise NotImplementedError

    def start(
        self, request: bytes, record: Record, answered: Callable[[], None], may_wait: bool = False
    ) -> asyncio.Task[None]:
        async def whole() -> None:
            await self.send(request, record)
            answered()

        return asyncio.get_running_loop().create_task(whole())

    def read(self) -> None:
        pass
