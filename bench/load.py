"""Puts load on a server: conversations that begin when they are due whatever the server does, or users who take turns.

An open loop stays open: a request that is due is sent even if no earlier one has been answered. What the client itself
sends late is recorded, because late requests are less load than was asked for.
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace.bench.apis import Message, Prompt
from headrace.bench.datasets import Conversation
from headrace.bench.record import Record

LATE_S = 0.01
"""A request that is sent later than this after it was due is late."""
_TICK_S = 0.05
_RECENT = 100


class Sender(Protocol):
    """Sends one request and records its answer."""

    def prepared(self, prompt: Prompt) -> bytes:
        """The request as bytes, made before it is due."""

    async def send(self, request: bytes, record: Record) -> None:
        """Send it. Failures go into the record."""


@dataclass(slots=True)
class Progress:
    """What is going on, for displays: counts of requests, and tokens so far."""

    total: int
    sent: int = 0
    done: int = 0
    failed: int = 0
    late: int = 0
    output_tokens: int = 0
    """Of answered requests."""
    open: dict[int, Record] = field(default_factory=dict)
    """Requests that have no whole answer yet, by number."""
    ttfts_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Of the requests that were answered last."""
    gaps_s: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))
    """Their mean gaps between pieces."""

    @property
    def tokens(self) -> int:
        """Output tokens until now; a piece of an unfinished answer counts as one."""
        return self.output_tokens + sum(len(record.times) for record in self.open.values())


@dataclass(slots=True)
class Run:
    """A finished run. Times are in seconds of the run's clock."""

    records: list[Record]
    began_s: float
    ended_s: float
    last_due_s: float
    """When the last request was due; the beginning if all were due at once."""
    num_timed: int
    """Requests that were due at a time of their own, and so could be late."""
    lags_s: list[float] = field(default_factory=list)
    """How much too late each tick of the client came: it was busy."""
    is_partial: bool = False
    """Whether the run was stopped before its end. `records` are then those of finished requests."""
    num_open: int = 0
    """Requests that were sent or waited for their turn when a run was stopped; they are not in `records`."""

    @property
    def duration_s(self) -> float:
        """The seconds from the beginning to the last answer."""
        return self.ended_s - self.began_s


