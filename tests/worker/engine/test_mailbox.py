"""Between asyncio and the engine thread."""

from __future__ import annotations

import asyncio

import pytest

from headrace.protos.load_report import LoadReport
from headrace.protos.status import Reason, StatusError
from headrace.worker.engine.mailbox import EngineReport, Mailbox
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import FinishReason, Request
from headrace.worker.request.step import RequestOutput


def request() -> Request:
    return Request("r", [1], SamplingParams(max_tokens=9, seed=0), 0)


def mailbox(capacity: int = 2) -> tuple[Mailbox, list[EngineReport]]:
    reports: list[EngineReport] = []
    return Mailbox(capacity, reports.append), reports


async def test_a_slow_reader_gets_all_that_has_come_at_once() -> None:
    box, reports = mailbox()
    one = request()
    stream = box.submit(one)
    for position in range(3):
        box.deliver([RequestOutput(one, position, (10 + position,))], None)
    box.deliver([RequestOutput(one, 3, (13,), finish=FinishReason.LENGTH)], EngineReport(LoadReport(num_blocks=5)))
    first = await stream.next()
    while not stream.has_ended:
        first += await stream.next()
    assert [output.token_ids for output in first] == [(10,), (11,), (12,), (13,)]
    assert [report.load.num_blocks for report in reports] == [5]


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


async def test_log_probabilities_of_prompts_are_bounded_over_all_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.worker.engine.mailbox.MAX_PROMPT_LOGPROBS_KEPT", 100)
    box, _ = mailbox(capacity=9)

    def asks(num_tokens: int, num_top: int, **fields: object) -> Request:
        sampling = SamplingParams(max_tokens=9, seed=0, num_prompt_logprobs=num_top)
        return Request("r", [1] * num_tokens, sampling, 0, **fields)  # type: ignore[arg-type]

    first = box.submit(asks(21, 2))  # 60
    box.submit(asks(41, 0))  # 40
    box.submit(asks(1, 20))  # none: its only token has no token before it
    box.submit(asks(50, 20, resume_token_ids=[1]))  # none: they have been told
    with pytest.raises(StatusError, match="stores 100 log-probabilities of prompts, and .* adds 1;") as caught:
        box.submit(asks(2, 0))
    assert (caught.value.reason, caught.value.retry_after_s) == (Reason.QUEUE_FULL, 1.0)
    first.close()
    first.close()
    box.submit(asks(31, 1))
    with pytest.raises(StatusError):
        box.submit(asks(2, 0))
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
