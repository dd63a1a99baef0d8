"""Servers of the package `mcp`, which others write theirs with. They run in the environment of the clients."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.common.tasks import end_tasks
from headrace.gateway.mcp.configuration import read_configuration
from headrace.gateway.mcp.servers import McpServers
from tests.patience import patience, until
from tests.ports import free_port

pytestmark = pytest.mark.asyncio(loop_scope="module")
ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".make" / "clients" / "bin" / "python"
SCRIPT = ROOT / "tests" / "e2e" / "clients" / "mcp_server.py"


@pytest.fixture(scope="module", params=["json", "events", "stateless"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    """The URL of a server that answers in this form."""
    if not PYTHON.exists():
        pytest.skip("the clients are not installed: make test")
    port = free_port()
    process = subprocess.Popen([PYTHON, SCRIPT, str(port), request.param], stderr=subprocess.DEVNULL)
    found = f"http://127.0.0.1:{port}/mcp"

    def answers() -> bool:
        assert process.poll() is None, "the server has ended"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        until(answers, "the server answers", 30)
        yield found
    finally:
        process.kill()
        process.wait()


async def test_its_tools_are_listed_and_called(url: str) -> None:
    servers = McpServers({"sums": url})
    await call_everything(servers)
    await servers.close()


async def test_so_are_those_of_a_program(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("the clients are not installed: make test")
    file = tmp_path / "mcp.json"
    file.write_text(json.dumps({"mcpServers": {"sums": {"command": str(PYTHON), "args": [str(SCRIPT), "stdio"]}}}))
    servers = McpServers({}, configured=read_configuration(file), timeout_s=patience(30))
    run = asyncio.create_task(servers.run())
    await call_everything(servers)
    await end_tasks(run)
    await servers.close()


async def call_everything(servers: McpServers) -> None:
    sessions = servers.sessions()
    tools = {tool.name: tool for tool in await sessions.tools("sums")}
    assert sorted(tools) == ["add", "fail", "tell"]
    assert tools["add"].description == "Add two numbers."
    assert sorted(tools["add"].input_schema["properties"]) == ["a", "b"]
    assert tools["add"].is_read_only
    assert (await sessions.call("sums", "add", {"a": 1, "b": 2})).text == "3"
    assert (await sessions.call("sums", "tell", {})).text == "told"
    failed = await sessions.call("sums", "fail", {})
    assert failed.is_error
    assert "it broke" in failed.text or "fail" in failed.text
    assert (await sessions.call("sums", "add", {"a": "x"})).is_error
    sessions.close()
