"""Puts load on a server: conversations that begin when they are due whatever the server does, or users who take turns.

An open loop stays open: a request that is due is sent even if no earlier one has been answered. What the client itself
sends late is recorded, because late requests are less load than was asked for.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
import random
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from headrace.bench.apis import Message, Prompt
from headrace.bench.datasets import Conversation
from headrace.bench.record import Record
from headrace.bench.sender import Sender, Sent

LATE_S = 0.01
"""A request that is sent later than this after it was due is late."""
_Arrivals = Iterator[tuple[int, tuple[Conversation, float]]]
"""Conversations by number, each with its time after the beginning."""
_TICK_S = 0.05
# First requests that are encoded at a time. One at a time would find the caches of the CPU cold, and take longer.
_MOST_AHEAD, _MOST_BYTES_AHEAD = 16, 1 << 16
_RECENT = 100


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
        """Output tokens until now; a piece of an unfinished answer counts as one. Answers may be read up to a second
        after they arrive."""
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


@dataclass(slots=True, eq=False)
class _Talk:
    """A conversation under way, with its next request or the one that was sent. `over` is called after its end."""

    number: int
    conversation: Conversation
    over: Callable[[], None] | None
    request: bytes
    due_s: float
    is_timed: bool
    """Whether the request is due at a time of its own."""
    said: list[Message]
    """Until now, if anything is asked after it."""
    before: int
    """The tokens of a prompt before those of its turn."""
    place: int = 0
    """Of the present turn."""
    sent: Sent | None = None


class Load:
    """Runs conversations. `now` is the clock of all times.

    A conversation is no task: its steps are called by the event loop and the sender, which costs less.
    """

    def __init__(self, sender: Sender, now: Callable[[], float], max_concurrency: int | None) -> None:
        self._sender = sender
        self._now = now
        self._free: float = max_concurrency or math.inf
        """Requests that may be sent at once."""
        self._waiting: deque[tuple[_Talk, Record]] = deque()
        """Those that wait until one may be sent."""
        self._ahead: deque[_Talk] = deque()
        """Conversations that begin next."""
        self._talks: set[_Talk] = set()
        self._num_left = 0
        """Conversations that are not over yet."""
        self._records: list[Record] = []
        self._num_timed = 0
        self._began_s = 0.0
        self._last_due_s = 0.0
        self._over: asyncio.Future[None] | None = None
        """Done when the run is over."""
        self.progress = Progress(0)

    async def open_loop(
        self, conversations: Sequence[Conversation], starts_s: Sequence[float], stop: asyncio.Event | None = None
    ) -> Run:
        """Begin each conversation at its time after the beginning. All zero: all at once. `stop` ends the run early."""
        arrivals = enumerate(zip(conversations, starts_s, strict=True))
        begin = functools.partial(self._await_next, arrivals, any(starts_s))
        return await self._until_stopped(conversations, begin, stop)

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

        def begin() -> None:
            for start_s in sorted(rng.uniform(0.0, think_s) for _ in range(num_users)):
                goes_on(self._began_s + start_s)

        def goes_on(due_s: float) -> None:
            """One user takes the next conversation."""
            found = next(waiting, None)
            if found is not None:
                talk = self._prepared(*found, due_s, bool(think_s), thinks)
                self._later(due_s - self._now(), self._begin, talk)

        def thinks() -> None:
            goes_on(self._now() + (rng.expovariate(1 / think_s) if think_s else 0.0))

        return await self._until_stopped(conversations, begin, stop)

    async def _until_stopped(
        self, conversations: Sequence[Conversation], begin: Callable[[], None], stop: asyncio.Event | None
    ) -> Run:
        self._records = []
        self._num_timed = 0
        self._num_left = len(conversations)
        self.progress.total = sum(len(conversation.turns) for conversation in conversations)
        self._began_s = self._last_due_s = self._now()
        self._over = over = asyncio.get_running_loop().create_future()
        ticks = _Ticks(self._now)
        stopping = asyncio.create_task((stop or asyncio.Event()).wait())
        async with beside(ticks.tick()):
            try:
                if conversations:
                    self._later(0.0, begin)  # when the ticks have begun
                else:
                    over.set_result(None)
                await asyncio.wait((over, stopping), return_when=asyncio.FIRST_COMPLETED)
                self._sender.read()
            finally:
                stopping.cancel()
                is_partial = over.cancel()  # steps that are still due do nothing
                for talk in self._talks:
                    if talk.sent is not None:
                        talk.sent.cancel()
        if not is_partial:
            over.result()
        unfinished = self.progress.open if is_partial else {}
        records = [record for record in self._records if record.number not in unfinished]
        ended_s = max((record.ended_s for record in records), default=self._began_s)
        return Run(
            records,
            self._began_s,
            ended_s,
            self._last_due_s,
            self._num_timed,
            ticks.lags_s,
            is_partial,
            num_open=len(unfinished),
        )

    def _later(self, wait_s: float, step: Callable[..., None], *args: Any) -> None:
        """Take a step of the run after a time, or soon."""
        loop = asyncio.get_running_loop()
        if wait_s > 0:
            loop.call_later(wait_s, self._step, step, *args)
        else:
            loop.call_soon(self._step, step, *args)

    def _step(self, step: Callable[..., None], *args: Any) -> None:
        """Take a step of the run, if it is not over. What it raises ends the run with it."""
        over = self._over
        assert over is not None
        if over.done():
            return
        try:
            step(*args)
        except Exception as error:
            if not over.done():
                over.set_exception(error)

    def _await_next(self, arrivals: _Arrivals, are_timed: bool) -> None:
        """Begin the next conversation when it is due. First requests are encoded before, several at a time."""
        if not self._ahead:
            num_bytes = 0
            for number, (conversation, start_s) in itertools.islice(arrivals, _MOST_AHEAD):
                talk = self._prepared(number, conversation, self._began_s + start_s, are_timed, None)
                self._ahead.append(talk)
                num_bytes += len(talk.request)
                if num_bytes > _MOST_BYTES_AHEAD:
                    break
        if self._ahead:
            talk = self._ahead.popleft()
            wait_s = talk.due_s - self._now() if are_timed else 0.0
            self._later(wait_s, self._arrive, arrivals, are_timed, talk)

    def _arrive(self, arrivals: _Arrivals, are_timed: bool, talk: _Talk) -> None:
        self._begin(talk)
        self._await_next(arrivals, are_timed)  # it is sent before the next request is encoded

    def _prepared(
        self, number: int, conversation: Conversation, due_s: float, is_timed: bool, over: Callable[[], None] | None
    ) -> _Talk:
        """A conversation whose first request is due then."""
        turn = conversation.turns[0]
        said: list[Message] = [{"role": "system", "content": conversation.system}] if conversation.system else []
        said.append({"role": "user", "content": turn.text})
        request = self._sender.prepared(Prompt(said, turn.output_tokens, number))
        kept = said if len(conversation.turns) > 1 else []
        return _Talk(number, conversation, over, request, due_s, is_timed, kept, conversation.system_tokens)

    def _begin(self, talk: _Talk) -> None:
        self._talks.add(talk)
        self._ask(talk)

    def _ask(self, talk: _Talk) -> None:
        """Send a request, or let it wait for its turn."""
        turn = talk.conversation.turns[talk.place]
        prompt_tokens = talk.before + turn.prompt_tokens
        record = Record(len(self._records), prompt_tokens, turn.output_tokens, hash(turn.parts), talk.due_s)
        self._records.append(record)
        self.progress.open[record.number] = record
        self._last_due_s = max(self._last_due_s, talk.due_s)
        if self._free:
            self._free -= 1
            self._send(talk, record, talk.due_s)
        else:
            self._waiting.append((talk, record))

    def _send(self, talk: _Talk, record: Record, may_s: float) -> None:
        """Send a request, which could have been sent since `may_s`."""
        record.sent_s = record.ended_s = self._now()
        if talk.is_timed:
            self._num_timed += 1
            record.late_s = max(0.0, record.sent_s - may_s)
            self.progress.late += record.late_s > LATE_S
        self.progress.sent += 1
        answered = functools.partial(self._step, self._answered, talk, record)
        may_wait = self._free == math.inf and talk.over is None and len(talk.conversation.turns) == 1
        talk.sent = self._sender.start(talk.request, record, answered, may_wait)

    def _answered(self, talk: _Talk, record: Record) -> None:
        """Send what has waited for the end of a request, and go on with its conversation."""
        talk.sent = None
        if self._waiting:
            self._send(*self._waiting.popleft(), self._now())
        else:
            self._free += 1
        progress = self.progress
        del progress.open[record.number]
        progress.done += 1
        progress.failed += not record.succeeded
        progress.output_tokens += record.usage_completion_tokens or len(record.times)
        if record.succeeded and record.times:
            progress.ttfts_s.append(record.ttft_s)
            if len(record.times) > 1:
                progress.gaps_s.append((record.times[-1] - record.times[0]) / (len(record.times) - 1))
        talk.place += 1
        num_left = len(talk.conversation.turns) - talk.place
        if num_left and record.succeeded:
            self._go_on(talk, record)
        else:
            progress.total -= num_left
            self._end(talk)

    def _go_on(self, talk: _Talk, record: Record) -> None:
        """Ask the next turn of a conversation, after a time of thinking if it has one."""
        turn = talk.conversation.turns[talk.place]
        talk.said += ({"role": "assistant", "content": record.text}, {"role": "user", "content": turn.text})
        talk.before = record.prompt_tokens + (record.usage_completion_tokens or len(record.times))
        talk.request = self._sender.prepared(Prompt(talk.said, turn.output_tokens, talk.number))
        talk.due_s = self._now() + turn.think_s
        talk.is_timed = bool(turn.think_s)
        if turn.think_s:
            self._later(turn.think_s, self._ask, talk)
        else:
            self._ask(talk)

    def _end(self, talk: _Talk) -> None:
        self._talks.remove(talk)
        if talk.over is not None:
            talk.over()
        self._num_left -= 1
        if not self._num_left and self._over is not None:
            self._over.set_result(None)


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
