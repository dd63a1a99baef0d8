"""The knee that a sweep finds, against a server in virtual time whose capacity is known."""

from __future__ import annotations

import asyncio
import random

import pytest

from headrace.bench.apis import Prompt
from headrace.bench.arrivals import Arrivals
from headrace.bench.checks import check
from headrace.bench.datasets import Conversation, Turn
from headrace.bench.load import Load
from headrace.bench.record import Record
from headrace.bench.results import Result, Setup
from headrace.bench.sweep import Sweep, sweep, table, why_not_held
from tests.bench.fake_sender import FakeSender
from tests.bench.virtual_time import run


class Queue(FakeSender):
    """Answers `slots` requests at a time, each in `seconds`."""

    def __init__(self, slots: int, seconds: float) -> None:
        self._slots = asyncio.Semaphore(slots)
        self._seconds = seconds

    def prepared(self, prompt: Prompt) -> bytes:
        return b""

    async def send(self, request: bytes, record: Record) -> None:
        async with self._slots:
            await asyncio.sleep(self._seconds)
        record.ended_s = asyncio.get_running_loop().time()
        record.times = [record.ended_s - self._seconds / 2, record.ended_s]
        record.pieces, record.output_tokens = [f"{record.number}", "."], 2
        record.finish_reason, record.is_finished = "length", True


class Mute(Queue):
    """Answers without a word."""

    async def send(self, request: bytes, record: Record) -> None:
        await super().send(request, record)
        record.pieces = []


async def measured(
    rate: float, slots: int, seconds: float, objectives: dict[str, float], count: int, kind: type[Queue] = Queue
) -> Result:
    loop = asyncio.get_running_loop()
    conversations = [Conversation((Turn((f"{i}",), 1, 2),)) for i in range(count)]
    arrivals = Arrivals(rate)
    load = Load(kind(slots, seconds), loop.time, None)
    done = await load.open_loop(conversations, arrivals.times(count, random.Random(1)))
    setup = Setup(
        url="http://a",
        backend="openai",
        label=None,
        model="m",
        tokenizer=None,
        dataset="random",
        num_prompts=count,
        arrivals=arrivals,
        max_concurrency=None,
        num_users=None,
        objectives_ms=objectives,
        metrics=("ttft", "tpot"),
        percentiles=(99.0,),
        prompts_counted_by="",
        answers_counted_by="",
        date="20260101-000000",
        metadata={},
        seed=0,
    )
    checked = check(done.records, ignores_eos=True, prompts_are_exact=False, has_marked_end=True)
    return Result.of(setup, done, checked, 0.0, {})


def swept(slots: int, seconds: float, objectives: dict[str, float] | None = None, first: float = 0.5) -> Sweep:
    async def main() -> Sweep:
        return await sweep(
            first, 3, lambda rate: measured(rate, slots, seconds, objectives or {}, max(40, int(40 * rate)))
        )

    return run(main())


@pytest.mark.parametrize(("slots", "seconds"), [(1, 0.5), (4, 1.0), (32, 2.0)])
def test_the_knee_is_near_the_capacity(slots: int, seconds: float) -> None:
    found = swept(slots, seconds)
    assert found.is_closed
    assert found.knee is not None
    assert 0.75 * slots / seconds <= found.knee.rate <= 1.3 * slots / seconds


def test_objectives_bring_the_knee_down() -> None:
    free, bound = swept(4, 1.0), swept(4, 1.0, {"e2el": 1200})
    assert free.knee is not None
    assert bound.knee is not None
    assert bound.knee.rate < free.knee.rate
    assert "meet the objectives" in next(step.reason for step in bound.steps if not step.held)


def test_a_first_rate_that_is_too_high_is_halved() -> None:
    found = swept(2, 1.0, first=16.0)
    assert found.steps[1].rate == 8.0
    assert found.knee is not None
    assert found.knee.rate <= 2.6


def test_a_server_whose_queue_grows_is_told_from_one_that_is_only_slow() -> None:
    async def main() -> tuple[str, str]:
        slow = await measured(10.0, 1000, 8.0, {}, 400)
        queue = await measured(10.0, 8, 1.0, {}, 400)
        return why_not_held(slow, 10.0), why_not_held(queue, 10.0)

    slow, queue = run(main())
    assert slow == ""
    assert queue.endswith("the queue grows")


def test_a_rate_at_which_answers_are_wrong_is_not_held() -> None:
    async def main() -> str:
        return why_not_held(await measured(2.0, 100, 0.1, {}, 40, Mute), 2.0)

    assert run(main()) == "wrong answers: 40 of 40 answers without any text"


def test_a_load_that_is_shorter_than_its_answers_tells_nothing() -> None:
    async def main() -> str:
        return why_not_held(await measured(2.0, 1000, 8.0, {}, 8), 2.0)

    assert run(main()) == "an answer takes 8.0 s and the load lasts 4.0 s: give more --sweep-seconds"


def test_the_table_has_each_rate_in_order_and_the_knee() -> None:
    found = swept(2, 1.0)
    lines = table(found).splitlines()
    rates = [float(line.split()[0]) for line in lines[2:-1]]
    assert all(len(str(step.rate)) <= 5 for step in found.steps)  # file names have them
    assert rates == pytest.approx(sorted(step.rate for step in found.steps), abs=0.01)
    assert found.knee is not None
    assert lines[-1].startswith(f"Knee: {found.knee.rate:.2f} requests per second")
    bound = swept(2, 1.0, {"e2el": 2000.0, "ttft": 500.0})
    assert table(bound).splitlines()[-2] == "Objectives, for 90% of the requests: e2el 2000 ms, ttft 500 ms."
    assert table(Sweep()).splitlines()[-1] == "No rate that was tried is held."
