"""Between asyncio and the engine thread."""

from __future__ import annotations

import asyncio

import pytest

from headrace.protos.status import Reason, StatusError
from headrace.worker.mailbox import LoadReport, Mailbox
from headrace.worker.request import FinishReason, Request, RequestOutput, SamplingParams


def request() -> Request:
    return Request("r", [1], SamplingParams(max_tokens=9, seed=0), 0)


def mailbox(capacity: int = 2) -> tuple[Mailbox, list[LoadReport]]:
    reports: list[LoadReport] = []
    return Mailbox(capacity, reports.append), reports


async def test_a_slow_reader_gets_all_that_has_come_at_once() -> None:
    box, reports = mailbox()
    one = request()
    stream = box.submit(one)
    for position in range(3):
        box.deliver([RequestOutput(one, position, (10 + position,))], None)
    box.deliver([RequestOutput(one, 3, (13,), finish=FinishReason.LENGTH)], LoadReport(num_blocks=5))
    first = await stream.next()
    while not stream.has_ended:
        first += await stream.next()
    assert [output.token_ids for output in first] == [(10,), (11,), (12,), (13,)]
    assert [report.num_blocks for report in reports] == [5]


async def test_closing_a_stream_that_has_not_ended_cancels_its_request_once() -> None:
    box, _ = mailbox()
    stream = box.submit(request())
    stream.close()
    stream.close()
    commands = box.take(block=False)
    assert commands is not None
    assert [command.is_cancel for command in commands] == [False, True]
    assert box.num_open == 0


async def test_closing_a_stream_that_has_ended_cancels_nothing() -> None:
    box, _ = mailbox()
    one = request()
    stream = box.submit(one)
    box.deliver([RequestOutput(one, 0, (), finish=FinishReason.LENGTH)], None)
    await stream.next()
    stream.close()
    commands = box.take(block=False)
    assert commands is not None
    assert len(commands) == 1


async def test_outputs_for_a_reader_that_has_gone_are_dropped() -> None:
    box, _ = mailbox()
    one = request()
    box.submit(one).close()
    box.deliver([RequestOutput(one, 0, (1,))], None)
    await asyncio.sleep(0)
    assert box.num_open == 0


async def test_the_bound_counts_open_requests() -> None:
    box, _ = mailbox(capacity=1)
    stream = box.submit(request())
    with pytest.raises(StatusError) as caught:
        box.submit(request())
    assert caught.value.reason is Reason.QUEUE_FULL
    stream.close()
    box.submit(request())


async def test_the_engine_thread_waits_for_a_command_and_ends_when_told() -> None:
    box, _ = mailbox()
    waiting = asyncio.create_task(asyncio.to_thread(box.take, block=True))
    one = request()
    box.submit(one)
    commands = await waiting
    assert commands is not None
    assert commands[0].request is one
    waiting = asyncio.create_task(asyncio.to_thread(box.take, block=True))
    box.stop()
    assert await waiting is None


async def test_waiting_until_empty_is_bounded() -> None:
    box, _ = mailbox()
    assert await box.wait_until_empty(None)
    stream = box.submit(request())
    assert not await box.wait_until_empty(0.01)
    stream.close()
    assert await box.wait_until_empty(None)
