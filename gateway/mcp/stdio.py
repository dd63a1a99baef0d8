"""MCP servers that are programs: the gateway starts each once, speaks with it over its standard input and output, and
starts it again when it ends. https://modelcontextprotocol.io/specification/2025-06-18/basic/transports#stdio

    start -> initialize -> ready: requests of all callers, told apart by their ids -> end -> wait -> start ...

Each message is a line of JSON. All callers share the process, and so its state. The command is the operator's; what it
inherits is stated in `configuration`. Its standard error goes to the log at level DEBUG, because it may have what
callers wrote.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec

from headrace.common.tasks import end_tasks
from headrace.gateway.mcp import messages
from headrace.gateway.mcp.configuration import Program
from headrace.gateway.mcp.values import CONNECTION_LOST, TIMED_OUT, McpError

START_S = 60.0
"""Time until a server has answered `initialize`: its packages may have to be fetched."""
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 60.0
STEADY_S = 60.0
"""A server that has lived this long is started again without a growing wait."""
END_S = 2.0
"""Time to end after its input is closed, and again after SIGTERM."""
MAX_STRAY_LINES = 1000
"""Lines on a process's standard output that are not messages."""
_MAX_LOGGED_CHARS = 500
_LOG = logging.getLogger(__name__)


class _BrokenError(Exception):
    """A process cannot be spoken with any more. The text says why, for the log."""


