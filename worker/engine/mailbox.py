"""Connects the event loop and the engine thread: requests and cancellations one way, outputs the other.

    asyncio:  submit, cancel  --> [ deque, condition ] -->  take           engine thread
    asyncio:  streams  <-- one call_soon_threadsafe a step <-- deliver     engine thread

The engine thread calls the event loop once per step, however many requests the step served.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec

from headrace.protos.load_report import LoadReport
from headrace.protos.status import Reason, StatusError
from headrace.worker.engine.watchdog import end_process
from headrace.worker.kv.fetch import Bell
from headrace.worker.request.request import Request
from headrace.worker.request.step import RequestOutput

RETRY_AFTER_S = 1.0
# The maximum number of prompt log-probabilities that all requests together may store, 8 bytes each.
MAX_PROMPT_LOGPROBS_KEPT = 16 << 20
# The maximum size of the image files of all requests together. A request keeps them to its end, because it may have to
# compute its prompt again.
MAX_IMAGE_BYTES_KEPT = 1 << 30


class LearnedCost(NamedTuple):
    """The cost of one kind of steps: the milliseconds of each term of the model, and the steps that it was learned
    from."""

    terms_ms: tuple[float, ...]
    num_steps: int


class EngineReport(msgspec.Struct, frozen=True):
    """The engine's state after a step: its load, its counters (fields of the message Counters), and what changed in the
    prefix cache. `num_taken` counts the requests received so far."""

    load: LoadReport = msgspec.field(default_factory=LoadReport)
    counters: dict[str, int] = {}
    stored: Sequence[int] = ()
    evicted: Sequence[int] = ()
    num_taken: int = 0
    step_costs: dict[str, LearnedCost] = {}
    """The learned costs of steps with prompts ("prompts") and without ("decode"), once they are learned."""
    disk_changes: dict[int, bool] = {}
    """Hashes that were added to the disk (True) or removed from it."""
    state_changes: dict[int, bool] = {}
    """Hashes of blocks after which a state was saved (True) or lost."""


class Command(NamedTuple):
    """A command from the event loop to the engine thread: accept a request, or drop it if `is_cancel`."""

    request: Request
    is_cancel: bool


class OutputStream:
    """The outputs of one request, for one reader on the event loop. The request's max_tokens bounds it."""

    def __init__(self, request: Request, close: Callable[[OutputStream], None]) -> None:
        self.request = request
        self.has_ended = False
        self._close = close
        self._pending: list[RequestOutput] = []
        self._wakeup: asyncio.Future[None] | None = None

    def push(self, output: RequestOutput) -> None:
        """Add an output and wake the reader."""
        self._pending.append(output)
        self.has_ended = output.is_last
        if self._wakeup is not None and not self._wakeup.done():
            self._wakeup.set_result(None)

    async def next(self) -> list[RequestOutput]:
        """All outputs since the last call, at least one. A slow reader gets several at once."""
        if not self._pending:
            self._wakeup = asyncio.get_running_loop().create_future()
            try:
                await self._wakeup
            finally:
                self._wakeup = None
        pending, self._pending = self._pending, []
        return pending

    def close(self) -> None:
        """Stop reading. If the request has not ended, cancel it."""
        self._close(self)


