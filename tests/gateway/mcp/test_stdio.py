"""MCP servers that are programs: what they are told, and that a bad one harms nobody and is started again."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.gateway.mcp import messages, stdio
from headrace.gateway.mcp.configuration import Program
from headrace.gateway.mcp.servers import McpServers
from headrace.gateway.mcp.stdio import StdioServer
from headrace.gateway.mcp.values import CONNECTION_LOST, TIMED_OUT, McpError
from tests.patience import patience

pytestmark = pytest.mark.asyncio(loop_scope="module")
SCRIPT = Path(__file__).parents[1] / "stdio_mcp_server.py"


def program(*arguments: str) -> Program:
    return Program((sys.executable, "-E", "-S", str(SCRIPT), *arguments), {"PATH": os.environ["PATH"]}, SCRIPT.parent)


async def soon(seconds: float) -> None:
    """A wait that is over at once."""
    await asyncio.sleep(0)


@asynccontextmanager
async def running(server: StdioServer) -> AsyncIterator[StdioServer]:
    run = asyncio.create_task(server.run())
    try:
        yield server
    finally:
        run.cancel()
        await asyncio.wait({run})
        await server.close()
        assert run.cancelled()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[StdioServer]:
    """One that the tests do not harm."""
    async with running(StdioServer("calc", program(), patience(20))) as found:
        yield found


async def call(server: StdioServer, tool: str, **arguments: Any) -> str:
    result = await server.result("tools/call", {"name": tool, "arguments": arguments})
    return str(result["content"][0]["text"])


async def pid_when_ready(server: StdioServer) -> int:
    """The process that answers, once one does."""
    async with asyncio.timeout(patience(20)):
        while True:
            try:
                return int(await call(server, "pid"))
            except McpError:
                await asyncio.sleep(0.01)


def has_ended(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_tools_are_listed_and_called_by_many_at_once() -> None:
    starts: list[str] = []
    servers = McpServers({}, configured={"calc": program()}, timeout_s=patience(20), on_start=starts.append)
    assert list(servers.names) == ["calc"]
    run = asyncio.create_task(servers.run())
    sessions = servers.sessions()
    assert "add" in [tool.name for tool in await sessions.tools("calc")]
    results = await asyncio.gather(*(sessions.call("calc", "add", {"a": i, "b": 1}) for i in range(20)))
    assert [result.text for result in results] == [str(i + 1) for i in range(20)]
    pids = {(await servers.sessions().call("calc", "pid", {})).text for _ in range(2)}
    sessions.close()
    with pytest.raises(McpError, match="70000 bytes, more than 65536"):
        await sessions.call("calc", "write", {"bytes": 70_000})
    run.cancel()
    await asyncio.wait({run})
    await servers.close()
    (pid,) = pids
    assert has_ended(int(pid))
    assert starts == ["calc"]


async def test_it_gets_the_stated_environment_and_nothing_else(
    server: StdioServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HEADRACE_KEY", "secret")
    async with running(StdioServer("own", program(), patience(20))) as own:
        environment = json.loads(await call(own, "environment"))
    environment.pop("LC_CTYPE", None)  # Python's own
    assert environment == {"PATH": os.environ["PATH"]}


async def test_requests_of_a_server_are_refused_but_for_a_ping(server: StdioServer) -> None:
    pong, refusal = json.loads(await call(server, "ask"))
    assert pong == {"jsonrpc": "2.0", "id": "p", "result": {}}
    assert (refusal["id"], refusal["error"]["code"]) == (7, -32601)


async def test_an_error_of_the_protocol_has_its_code(server: StdioServer) -> None:
    with pytest.raises(McpError) as caught:
        await server.result("resources/list", {})
    assert (caught.value.message, caught.value.code, caught.value.is_http) == ("no such method", -32601, False)


async def test_lines_that_are_no_messages_are_passed_over(
    server: StdioServer, caplog: pytest.LogCaptureFixture
) -> None:
    pid = await call(server, "noise")
    assert await call(server, "pid") == pid
    assert "lines to its output that are no messages" in caplog.text
    assert "half" not in caplog.text


async def test_a_caller_that_leaves_cancels_its_call(server: StdioServer) -> None:
    before = json.loads(await call(server, "cancelled"))
    leaving = asyncio.create_task(call(server, "hang"))
    await call(server, "pid")  # the call before it has arrived
    leaving.cancel()
    await asyncio.wait({leaving})
    (told,) = json.loads(await call(server, "cancelled"))[len(before) :]
    assert isinstance(told, int)


async def test_a_call_that_is_not_answered_ends_and_the_server_goes_on() -> None:
    async with running(StdioServer("calc", program(), patience(2), sleep=soon)) as server:
        pid = await pid_when_ready(server)
        with pytest.raises(McpError, match="did not answer within") as caught:
            await call(server, "hang")
        assert caught.value.code == TIMED_OUT
        assert await pid_when_ready(server) == pid
        assert len(json.loads(await call(server, "cancelled"))) == 1


async def test_a_server_that_answers_no_ping_either_is_started_again() -> None:
    async with running(StdioServer("calc", program(), patience(0.5), sleep=soon)) as server:
        pid = await pid_when_ready(server)
        with pytest.raises(McpError, match="did not answer within"):
            await call(server, "freeze")
        assert await pid_when_ready(server) != pid
        assert has_ended(pid)


@pytest.mark.parametrize(
    ("tool", "arguments", "reason"),
    [
        ("crash", {}, "status 3"),
        ("write", {"bytes": 20_000}, "a line of its output has more than 10000 bytes"),
        ("flood", {"lines": 30}, "its output has over 20 lines that are no messages"),
    ],
)
async def test_a_server_that_breaks_fails_its_calls_and_is_started_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tool: str, arguments: Any, reason: str
) -> None:
    monkeypatch.setattr(messages, "MAX_ANSWER_BYTES", 10_000)
    monkeypatch.setattr(stdio, "MAX_STRAY_LINES", 20)
    async with running(StdioServer("calc", program(), patience(20), sleep=soon)) as server:
        pid = await pid_when_ready(server)
        other = asyncio.create_task(call(server, "hang"))
        with pytest.raises(McpError, match="ended before it answered") as caught:
            await call(server, tool, **arguments)
        assert caught.value.code == CONNECTION_LOST
        with pytest.raises(McpError, match="ended before it answered"):
            await other
        assert await pid_when_ready(server) != pid
    assert f"the MCP server calc has ended ({reason}); it is started again in 0.5 s" in caplog.text


async def test_the_waits_between_starts_grow_until_a_server_lives_long(caplog: pytest.LogCaptureFixture) -> None:
    waits: list[float] = []
    num_starts = 0

    def started(name: str) -> None:
        nonlocal num_starts
        num_starts += 1

    async def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 10:
            await asyncio.Event().wait()

    def clock() -> float:
        return stdio.STEADY_S * (num_starts >= 10)  # the tenth lives long

    missing = Program(("/nonexistent/server",), {}, SCRIPT.parent)
    async with running(StdioServer("calc", missing, 1.0, on_start=started, sleep=wait, clock=clock)) as server:
        while len(waits) < 10:
            await asyncio.sleep(0)
        assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 0.5]
        with pytest.raises(McpError, match="started again soon"):
            await server.result("tools/list", {})
    assert "it cannot be started: No such file or directory" in caplog.text


async def test_a_program_that_ends_at_its_start_is_named_and_its_words_kept_to_debug(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG, stdio.__name__)

    async def forever(seconds: float) -> None:
        await asyncio.Event().wait()

    async with running(StdioServer("calc", program("dies"), patience(20), sleep=forever)) as server:
        with pytest.raises(McpError, match="started again soon"):
            await server.result("tools/list", {})
    assert "(status 1)" in caplog.text
    (words,) = [record for record in caplog.records if "no key" in record.getMessage()]
    assert words.levelno == logging.DEBUG


async def test_a_server_that_never_begins_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stdio, "START_S", 0.01)
    ended = asyncio.Event()

    async def wait(seconds: float) -> None:
        ended.set()
        await asyncio.Event().wait()

    async with running(StdioServer("calc", program("mute"), 0.01, sleep=wait)) as server:
        with pytest.raises(McpError) as caught:
            await server.result("tools/list", {})
        assert caught.value.code in (TIMED_OUT, CONNECTION_LOST)
        await asyncio.wait_for(ended.wait(), patience(20))


async def test_one_that_ignores_its_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(StdioServer("calc", program("stubborn"), patience(20))) as server:
        pid = await pid_when_ready(server)
        monkeypatch.setattr(stdio, "END_S", 0.05)
    assert has_ended(pid)


async def test_a_second_cancellation_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    server = StdioServer("calc", program("stubborn"), patience(20))
    run = asyncio.create_task(server.run())
    pid = await pid_when_ready(server)
    monkeypatch.setattr(stdio, "END_S", 0.05)
    while not run.done():
        run.cancel()
        await asyncio.sleep(0)
    await server.close()
    assert has_ended(pid)
