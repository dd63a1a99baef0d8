"""Ends of tasks."""

from __future__ import annotations

import asyncio

from headrace.common.tasks import end_tasks
from tests.patience import patience


async def test_a_task_whose_cancellation_got_lost_is_cancelled_again() -> None:
    answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    num_rounds = 0

    async def work() -> None:
        nonlocal num_rounds
        while True:
            num_rounds += 1
            # With Python 3.11 a cancellation is lost here if the answer comes at the same moment.
            await asyncio.wait_for(answer, patience(10))
            await asyncio.sleep(60)

    async def stubborn() -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(work()), asyncio.create_task(stubborn())]
    await asyncio.sleep(0)
    answer.set_result(None)
    async with asyncio.timeout(patience(10)):
        await end_tasks(*tasks)
    assert all(task.cancelled() for task in tasks)
    assert num_rounds == 1


async def test_failed_and_ended_tasks_are_left_as_they_are() -> None:
    async def fail() -> None:
        raise ValueError("expected")

    failed = asyncio.create_task(fail())
    ended = asyncio.create_task(asyncio.sleep(0))
    await asyncio.sleep(0.01)
    await end_tasks(failed, ended)
    await end_tasks()
    assert isinstance(failed.exception(), ValueError)
    assert not ended.cancelled()
