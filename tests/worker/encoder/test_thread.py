"""The thread of an encoder between a real mailbox and a runner that ends its batches in threads of its own."""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from headrace.worker.encoder.batcher import Batcher, BatchLimits
from headrace.worker.encoder.encoder import Encoder
from headrace.worker.encoder.pooling import Floats
from headrace.worker.encoder.thread import EncoderThread
from headrace.worker.engine.mailbox import EngineReport, Mailbox
from headrace.worker.kv.fetch import Bell, nobody
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from tests.patience import patience


class ThreadedRunner:
    """Each batch ends a little later, from another thread."""

    num_places = 3

    def __init__(self, on_end: Callable[[], None] = nobody) -> None:
        self.ended: deque[int] = deque()
        self._on_end = on_end
        self.batches: dict[int, Sequence[Request]] = {}
        self.rng = random.Random(1)

    def begin(self, place: int, batch: Sequence[Request]) -> None:
        self.batches[place] = batch
        threading.Timer(self.rng.uniform(0, 0.003), self._end, (place,)).start()

    def _end(self, place: int) -> None:
        self.ended.append(place)
        self._on_end()

    def result(self, place: int) -> Floats:
        return np.array([[request.num_tokens] for request in self.batches.pop(place)], np.float32)


def mailbox_and_runner(capacity: int, on_report: Callable[[EngineReport], None]) -> tuple[Mailbox, ThreadedRunner]:
    """A mailbox, and a runner that wakes who takes from it."""
    bell = Bell()
    return Mailbox(capacity, on_report, bell=bell), ThreadedRunner(bell.ring)


def text(num_tokens: int) -> Request:
    return Request("t", [7] * num_tokens, SamplingParams(max_tokens=0, seed=0), 0, arrival_s=time.monotonic())


async def test_each_stream_has_its_vector_and_closed_ones_leave_nothing_behind() -> None:
    reports: list[EngineReport] = []
    mailbox, runner = mailbox_and_runner(1000, reports.append)
    encoder = Encoder(runner, Batcher(BatchLimits(max_tokens=64)))
    failures: list[str] = []
    thread = EncoderThread(encoder, mailbox, runner.ended, lambda why, error: failures.append(f"{why}: {error}"))
    thread.start()
    rng = random.Random(2)

    async def one(num_tokens: int, gives_up: bool) -> None:
        await asyncio.sleep(rng.uniform(0, 0.2))
        stream = mailbox.submit(text(num_tokens))
        try:
            if gives_up:
                await asyncio.sleep(rng.uniform(0, 0.004))
                return
            (output,) = await stream.next()
            assert np.frombuffer(output.vector, "<f4").tolist() == [num_tokens]
        finally:
            stream.close()

    async with asyncio.timeout(patience(20)):
        await asyncio.gather(*(one(rng.randint(1, 60), rng.random() < 0.3) for _ in range(300)))
        assert await mailbox.wait_until_empty(5)
        while encoder.has_work or not thread.is_idle:
            await asyncio.sleep(0.01)
    await asyncio.sleep(0.05)
    stats = encoder.stats
    assert stats.requests_admitted == stats.requests_finished + stats.requests_cancelled
    assert stats.requests_cancelled > 0
    assert reports[-1].num_taken == 300
    assert reports[-1].load.num_running == reports[-1].load.num_waiting == reports[-1].load.num_uncached_tokens == 0
    mailbox.stop()
    thread.join(patience(5))
    assert not thread.is_alive()
    assert not failures


async def test_what_raises_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox, runner = Mailbox(10, lambda report: None), ThreadedRunner()
    encoder = Encoder(runner, Batcher(BatchLimits()))
    failures: list[str] = []
    thread = EncoderThread(encoder, mailbox, runner.ended, lambda why, error: failures.append(f"{why}: {error}"))

    def spoiled() -> None:
        raise ZeroDivisionError("spoiled")

    monkeypatch.setattr(encoder, "begin_batches", spoiled)
    thread.start()
    mailbox.submit(text(3))
    await asyncio.to_thread(thread.join, 5)
    assert failures == ["the encoder failed: spoiled"]


async def test_an_idle_encoder_refuses_no_text_however_short_its_bound() -> None:
    """A router sends 0 if the text has used its time up there."""
    mailbox, runner = mailbox_and_runner(10, lambda report: None)
    thread = EncoderThread(Encoder(runner, Batcher(BatchLimits())), mailbox, runner.ended)
    one = text(3)
    one.max_wait_s = 0.0
    stream = mailbox.submit(one)
    thread.start()
    (output,) = await stream.next()
    mailbox.stop()
    thread.join(patience(5))
    assert output.error is None