class Load:
    """Runs conversations. `now` is the clock of all times."""

    def __init__(self, sender: Sender, now: Callable[[], float], max_concurrency: int | None) -> None:
        self._sender = sender
        self._now = now
        self._gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None
        self._records: list[Record] = []
        self._num_timed = 0
        self._began_s = 0.0
        self._last_due_s = 0.0
        self.progress = Progress(0)

    async def open_loop(
        self, conversations: Sequence[Conversation], starts_s: Sequence[float], stop: asyncio.Event | None = None
    ) -> Run:
        """Begin each conversation at its time after the beginning. All zero: all at once. `stop` ends the run early."""
        return await self._until_stopped(conversations, self._due(conversations, starts_s), stop)

    async def users(
        self,
        conversations: Sequence[Conversation],
        num_users: int,
        think_s: float,
        rng: random.Random,
        stop: asyncio.Event | None = None,
    ) -> Run:
        """Users who have one conversation after the other. They begin within one time of thinking. `stop` ends the run
        early."""
        waiting = enumerate(conversations)
        starts_s = sorted(rng.uniform(0.0, think_s) for _ in range(num_users))
        everyone = _all([self._user(waiting, start_s, think_s, rng) for start_s in starts_s])
        return await self._until_stopped(conversations, everyone, stop)

    async def _until_stopped(
        self, conversations: Sequence[Conversation], work: Coroutine[Any, Any, None], stop: asyncio.Event | None
    ) -> Run:
        self._records = []
        self._num_timed = 0
        self.progress.total = sum(len(conversation.turns) for conversation in conversations)
        self._began_s = self._last_due_s = self._now()
        ticks = _Ticks(self._now)
        async with beside(ticks.tick()):
            working = asyncio.create_task(work)
            stopping = asyncio.create_task((stop or asyncio.Event()).wait())
            await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
            is_partial = not working.done()
            unfinished = self.progress.open if is_partial else {}
            records = [record for record in self._records if record.number not in unfinished]
            num_open = len(unfinished)
            for task in (working, stopping):
                task.cancel()
            await asyncio.wait((working, stopping))
            if not is_partial:
                working.result()
        ended_s = max((record.ended_s for record in records), default=self._began_s)
        return Run(
            records, self._began_s, ended_s, self._last_due_s, self._num_timed, ticks.lags_s, is_partial, num_open
        )

    async def _due(self, conversations: Sequence[Conversation], starts_s: Sequence[float]) -> None:
        are_timed = any(starts_s)
        loop = asyncio.get_running_loop()
        tasks = []
        try:
            for number, (conversation, start_s) in enumerate(zip(conversations, starts_s, strict=True)):
                due_s = self._began_s + start_s
                first = self._first(number, conversation)
                if are_timed and (wait_s := due_s - self._now()) > 0:
                    await asyncio.sleep(wait_s)
                tasks.append(loop.create_task(self._converse(number, conversation, first, due_s, are_timed)))
                await asyncio.sleep(0)  # it is sent before the next request is prepared
            for task in tasks:  # a callback of each, as groups of tasks have, would cost more
                await task
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise

    async def _user(
        self, waiting: Iterator[tuple[int, Conversation]], start_s: float, think_s: float, rng: random.Random
    ) -> None:
        due_s = self._began_s + start_s
        is_first = True
        for number, conversation in waiting:
            if not is_first:
                due_s = self._now() + (rng.expovariate(1 / think_s) if think_s else 0.0)
            is_first = False
            first = self._first(number, conversation)
            await asyncio.sleep(max(0.0, due_s - self._now()))
            await self._converse(number, conversation, first, due_s, bool(think_s))

    async def _converse(
        self, number: int, conversation: Conversation, first: bytes, due_s: float, is_timed: bool
    ) -> None:
        said: list[Message] = []
        before = conversation.system_tokens
        last = len(conversation.turns) - 1
        for place, turn in enumerate(conversation.turns):
            if last:  # else nothing is asked after it
                said = said or _opening(conversation)
                said.append({"role": "user", "content": turn.text})
            request = first if place == 0 else self._sender.prepared(Prompt(said, turn.output_tokens, number))
            if place and turn.think_s:
                due_s = self._now() + turn.think_s
                await asyncio.sleep(turn.think_s)
            elif place:
                due_s = self._now()
            record = Record(
                len(self._records), before + turn.prompt_tokens, turn.output_tokens, hash(turn.parts), due_s
            )
            self._records.append(record)
            await self._ask(request, record, is_timed if place == 0 else bool(turn.think_s))
            if place == last:
                return
            if not record.succeeded:
                self.progress.total -= last - place
                return
            said.append({"role": "assistant", "content": record.text})
            before = record.prompt_tokens + (record.usage_completion_tokens or len(record.times))

    async def _ask(self, request: bytes, record: Record, is_timed: bool) -> None:
        progress = self.progress
        progress.open[record.number] = record
        self._last_due_s = max(self._last_due_s, record.planned_s)
        if self._gate is None:
            await self._send(request, record, is_timed, record.planned_s)
        else:
            async with self._gate:
                # If the gate is closed now, it may have waited for its turn.
                may_s = self._now() if self._gate.locked() else record.planned_s
                await self._send(request, record, is_timed, may_s)
        del progress.open[record.number]
        progress.done += 1
        progress.failed += not record.succeeded
        progress.output_tokens += record.usage_completion_tokens or len(record.times)
        if record.succeeded and record.times:
            progress.ttfts_s.append(record.ttft_s)
            if len(record.times) > 1:
                progress.gaps_s.append((record.times[-1] - record.times[0]) / (len(record.times) - 1))

    async def _send(self, request: bytes, record: Record, is_timed: bool, may_s: float) -> None:
        """Send a request, which could have been sent since `may_s`."""
        record.sent_s = record.ended_s = self._now()
        if is_timed:
            self._num_timed += 1
            record.late_s = max(0.0, record.sent_s - may_s)
            self.progress.late += record.late_s > LATE_S
        self.progress.sent += 1
        await self._sender.send(request, record)

    def _first(self, number: int, conversation: Conversation) -> bytes:
        turn = conversation.turns[0]
        said = [*_opening(conversation), {"role": "user", "content": turn.text}]
        return self._sender.prepared(Prompt(said, turn.output_tokens, number))


def _opening(conversation: Conversation) -> list[Message]:
    return [{"role": "system", "content": conversation.system}] if conversation.system else []


class _Ticks:
    """Notices how late the client's own timers come."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.lags_s: list[float] = []

    async def tick(self) -> None:
        """Look, until cancelled."""
        while True:
            due_s = self._now() + _TICK_S
            await asyncio.sleep(_TICK_S)
            self.lags_s.append(max(0.0, self._now() - due_s))


async def _all(work: Iterable[Coroutine[Any, Any, None]]) -> None:
    async with asyncio.TaskGroup() as group:
        for one in work:
            group.create_task(one)


async def each_at_once(count: int, at_once: int, one: Callable[[], Awaitable[None]]) -> None:
    """Call and await `one` `count` times, at most `at_once` at a time."""
    left = iter(range(count))

    async def some() -> None:
        for _ in left:
            await one()

    await asyncio.gather(*(some() for _ in range(min(count, at_once))))


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None] | None) -> AsyncIterator[None]:
    """Context manager: run `work`, if there is any, while the context is open, then cancel it."""
    if work is None:
        yield
        return
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait([task])
