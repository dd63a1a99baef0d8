"""Sessions with a real MCP server over HTTP: what is asked, in which form answers come, and every bound."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.gateway.mcp import messages, session
from headrace.gateway.mcp.servers import McpServers
from headrace.gateway.mcp.values import CONNECTION_LOST, TIMED_OUT, McpError
from tests.gateway.mcp_server import ADD, McpServer
from tests.patience import patience, until

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def _fresh(served: McpServer) -> None:
    served.reset()


@pytest_asyncio.fixture(loop_scope="module")
async def servers(served: McpServer) -> AsyncIterator[McpServers]:
    found = McpServers({"calc": served.url})
    yield found
    await found.close()


@pytest.fixture(params=["json", "events", "events with requests"])
def form(served: McpServer, request: Any) -> str:
    """The form of answers."""
    served.events, served.pings = request.param != "json", request.param == "events with requests"
    return str(request.param)


async def test_a_session_begins_lists_calls_and_ends(servers: McpServers, served: McpServer, form: str) -> None:
    sessions = servers.sessions()
    tools = await sessions.tools("calc")
    assert [tool.name for tool in tools] == ["add", "fail", "slow", "say"]
    assert (tools[0].description, tools[0].input_schema, tools[0].is_read_only) == (
        ADD["description"],
        ADD["inputSchema"],
        True,
    )
    assert not tools[1].is_read_only
    assert (await sessions.call("calc", "add", {"a": 1, "b": 2})).text == "3"
    sessions.close()
    await servers.close()
    asked = [method for method in served.methods() if method != "answer"]
    assert asked == ["initialize", "notifications/initialized", "tools/list", "tools/call"]
    assert served.methods().count("answer") == (3 if served.pings else 0)
    assert served.seen[0][1]["params"]["capabilities"] == {}
    ids = {headers.get("mcp-session-id") for *_, headers in served.seen if headers.get("mcp-protocol-version")}
    assert len(ids) == 1
    assert None not in ids
    of_list = next(headers for _, message, headers in served.seen if message.get("method") == "tools/list")
    assert of_list["mcp-protocol-version"] == "2025-06-18"
    assert served.seen[-1][0] == "DELETE"
    assert served.open == set()


async def test_the_answers_to_requests_of_a_server_refuse_all_but_a_ping(
    servers: McpServers, served: McpServer
) -> None:
    served.events = served.pings = True
    await servers.sessions().tools("calc")
    answers = [message for _, message, _ in served.seen if "method" not in message and "id" in message]
    assert answers
    assert all(answer == {"jsonrpc": "2.0", "id": "p", "result": {}} for answer in answers)
    assert messages.refusal_of({"id": 1, "method": "sampling/createMessage"})["error"]["code"] == -32601


async def test_each_caller_has_a_session_of_its_own(servers: McpServers, served: McpServer) -> None:
    served.headers = {"Set-Cookie": "who=me"}
    first, second = servers.sessions(), servers.sessions()
    await first.tools("calc")
    await second.tools("calc")
    assert len(served.open) == 2
    assert all("cookie" not in headers for *_, headers in served.seen)


async def test_a_server_without_sessions_is_called_too(servers: McpServers, served: McpServer) -> None:
    served.has_sessions = False
    sessions = servers.sessions()
    assert (await sessions.call("calc", "add", {"a": 1, "b": 2})).text == "3"
    sessions.close()
    await servers.close()
    assert "DELETE" not in [kind for kind, *_ in served.seen]


async def test_a_session_that_the_server_has_forgotten_begins_anew(servers: McpServers, served: McpServer) -> None:
    sessions = servers.sessions()
    await sessions.tools("calc")
    served.open.clear()
    with pytest.raises(McpError, match="status 404"):
        await sessions.call("calc", "add", {"a": 1, "b": 2})
    assert (await sessions.call("calc", "add", {"a": 1, "b": 2})).text == "3"


async def test_tools_come_in_pages(servers: McpServers, served: McpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    served.page = 1
    assert len(await servers.sessions().tools("calc")) == 4
    monkeypatch.setattr(session, "MAX_PAGES", 3)
    with pytest.raises(McpError, match="more than 3 pages"):
        await servers.sessions().tools("calc")
    monkeypatch.setattr(session, "MAX_TOOLS", 2)
    with pytest.raises(McpError, match="more than 2 tools"):
        await servers.sessions().tools("calc")


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("parts", "one é😀\n[image: omitted, because only text is read]\ntwo\nfile:///b"),
        ("structured", '{"x": 1}'),
        ("nothing", ""),
    ],
)
async def test_results_become_text(servers: McpServers, kind: str, text: str) -> None:
    assert (await servers.sessions().call("calc", "say", {"kind": kind})).text == text


async def test_a_tool_that_fails_is_a_result(servers: McpServers) -> None:
    result = await servers.sessions().call("calc", "fail", {})
    assert (result.is_error, result.text) == (True, "it broke")


async def test_an_error_of_the_protocol_has_its_code(servers: McpServers) -> None:
    with pytest.raises(McpError) as caught:
        await servers.sessions().call("calc", "add", {})
    assert (caught.value.message, caught.value.code, caught.value.is_http) == ("a is required", -32602, False)


async def test_too_much_output_is_an_error(served: McpServer) -> None:
    outcomes: list[tuple[str, str]] = []
    servers = McpServers({"calc": served.url}, on_call=lambda name, outcome, _: outcomes.append((name, outcome)))
    with pytest.raises(McpError, match="70000 bytes, more than 65536"):
        await servers.sessions().call("calc", "say", {"kind": "much"})
    await servers.sessions().call("calc", "fail", {})
    await servers.sessions().call("calc", "say", {"kind": "nothing"})
    assert outcomes == [("calc", "failed"), ("calc", "tool_error"), ("calc", "ok")]
    larger = McpServers({"calc": served.url}, output_kb=70)
    assert len((await larger.sessions().call("calc", "say", {"kind": "much"})).text) == 70_000
    await servers.close()
    await larger.close()


@pytest.mark.parametrize(
    ("changes", "problem", "code"),
    [
        ({"status": 307, "headers": {"Location": "http://127.0.0.1:1/"}}, "redirects", 307),
        ({"status": 401}, "status 401", 401),
        ({"body": b"[1]"}, "no message of JSON-RPC", CONNECTION_LOST),
        ({"body": b"{"}, "no message of JSON-RPC", CONNECTION_LOST),
        ({"body": b'{"jsonrpc": "2.0", "id": 99, "result": {}}'}, "no result", CONNECTION_LOST),
        ({"body": b'{"jsonrpc": "2.0", "id": 1}'}, "no result", CONNECTION_LOST),
        ({"headers": {"Content-Type": "text/html"}}, "neither with JSON nor with events", CONNECTION_LOST),
        ({"headers": {"Content-Encoding": "gzip"}}, "compressed", CONNECTION_LOST),
        ({"version": "1999-01-01"}, "none of the versions", CONNECTION_LOST),
    ],
)
async def test_answers_that_are_none_are_errors(
    servers: McpServers, served: McpServer, changes: Any, problem: str, code: int
) -> None:
    for name, value in changes.items():
        setattr(served, name, value)
    with pytest.raises(McpError, match=problem) as caught:
        await servers.sessions().tools("calc")
    assert (caught.value.code, caught.value.is_http) == (code, code > 0)
    assert served.url not in caught.value.message


async def test_an_answer_without_an_end_is_bounded(
    servers: McpServers, served: McpServer, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    monkeypatch.setattr(messages, "MAX_ANSWER_BYTES", 300)
    with pytest.raises(McpError, match="more than 300 bytes"):
        await servers.sessions().tools("calc")


async def test_a_server_that_is_gone_is_an_error() -> None:
    servers = McpServers({"calc": "http://127.0.0.1:1/mcp"})
    with pytest.raises(McpError, match="cannot be reached") as caught:
        await servers.sessions().tools("calc")
    assert caught.value.code == CONNECTION_LOST
    await servers.close()


async def test_a_call_that_takes_too_long_is_cancelled(served: McpServer) -> None:
    servers = McpServers({"calc": served.url}, timeout_s=patience(1))
    sessions = servers.sessions()
    await sessions.tools("calc")
    with pytest.raises(McpError, match="did not answer within") as caught:
        await sessions.call("calc", "slow", {})
    assert caught.value.code == TIMED_OUT
    await asyncio.to_thread(until, served.cancelled.is_set, "the server is told", 5)
    (told,) = served.sent("notifications/cancelled")
    assert told["params"]["requestId"] == served.sent("tools/call")[0]["id"]
    await servers.close()


async def test_a_caller_that_leaves_cancels_its_call_and_ends_its_session(
    servers: McpServers, served: McpServer
) -> None:
    sessions = servers.sessions()
    call = asyncio.create_task(sessions.call("calc", "slow", {}))
    await asyncio.to_thread(until, served.called_slow.is_set, "the call arrives", 5)
    call.cancel()
    await asyncio.wait({call})
    sessions.close()
    await asyncio.to_thread(until, lambda: not served.open, "the session ends", 5)
    assert served.cancelled.is_set()
    assert served.open == set()


# --- the operator's list --------------------------------------------------------------------------------------------


async def test_headers_come_from_the_file_and_change_with_it(served: McpServer, tmp_path: Path) -> None:
    file = tmp_path / "headers.json"
    file.write_text(json.dumps({"calc": {"Authorization": "Bearer one"}}))
    servers = McpServers({"calc": served.url, "other": served.url}, headers=file)
    await servers.sessions().tools("calc")
    assert {headers.get("authorization") for *_, headers in served.seen} == {"Bearer one"}
    served.seen.clear()
    await servers.sessions().tools("other")
    assert {headers.get("authorization") for *_, headers in served.seen} == {None}
    file.write_text(json.dumps({"calc": {"Authorization": "Bearer two"}}))
    os.utime(file, ns=(1, 1))
    assert servers._file is not None
    servers._file._watched._looked_at_s = 0.0
    served.seen.clear()
    await servers.sessions().tools("calc")
    assert {headers.get("authorization") for *_, headers in served.seen} == {"Bearer two"}
    file.write_text("Bearer three")
    servers._file._watched._looked_at_s = 0.0
    served.seen.clear()
    await servers.sessions().tools("calc")
    assert {headers.get("authorization") for *_, headers in served.seen} == {"Bearer two"}
    await servers.close()