class StdioServer:
    """One program, while `run` runs."""

    def __init__(
        self,
        name: str,
        program: Program,
        timeout_s: float,
        *,
        on_start: Callable[[str], None] = lambda name: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """`timeout_s` is for each answer. `on_start` is told of each start."""
        self.name = name
        self._program = program
        self._timeout_s = timeout_s
        self._on_start = on_start
        self._clock = clock
        self._sleep = sleep
        self._pipes: _Pipes | None = None
        self._changed = asyncio.Event()
        self._waits = False
        """Whether it has ended and its next start is not due."""
        self._ending: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Start the program, and again when it ends, until this is cancelled."""
        num_ends = 0
        while True:
            begun_s = self._clock()
            reason = await self._live()
            num_ends = 1 if self._clock() - begun_s >= STEADY_S else num_ends + 1
            wait_s = min(FIRST_WAIT_S * 2.0 ** min(num_ends - 1, 16), LONGEST_WAIT_S)
            _LOG.warning("the MCP server %s has ended (%s); it is started again in %g s", self.name, reason, wait_s)
            self._become(None, waits=True)
            await self._sleep(wait_s)
            self._become(None, waits=False)

    async def close(self) -> None:
        """Wait until the program has ended. `run` must have been cancelled."""
        if self._ending is not None:
            await self._ending

    async def result(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request. If the task is cancelled, the server is told so. Raises `McpError`."""
        timeout = asyncio.timeout(self._timeout_s)
        pipes: _Pipes | None = None
        try:
            async with timeout:
                pipes = await self._ready()
                return await pipes.result(method, params)
        except TimeoutError:
            if not timeout.expired():
                raise
            if pipes is None:
                raise McpError("the MCP server is being started and is not ready yet", TIMED_OUT) from None
            pipes.probe(self._timeout_s)
            raise McpError(f"the MCP server did not answer within {self._timeout_s:g} s", TIMED_OUT) from None

    def exchange(self) -> StdioExchange:
        """The requests of one caller."""
        return StdioExchange(self)

    async def _ready(self) -> _Pipes:
        """Wait until the process accepts requests. Returns its pipes."""
        while self._pipes is None:
            if self._waits:
                raise McpError("the MCP server has ended, and is started again soon", CONNECTION_LOST)
            await self._changed.wait()
        return self._pipes

    def _become(self, pipes: _Pipes | None, *, waits: bool) -> None:
        self._pipes, self._waits = pipes, waits
        self._changed.set()
        self._changed = asyncio.Event()

    async def _live(self) -> str:
        """Run the program once, until it ends. Returns the reason."""
        program = self._program
        self._on_start(self.name)
        try:
            process = await asyncio.create_subprocess_exec(
                *program.argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=program.environment,
                cwd=str(program.folder),
                limit=messages.MAX_ANSWER_BYTES,
                start_new_session=True,  # so that a Ctrl-C of the gateway's terminal does not end it first
            )
        except OSError as error:
            return f"it cannot be started: {error.strerror}"
        pipes = _Pipes(self.name, process)
        reading = asyncio.create_task(pipes.read())
        logging_ = asyncio.create_task(_log_lines(self.name, process.stderr))
        serving = asyncio.create_task(self._serve(pipes))
        try:
            await asyncio.wait({reading, serving}, return_when=asyncio.FIRST_COMPLETED)
            ended = serving if serving.done() else reading
            failure = ended.exception()
            if failure is not None and not isinstance(failure, _BrokenError | McpError):
                raise failure
            if failure is None:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(process.wait(), END_S)
                return "it closed its output" if process.returncode is None else _ending_of(process.returncode)
            return str(failure)
        finally:
            self._become(None, waits=False)
            pipes.fail(McpError("the MCP server ended before it answered", CONNECTION_LOST))
            for task in (reading, serving, logging_):
                task.cancel()
            # A task may be cancelled again while it ends, but the process must end.
            self._ending = asyncio.create_task(_end(process))
            await asyncio.shield(self._ending)
            await end_tasks(reading, serving, logging_)

    async def _serve(self, pipes: _Pipes) -> None:
        """Initialize the session, and serve requests until the process stops answering."""
        try:
            async with asyncio.timeout(START_S):
                messages.version_in(await pipes.result("initialize", messages.first_params()))
        except TimeoutError:
            raise _BrokenError(f"it did not answer within {START_S:g} s of its start") from None
        await pipes.send(messages.INITIALIZED)
        self._become(pipes, waits=False)
        await pipes.silent.wait()
        raise _BrokenError("it answers neither requests nor pings")


class StdioExchange:
    """See `session.Exchange`."""

    def __init__(self, server: StdioServer) -> None:
        self.result = server.result

    def close(self) -> None:
        """See `session.Exchange`. The process keeps running."""


class _Pipes:
    """Messages to and from one process."""

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._name = name
        self._input, self._output = process.stdin, process.stdout
        self._last_id = 0
        self._pending: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._probe: asyncio.Task[None] | None = None
        self.silent = asyncio.Event()
        """Set when it has not answered a ping."""

    async def result(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request, whenever it comes. Raises `McpError`."""
        self._last_id += 1
        request_id = self._last_id
        answer = self._pending[request_id] = asyncio.get_running_loop().create_future()
        try:
            await self.send({"jsonrpc": "2.0", "id": request_id, "method": method, "params": params})
            return messages.result_in(await answer)
        except asyncio.CancelledError:
            if method not in ("initialize", "ping"):
                with contextlib.suppress(McpError):
                    self._write(messages.cancellation_of(request_id))
            raise
        finally:
            del self._pending[request_id]

    async def send(self, message: Mapping[str, Any]) -> None:
        """Send a message. Raises `McpError` if the server is gone, or does not read what it is sent."""
        self._write(message)
        try:
            await self._input.drain()
        except OSError:
            raise McpError("the MCP server has ended", CONNECTION_LOST) from None

    async def read(self) -> None:
        """Give answers to those who wait for them, until the output ends. Raises `_BrokenError`."""
        num_stray = 0
        while True:
            try:
                line = await self._output.readuntil()
            except asyncio.IncompleteReadError:
                return
            except asyncio.LimitOverrunError:
                raise _BrokenError(f"a line of its output has more than {messages.MAX_ANSWER_BYTES} bytes") from None
            try:
                message = messages.message_in(line)
            except McpError:
                num_stray += bool(line.strip())
                if num_stray == 1:
                    _LOG.warning("the MCP server %s writes lines to its output that are no messages", self._name)
                if num_stray > MAX_STRAY_LINES:
                    raise _BrokenError(f"its output has over {MAX_STRAY_LINES} lines that are no messages") from None
                continue
            await self._take(message)

    def fail(self, error: McpError) -> None:
        """End all open requests with this error."""
        for answer in self._pending.values():
            if not answer.done():
                answer.set_exception(error)
        if self._probe is not None:
            self._probe.cancel()

    def probe(self, timeout_s: float) -> None:
        """Ping the server, unless a ping is under way. Sets `silent` if no answer arrives within this time."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._ping(timeout_s))

    async def _ping(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await self.result("ping", {})
        except TimeoutError:
            self.silent.set()
        except McpError:
            pass  # an error is an answer, and an end is noticed elsewhere

    async def _take(self, message: dict[str, Any]) -> None:
        if "method" not in message:
            request_id = message.get("id")
            answer = self._pending.get(request_id) if isinstance(request_id, int) else None
            if answer is not None and not answer.done():
                answer.set_result(message)
        elif "id" in message:
            with contextlib.suppress(McpError):
                await self.send(messages.refusal_of(message))

    def _write(self, message: Mapping[str, Any]) -> None:
        if self._input.is_closing():
            raise McpError("the MCP server has ended", CONNECTION_LOST)
        if self._input.transport.get_write_buffer_size() > messages.MAX_ANSWER_BYTES:
            raise McpError("the MCP server does not read its input", CONNECTION_LOST)
        self._input.write(msgspec.json.encode(message) + b"\n")


async def _log_lines(name: str, lines: asyncio.StreamReader | None) -> None:
    """Log what a process writes to its standard error."""
    assert lines is not None
    while part := await lines.read(1 << 16):
        if _LOG.isEnabledFor(logging.DEBUG):
            for line in part.decode(errors="replace").splitlines():
                _LOG.debug("MCP server %s: %s", name, line[:_MAX_LOGGED_CHARS])


async def _end(process: asyncio.subprocess.Process) -> None:
    """End a process and its children, which may be the server itself: first with SIGTERM, then with SIGKILL."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdin.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(process.wait(), END_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
    await process.wait()
    for pipe in (process.stdout, process.stderr):
        # One that has more than its limit was paused, and is closed only when it is read to its end.
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pipe.read(), END_S)


def _ending_of(returncode: int) -> str:
    return f"signal {-returncode}" if returncode < 0 else f"status {returncode}"
