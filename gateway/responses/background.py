"""Responses that are generated in the background. Clients retrieve, follow or cancel them later.

A run lives in one gateway. Its state is in the store from the beginning. Other gateways with the same store can show
the response, cancel it through the store, and notice that its gateway has died:

    ID            the response
    ID:alive      the run's gateway is alive; renewed every `HEARTBEAT_S`
    ID:cancel     a client has cancelled the run
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import ExitStack

from headrace.gateway.access.caller import Caller
from headrace.gateway.edge.failures import draining, failure_of
from headrace.gateway.responses.answers import ResponseAnswer
from headrace.gateway.responses.response import ResponseError
from headrace.gateway.responses.store import Store, StoredResponse, StoreError, packed, unavailable, unpacked
from headrace.protos.status import Reason, StatusError

MAX_RUNS = 256
HEARTBEAT_S = 1.0
ALIVE_S = 10.0
MAX_ID_CHARS = 128
ENDED = frozenset({"completed", "incomplete", "failed", "cancelled"})
"""The states of a response that does not change any more."""

_LOG = logging.getLogger(__name__)


class ResponseRun:
    """One run, and the sink of its stream. Followers read the events that its answer remembers."""

    def __init__(self, caller: Caller, answer: ResponseAnswer, stored: StoredResponse) -> None:
        self.caller = caller
        self.answer = answer
        self.stored = stored
        self.task: asyncio.Task[None] | None = None
        self.holding = ExitStack()
        """Released when the run has ended."""
        self.ended = False
        self._last = b""
        self._changed = asyncio.Event()

    @property
    def response_id(self) -> str:
        """The id of the response."""
        return self.answer.response.id

    async def write(self, events: bytes, *, last: bool = False) -> None:
        """Wake the followers: there are new events."""
        if last and not self.ended:
            self.end()
        self._wake()

    async def keep_alive(self, begun: asyncio.Event) -> None:
        """Do nothing: followers keep their own connections alive."""
        await asyncio.Event().wait()

    def end(self) -> None:
        """Record that the response is final."""
        self.ended = True
        self._last = self.answer.last_event()
        if self.stored.events is not None:
            self.stored.events = [*self.answer.events, self._last]
        self._wake()

    async def follow(self, position: int) -> AsyncGenerator[bytes, None]:
        """Yield the events of the response from number `position` on, to the last one."""
        events = self.answer.events
        while True:
            changed = self._changed
            ended = self.ended
            if position < len(events):
                yield b"".join(events[position:])
                position = len(events)
            elif ended:
                if position == len(events):
                    yield self._last
                return
            else:
                await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class ResponseRuns:
    """The running responses of this gateway, at most `MAX_RUNS` at once."""

    def __init__(self, store: Store) -> None:
        self.store = store
        """Where responses are kept."""
        self._runs: dict[str, ResponseRun] = {}

    def get(self, response_id: str) -> ResponseRun | None:
        """The run of a response that is being generated here."""
        return self._runs.get(response_id)

    async def stored(self, owner: str, response_id: str) -> StoredResponse | None:
        """A response of this owner in its current state. Raises `StatusError` if the store is unreachable."""
        if not response_id.startswith("resp_") or len(response_id) > MAX_ID_CHARS or ":" in response_id:
            return None
        run = self._runs.get(response_id)
        if run is not None:
            return run.stored if run.stored.owner == owner else None
        try:
            found = await self._read(response_id)
            if found is None or found.owner != owner:
                return None
            if found.response.status not in ENDED and not await self.is_alive(response_id):
                # It may have ended after it was read.
                found = await self._read(response_id)
                if found is not None and found.response.status not in ENDED:
                    found.response.status = "failed"
                    lost = "the gateway that generated the response is gone"
                    found.response.error = ResponseError("server_error", lost)
            return found
        except StoreError as error:
            raise unavailable(error) from error

    async def _read(self, response_id: str) -> StoredResponse | None:
        value = await self.store.get(response_id)
        return None if value is None else await unpacked(value, StoredResponse)

    async def start(self, run: ResponseRun, generate: Callable[[ResponseRun], Awaitable[None]]) -> None:
        """Start a run. Raises `StatusError` when there are too many, or its response cannot be kept."""
        if len(self._runs) >= MAX_RUNS:
            raise StatusError(Reason.QUEUE_FULL, f"{MAX_RUNS} responses run in the background", retry_after_s=1.0)
        self._runs[run.response_id] = run
        run.answer.begin()
        try:
            await self._beat(run)
            await self.store.put(run.response_id, await packed(run.stored), owner=run.stored.owner)
        except BaseException:
            del self._runs[run.response_id]
            raise
        if run.caller.authorization is not None:
            run.holding.enter_context(run.caller.authorization.held())
        run.task = asyncio.create_task(self._run(run, generate), name=run.response_id)

    async def cancel(self, run: ResponseRun) -> None:
        """Cancel a run and wait for its end."""
        assert run.task is not None
        run.task.cancel()
        await asyncio.wait({run.task})

    async def ask_to_cancel(self, response_id: str) -> None:
        """Make another gateway cancel its run. Raises `StoreError`."""
        await self.store.put(f"{response_id}:cancel", b"1", ALIVE_S)

    async def is_alive(self, response_id: str) -> bool:
        """Whether some gateway is generating this response. Raises `StoreError`."""
        return response_id in self._runs or await self.store.get(f"{response_id}:alive") is not None

    async def drain(self, timeout_s: float) -> None:
        """Wait for the runs to end, and fail those that exceed the timeout."""
        tasks = {run.task: run for run in self._runs.values() if run.task is not None}
        if not tasks:
            return
        _, unfinished = await asyncio.wait(tasks, timeout=timeout_s)
        for task in unfinished:
            tasks[task].answer.fail(failure_of(draining()))
            task.cancel()
        if unfinished:
            await asyncio.wait(unfinished)

    async def _run(self, run: ResponseRun, generate: Callable[[ResponseRun], Awaitable[None]]) -> None:
        beating = asyncio.create_task(self._heartbeat(run))
        response = run.answer.response
        try:
            await generate(run)
        except asyncio.CancelledError:
            if response.status == "in_progress":
                response.status = "cancelled"
        except StatusError as error:
            run.answer.fail(failure_of(error))
        except Exception:
            _LOG.exception("%s failed", run.response_id)
            internal = StatusError(Reason.INTERNAL, "the gateway failed; its log has the reason")
            run.answer.fail(failure_of(internal))
        finally:
            beating.cancel()
            if not run.ended:
                run.end()
            try:
                await self.store.put(run.response_id, await packed(run.stored), owner=run.stored.owner)
            except StoreError as error:
                _LOG.warning("%s is lost: %s", run.response_id, error)
            finally:
                del self._runs[run.response_id]
                run.holding.close()

    async def _heartbeat(self, run: ResponseRun) -> None:
        """Run until cancelled: renew the run's sign of life, and check whether the run was cancelled."""
        while self.store.is_shared:
            await asyncio.sleep(HEARTBEAT_S)
            try:
                await self._beat(run)
                if await self.store.get(f"{run.response_id}:cancel") is not None and run.task is not None:
                    run.task.cancel()
            except StoreError as error:
                _LOG.debug("%s: %s", run.response_id, error)

    async def _beat(self, run: ResponseRun) -> None:
        if self.store.is_shared:
            await self.store.put(f"{run.response_id}:alive", b"1", ALIVE_S)
