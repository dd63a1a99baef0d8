"""Ends tasks of asyncio."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 1.0


async def end_tasks(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait for their ends. Their exceptions are dropped.

    A task that continues is cancelled again, because a cancellation can be lost: `asyncio.wait_for` of Python 3.11
    drops it if the awaited object ends at the same time, and the client of Redis uses it for each command.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