class _KeptFiles:
    """Counts the bytes of the image files of open requests. A file that several requests share counts once."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._holders: Counter[int] = Counter()

    def added_by(self, request: Request) -> int:
        """How many bytes this request would add."""
        files = {id(image.data): len(image.data) for image in request.images}
        return sum(size for key, size in files.items() if key not in self._holders)

    def keep(self, request: Request) -> None:
        """Count a request until it is let go."""
        self.num_bytes += self.added_by(request)
        self._holders.update(id(image.data) for image in request.images)

    def let_go(self, request: Request) -> None:
        """Stop counting a request."""
        for image in request.images:
            key = id(image.data)
            self._holders[key] -= 1
            if not self._holders[key]:
                del self._holders[key]
                self.num_bytes -= len(image.data)


class Mailbox:
    """Connects one engine thread with one event loop, for at most `capacity` requests at a time. Calls `on_failure` if
    outputs cannot be passed on, because streams would have gaps and watchers wrong information."""

    def __init__(
        self,
        capacity: int,
        on_report: Callable[[EngineReport], None],
        on_failure: Callable[[str, BaseException], None] = end_process,
        bell: Bell | None = None,
    ) -> None:
        """`bell` wakes the engine thread. Others, such as the tiers of its cache, may ring it too."""
        self._on_failure = on_failure
        self._capacity = capacity
        self._on_report = on_report
        self._loop = asyncio.get_running_loop()
        self._streams: dict[Request, OutputStream] = {}
        self._expected: set[Request] = set()
        self._num_prompt_logprobs = 0
        self._images = _KeptFiles()
        self._empty = asyncio.Event()
        self._empty.set()
        self._commands: deque[Command] = deque()
        self._bell = Bell() if bell is None else bell
        self._arrived = self._bell.changed
        self._stopping = False

    @property
    def num_open(self) -> int:
        """Requests that are expected or have not ended."""
        return len(self._streams) + len(self._expected)

    @property
    def is_stopped(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping

    @contextlib.contextmanager
    def expecting(self, request: Request) -> Iterator[None]:
        """Context manager: count a request as open while it is prepared for the engine, until `submit` or the end of
        the block. StatusError QUEUE_FULL as in `submit`."""
        self._refuse_if_full(request)
        self._expected.add(request)
        self._empty.clear()
        try:
            yield
        finally:
            self._expected.discard(request)
            self._note_if_empty()

    def submit(self, request: Request) -> OutputStream:
        """Hand a request to the engine. StatusError QUEUE_FULL if there are too many already, unless the request is
        expected or resumed."""
        if request not in self._expected:
            self._refuse_if_full(request)
        num_logprobs = request.num_prompt_logprob_values
        if num_logprobs and self._num_prompt_logprobs + num_logprobs > MAX_PROMPT_LOGPROBS_KEPT:
            raise StatusError(
                Reason.QUEUE_FULL,
                f"the worker stores {self._num_prompt_logprobs} log-probabilities of prompts, and the request adds "
                f"{num_logprobs}; the limit is {MAX_PROMPT_LOGPROBS_KEPT}; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        if self._images.num_bytes + self._images.added_by(request) > MAX_IMAGE_BYTES_KEPT and not request.is_resumed:
            raise StatusError(
                Reason.QUEUE_FULL,
                f"the worker keeps {self._images.num_bytes >> 20} MiB of images for its requests; try again later",
                retry_after_s=RETRY_AFTER_S,
            )
        self._num_prompt_logprobs += num_logprobs
        self._images.keep(request)
        self._expected.discard(request)
        stream = self._streams[request] = OutputStream(request, self._closed)
        self._empty.clear()
        self._send(Command(request, is_cancel=False))
        return stream

    async def wait_until_empty(self, timeout_s: float | None) -> bool:
        """Wait until no request is left, for at most `timeout_s`. Returns whether none is left."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()
        except TimeoutError:
            return False
        return True

    def stop(self) -> None:
        """Make `take` return None from now on."""
        with self._arrived:
            self._stopping = True
            self._arrived.notify()

    def take(self, *, block: bool, timeout_s: float | None = None) -> list[Command] | None:
        """Engine thread: the commands since the last call. With `block`, wait for one, for at most `timeout_s`, or
        until the bell rings. None means stop."""
        with self._arrived:
            if block:
                self._arrived.wait_for(lambda: self._commands or self._stopping or self._bell.has_rung, timeout_s)
            self._bell.has_rung = False
            if self._stopping:
                return None
            commands = list(self._commands)
            self._commands.clear()
            return commands

    def deliver(self, outputs: Sequence[RequestOutput], report: EngineReport | None) -> None:
        """Engine thread: pass outputs and the state after a step to the event loop."""
        self._loop.call_soon_threadsafe(self._arrive, outputs, report)

    def _arrive(self, outputs: Sequence[RequestOutput], report: EngineReport | None) -> None:
        try:
            for output in outputs:
                stream = self._streams.get(output.request)
                if stream is not None:
                    stream.push(output)
            if report is not None:
                self._on_report(report)
        except Exception as error:
            self._on_failure("the engine's outputs could not be passed on", error)

    def _refuse_if_full(self, request: Request) -> None:
        if self.num_open >= self._capacity and not request.is_resumed:
            raise StatusError(
                Reason.QUEUE_FULL,
                f"the worker has {self.num_open} requests already, which is its limit; try again later",
                retry_after_s=RETRY_AFTER_S,
            )

    def _note_if_empty(self) -> None:
        if not self.num_open:
            self._empty.set()

    def _send(self, command: Command) -> None:
        with self._arrived:
            self._commands.append(command)
            self._arrived.notify()

    def _closed(self, stream: OutputStream) -> None:
        if self._streams.pop(stream.request, None) is None:
            return
        self._num_prompt_logprobs -= stream.request.num_prompt_logprob_values
        self._images.let_go(stream.request)
        self._note_if_empty()
        if not stream.has_ended:
            self._send(Command(stream.request, is_cancel=True))
