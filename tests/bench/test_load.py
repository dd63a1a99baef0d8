"""When requests are sent: an open loop stays open, users think, and what is late is counted."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from headrace.bench.apis import Prompt
from headrace.bench.datasets import Conversation, Turn
from headrace.bench.load import Load, Run
from headrace.bench.record import Record
from tests.bench.fake_sender import FakeSender
from tests.bench.virtual_time import run


class FakeServer(FakeSender):
    """Answers after `seconds`; keeps what it was asked."""

    def __init__(self, seconds: float, fails: Callable[[int], bool] = lambda _: False) -> None:
        self.seconds = seconds
        self.fails = fails
        self.prompts: list[Prompt] = []
        self.most = 0
        self.given_up = 0
        self._now = 0

    def prepared(self, prompt: Prompt) -> bytes:
        self.prompts.append(Prompt(list(prompt.messages), prompt.max_tokens))
        return b""

    async def send(self, request: bytes, record: Record) -> None:
        self._now += 1
        self.most = max(self.most, self._now)
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        self._now -= 1
        record.ended_s = asyncio.get_running_loop().time()
        record.pieces.append(f"answer {record.number}")
        if self.fails(record.number):
            record.error_kind = "scripted"


def single(count: int) -> list[Conversation]:
    return [Conversation((Turn((f"prompt {i}",), 2, 4),)) for i in range(count)]


def loaded(server: FakeServer, conversations: list[Conversation], starts: list[float], most: int | None = None) -> Run:
    async def main() -> Run:
        return await Load(server, asyncio.get_running_loop().time, most).open_loop(conversations, starts)

    return run(main())


def test_an_open_loop_sends_when_requests_are_due_although_none_is_answered() -> None:
    server = FakeServer(100.0)
    done = loaded(server, single(5), [0.5, 1.0, 1.5, 4.0, 4.5])
    assert [record.sent_s for record in done.records] == pytest.approx([0.5, 1.0, 1.5, 4.0, 4.5])
    assert server.most == 5
    assert done.num_timed == 5
    assert done.duration_s == pytest.approx(104.5)
    assert max(record.late_s for record in done.records) == pytest.approx(0, abs=1e-6)


def test_requests_beyond_the_concurrency_wait_in_the_client_and_are_not_late() -> None:
    server = FakeServer(10.0)
    done = loaded(server, single(4), [0.5, 1.0, 1.5, 2.0], most=2)
    assert [record.sent_s for record in done.records] == pytest.approx([0.5, 1.0, 10.5, 11.0])
    assert [record.queued_s for record in done.records] == pytest.approx([0, 0, 9.0, 9.0])
    assert server.most == 2
    assert [record.late_s for record in done.records] == pytest.approx([0, 0, 0, 0], abs=1e-6)


def test_all_at_once_is_not_timed() -> None:
    done = loaded(FakeServer(1.0), single(3), [0.0, 0.0, 0.0])
    assert (done.num_timed, done.duration_s) == (0, pytest.approx(1.0))


def test_a_client_that_is_busy_sends_late_and_says_so() -> None:
    class Slow(FakeServer):
        def prepared(self, prompt: Prompt) -> bytes:
            loop = asyncio.get_running_loop()
            if len(self.prompts) == 1:
                loop._jumping.now_s += 0.4  # type: ignore[attr-defined]
            return super().prepared(prompt)

    done = loaded(Slow(1.0), single(3), [0.1, 0.2, 0.3])
    assert [round(record.late_s, 3) for record in done.records] == [0.3, 0.2, 0.1]
    assert max(done.lags_s) > 0.1


def test_the_beginning_of_users_without_thought_is_not_timed() -> None:
    server = FakeServer(1.0)

    async def main() -> Run:
        load = Load(server, asyncio.get_running_loop().time, None)
        return await load.users(single(4), 2, 0.0, random.Random(1))

    done = run(main())
    assert [record.sent_s for record in done.records] == pytest.approx([0.0, 0.0, 1.0, 1.0])
    assert done.num_timed == 0


def test_what_a_step_raises_ends_the_run() -> None:
    class Broken(FakeServer):
        def prepared(self, prompt: Prompt) -> bytes:
            if len(self.prompts) == 2:
                raise ValueError("cannot be encoded")
            return super().prepared(prompt)

    with pytest.raises(ValueError, match="cannot be encoded"):
        loaded(Broken(1.0), single(3), [0.1, 0.2, 0.3])


def test_a_load_without_conversations_is_over_at_once() -> None:
    assert loaded(FakeServer(1.0), [], []).records == []


def conversation(think_s: float) -> Conversation:
    turns = tuple(Turn((f"question {i}",), 2, 3 + i, think_s if i else 0.0) for i in range(3))
    return Conversation(turns, "system", 5)


def test_a_conversation_goes_on_with_its_answers_after_a_time_of_thinking() -> None:
    server = FakeServer(2.0)
    done = loaded(server, [conversation(10.0)], [1.0])
    assert [record.sent_s for record in done.records] == pytest.approx([1.0, 13.0, 25.0])
    last = server.prompts[-1]
    assert [message["role"] for message in last.messages] == ["system", *["user", "assistant"] * 2, "user"]
    assert last.messages[2]["content"] == "answer 0"
    assert last.max_tokens == 5
    assert done.records[0].prompt_tokens == 7


def test_a_conversation_ends_when_a_turn_fails() -> None:
    server = FakeServer(1.0, fails=lambda number: number == 1)
    done = loaded(server, [conversation(0.0)], [0.0])
    assert len(done.records) == 2


def test_users_have_one_conversation_after_the_other() -> None:
    server = FakeServer(1.0)

    async def main() -> Run:
        load = Load(server, asyncio.get_running_loop().time, None)
        return await load.users([conversation(5.0)] * 6, 2, 5.0, random.Random(1))

    done = run(main())
    assert len(done.records) == 18
    assert server.most <= 2
    assert done.records[0].sent_s <= 5.0
    assert done.num_timed == 18
