"""Requests with images through a worker's services: each ends once, and whatever ends it while its images are encoded
frees all that it held."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest

from headrace.common.telemetry.span import Span
from headrace.protos.inference_pb2 import SamplingParams
from headrace.protos.status import Reason, StatusError, error_of
from headrace.protos.worker_pb2 import DrainRequest
from headrace.worker.engine import mailbox, pacing
from headrace.worker.engine.encoding import RETRY_AFTER_S, Encoding
from headrace.worker.engine.mailbox import Mailbox
from headrace.worker.engine.stages import Stages
from headrace.worker.engine.watchdog import Verdict, Watchdog
from headrace.worker.kv.fetch import Bell
from headrace.worker.request.params import SamplingParams as Params
from headrace.worker.request.request import Request
from headrace.worker.server.observer import trace_request
from headrace.worker.vision.states import StateStore
from tests.worker.conftest import VOCAB_SIZE
from tests.worker.fake_runner import expected_tokens
from tests.worker.images import FakeEncoder, Picture, prompt_of
from tests.worker.server.running import RunningWorker, running_worker, small_engine
from tests.worker.server.test_images import DARK, RED, desk, message, tokens_of

PROMPT = [1, *tokens_of(RED), 5]


class NotedSpan(Span):
    """Notes its children with their times."""

    __slots__ = ("attributes", "children", "name", "times")

    def __init__(self, name: str = "", start_s: float | None = None) -> None:
        self.name, self.times = name, [start_s, None]
        self.children: list[NotedSpan] = []
        self.attributes: dict[str, object] = {}

    @property
    def is_recording(self) -> bool:
        return True

    def child(self, name: str, attributes: object = None, *, kind: object = None, start_s: float | None = None) -> Span:
        self.children.append(NotedSpan(name, start_s))
        return self.children[-1]

    def set(self, attributes: Any) -> None:
        self.attributes |= attributes

    def end(self, *, end_s: float | None = None) -> None:
        self.times[1] = end_s


def test_a_trace_tells_how_long_a_request_waited_for_its_images() -> None:
    prompt = prompt_of([1], Picture(1, 4), [2])
    request = Request("r", prompt.token_ids, Params(4, 0), 1, images=prompt.images, arrival_s=10.0)
    request.scheduled_s, request.images_ready_s, request.image_wait_s = 15.0, 14.0, 3.0
    span = NotedSpan()
    trace_request(span, request, 20.0)
    assert span.attributes["headrace.num_images"] == 1
    queue, images = span.children[:2]
    assert (queue.name, queue.times) == ("queue", [10.0, 15.0])
    assert (images.name, images.times) == ("images", [11.0, 14.0])


@dataclass
class Served:
    """A worker that serves requests with images, and what encodes them when it is told to."""

    worker: RunningWorker
    encoder: FakeEncoder
    store: StateStore
    bell: Bell

    def work(self) -> None:
        self.encoder.work()
        self.bell.ring()

    def ask(self, *images: bytes, max_tokens: int = 6) -> Any:
        prompt = [1, *(token for data in images for token in tokens_of(data)), 5]
        request = message(prompt, *images, sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens))
        return self.worker.inference.Generate(request)

    async def tokens(self, *images: bytes) -> list[int]:
        return [token async for response in self.ask(*images) for token in response.token_ids]

    async def until_clean(self) -> None:
        """Wait until nothing is held for anybody."""
        pool = self.worker.under_test.scheduler.kv_cache.pool
        await self.worker.until(lambda: self.worker.mailbox.num_open == 0)
        await self.worker.until(lambda: self.store.num_holders == 0 and pool.num_free_blocks == pool.num_blocks)
        assert not self.encoder.queue


@asynccontextmanager
async def with_images(max_wait_s: float = 60.0) -> AsyncIterator[Served]:
    engine, encoder, bell = small_engine(), FakeEncoder(), Bell()
    store = StateStore(1 << 20)
    stages = Stages([Encoding(engine.scheduler, encoder, store, max_wait_s)])
    async with running_worker(engine, images=desk(), stages=stages, bell=bell) as worker:
        yield Served(worker, encoder, store, bell)


async def test_an_answer_comes_when_the_images_are_encoded() -> None:
    async with with_images() as served:
        answered = asyncio.create_task(served.tokens(RED, DARK))
        await served.worker.until(lambda: len(served.encoder.queue) == 2)
        await served.worker.until(lambda: served.worker.hub.load().num_encoding == 1)
        served.work()
        prompt = [1, *tokens_of(RED), *tokens_of(DARK), 5]
        assert await answered == expected_tokens(prompt, 6, VOCAB_SIZE)
        await served.until_clean()


async def test_a_caller_that_hangs_up_frees_everything_and_stops_the_encoding() -> None:
    async with with_images() as served:
        call = served.ask(RED)
        task = asyncio.create_task(anext(aiter(call)))
        await served.worker.until(lambda: len(served.encoder.queue) == 1)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await served.until_clean()
        assert served.worker.under_test.scheduler.stats.requests_cancelled == 1


async def test_of_two_callers_with_one_image_either_may_hang_up_while_it_is_encoded() -> None:
    for leaver in (0, 1):
        async with with_images() as served:
            calls = []
            for _ in range(2):
                calls.append(served.ask(RED))
                await served.worker.until(lambda: served.worker.hub.load().num_encoding == len(calls))  # noqa: B023
            calls.pop(leaver).cancel()
            await served.worker.until(lambda: served.worker.hub.load().num_encoding == 1)
            assert len(served.encoder.queue) == 1, "the other one still needs it"
            served.work()
            (stays,) = calls
            assert [token async for response in stays for token in response.token_ids] == expected_tokens(
                PROMPT, 6, VOCAB_SIZE
            )
            assert len(served.encoder.seen) == 1
            await served.until_clean()


async def test_two_callers_with_one_image_are_told_that_nothing_encodes_it_now_and_may_ask_again() -> None:
    async with with_images() as served:
        told = [asyncio.create_task(served.tokens(RED)) for _ in range(2)]
        await served.worker.until(lambda: served.worker.hub.load().num_encoding == 2)
        served.encoder.fail("it does not start", Reason.NO_CAPACITY)
        served.bell.ring()
        for task in told:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await task
            error = error_of(caught.value)
            assert (error.reason, error.retry_after_s) == (Reason.NO_CAPACITY, RETRY_AFTER_S)
        again = asyncio.create_task(served.tokens(RED))
        await served.worker.until(lambda: len(served.encoder.queue) == 1)
        served.work()
        assert await again == expected_tokens(PROMPT, 6, VOCAB_SIZE)
        await served.until_clean()


async def test_a_drain_waits_for_an_image_that_is_encoded_and_its_answer() -> None:
    async with with_images() as served:
        answered = asyncio.create_task(served.tokens(RED))
        await served.worker.until(lambda: len(served.encoder.queue) == 1)
        drained = asyncio.ensure_future(served.worker.worker.Drain(DrainRequest()))
        await served.worker.until(lambda: served.worker.hub.draining)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.tokens(DARK)
        assert error_of(caught.value).reason is Reason.DRAINING
        assert not drained.done()
        served.work()
        assert await answered == expected_tokens(PROMPT, 6, VOCAB_SIZE)
        assert (await drained).num_running == 0
        await served.until_clean()


async def test_a_deadline_ends_a_request_whose_image_hangs() -> None:
    async with with_images() as served:
        request = message(PROMPT, RED)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in served.worker.inference.Generate(request, timeout=0.3)]
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await served.until_clean()


@pytest.fixture
def endless_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """While an image waits, each step of streams is followed by a pause of an hour."""
    monkeypatch.setattr(pacing, "image_share", lambda num_images, num_streams: 1e9)
    monkeypatch.setattr(pacing, "longest_ms", lambda target_ms, without_ms: 3.6e6)


async def begin_pause(served: Served, max_tokens: int = 9) -> tuple[Any, asyncio.Task[list[int]], list[int]]:
    """A stream of text that pauses, a request whose image is the reason, and the stream's tokens before the pause. All
    that is computed before a pause is delivered before it."""
    answered = asyncio.create_task(served.tokens(RED))
    await served.worker.until(lambda: len(served.encoder.queue) == 1)
    request = message([1, 2], sampling=SamplingParams(temperature=0.0, max_tokens=max_tokens))
    call = served.worker.inference.Generate(request)
    found: list[int] = []
    while len(found) < 2:
        found += (await anext(aiter(call))).token_ids
    return call, answered, found


@pytest.mark.usefixtures("endless_pauses")
async def test_a_pause_ends_when_the_image_is_encoded() -> None:
    async with with_images() as served:
        call, answered, found = await begin_pause(served)
        turns = served.worker.thread.num_turns
        late = served.worker.generate(token_ids=[3, 4], sampling=SamplingParams(temperature=0.0, max_tokens=1))
        assert [token for response in await late for token in response.token_ids] == expected_tokens(
            [3, 4], 1, VOCAB_SIZE
        )
        assert served.worker.thread.num_turns > turns, "a prompt does not wait"
        assert not answered.done()
        served.work()
        assert await answered == expected_tokens(PROMPT, 6, VOCAB_SIZE)
        found += [token async for response in call for token in response.token_ids]
        assert found == expected_tokens([1, 2], 9, VOCAB_SIZE)
        await served.until_clean()


@pytest.mark.usefixtures("endless_pauses")
async def test_callers_that_hang_up_in_a_pause_free_everything() -> None:
    async with with_images() as served:
        call, answered, _ = await begin_pause(served)
        call.cancel()
        await served.worker.until(lambda: served.worker.under_test.scheduler.stats.requests_cancelled == 1)
        served.work()
        await answered
        await served.until_clean()


@pytest.mark.usefixtures("endless_pauses")
async def test_a_broken_image_ends_its_request_and_the_pause() -> None:
    async with with_images() as served:
        call, answered, found = await begin_pause(served)
        served.encoder.fail("the image is a truncated PNG file")
        served.bell.ring()
        with pytest.raises(grpc.aio.AioRpcError):
            await answered
        found += [token async for response in call for token in response.token_ids]
        assert found == expected_tokens([1, 2], 9, VOCAB_SIZE)
        await served.until_clean()


async def test_a_broken_image_ends_its_requests_alone() -> None:
    async with with_images() as served:
        bad = [asyncio.create_task(served.tokens(DARK, RED)) for _ in range(2)]
        await served.worker.until(lambda: served.worker.hub.load().num_encoding == 2)
        text = served.worker.generate(token_ids=[1, 2], sampling=SamplingParams(temperature=0.0, max_tokens=3))
        served.encoder.work(1)
        served.encoder.fail("the image is a truncated PNG file")
        served.bell.ring()
        for task in bad:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await task
            error = error_of(caught.value)
            assert (error.reason, error.field) == (Reason.INVALID_FIELD, "images[1]")
            assert error.message == "images[1]: the image is a truncated PNG file"
        assert [token for response in await text for token in response.token_ids]
        await served.until_clean()


async def test_an_engine_that_waits_for_images_alone_is_not_stuck() -> None:
    async with with_images() as served:
        answered = asyncio.create_task(served.tokens(RED))
        await served.worker.until(lambda: len(served.encoder.queue) == 1)
        await served.worker.until(lambda: served.worker.thread.is_idle)
        watchdog = Watchdog(served.worker.thread, stuck_after_s=0.01)
        assert [watchdog.look(now_s) for now_s in (100.0, 200.0, 300.0)] == [Verdict.ALIVE] * 3
        served.work()
        await answered


async def test_images_of_all_requests_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "MAX_IMAGE_BYTES_KEPT", 25)
    box = Mailbox(10, lambda report: None)

    def request(*pictures: Picture, **fields: object) -> Request:
        prompt = prompt_of([1], *pictures)
        return Request("r", prompt.token_ids, Params(4, 0), 1, images=prompt.images, **fields)  # type: ignore[arg-type]

    one, other = Picture(1, 4), Picture(2, 4)
    shared = request(one, one)
    shared.images[1].data = shared.images[0].data
    first = box.submit(shared)
    second = box.submit(request(other))
    with pytest.raises(StatusError) as caught:
        box.submit(request(one))
    assert caught.value.reason is Reason.QUEUE_FULL
    resumed = box.submit(request(one, resume_token_ids=[3]))
    for stream in (first, second, resumed):
        stream.close()
    box.submit(request(one, other))
