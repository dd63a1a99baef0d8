"""A model calls a tool of an MCP server through `headrace serve`: flags, keys of the operator, real processes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.e2e.serving import Serve, pulled_model
from tests.gateway.mcp_server import ADD, McpServer, serving_mcp
from tests.patience import patience

pytestmark = pytest.mark.e2e
PROGRAM = Path(__file__).parents[1] / "gateway" / "stdio_mcp_server.py"
DIGIT = {"type": "integer", "minimum": 0, "maximum": 9}
SUM = {**ADD, "inputSchema": {**ADD["inputSchema"], "properties": {"a": DIGIT, "b": DIGIT}}}
ASKED: dict[str, Any] = {
    "input": "What is 2 + 3? Call add.",
    "tools": [{"type": "mcp", "server_label": "sums", "require_approval": "never", "allowed_tools": ["add"]}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 160,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def served() -> Iterator[McpServer]:
    with serving_mcp() as server:
        server.tools = [SUM, *server.tools[1:]]
        yield server


@pytest.fixture(scope="module")
def client(served: McpServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """OpenAI's client of the demo model, whose server calls `served`."""
    headers = tmp_path_factory.mktemp("mcp") / "headers.json"
    headers.write_text(json.dumps({"sums": {"Authorization": "Bearer of-the-operator"}}))
    config = headers.with_name("mcp.json")
    config.write_text(json.dumps({"mcpServers": {"local": {"command": sys.executable, "args": [str(PROGRAM)]}}}))
    options = ("--port", "0", "--kv-cache-gb", "0.5", "--mcp-server", f"sums={served.url}")
    serve = Serve(str(pulled_model()), *options, "--mcp-headers", str(headers), "--mcp-config", str(config))
    try:
        serve.until_ready()
        with openai.OpenAI(
            base_url=f"{serve.base_url}/v1", api_key="none", max_retries=0, timeout=patience(60)
        ) as found:
            yield found
        assert "of-the-operator" not in "".join(serve.logs)
    finally:
        serve.end()


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_calls_a_tool_and_goes_on(client: openai.OpenAI, served: McpServer, stream: bool) -> None:
    served.seen.clear()
    model = client.models.list().data[0].id
    if stream:
        events = list(client.responses.create(model=model, stream=True, **ASKED))
        answer = events[-1].response  # type: ignore[union-attr]
        assert "response.mcp_call.completed" in [event.type for event in events]
    else:
        answer = client.responses.create(model=model, **ASKED)
    assert answer.status in ("completed", "incomplete")
    listed, call, *_ = answer.output
    assert (listed.type, call.type) == ("mcp_list_tools", "mcp_call")
    arguments = json.loads(call.arguments)
    assert call.output == str(arguments["a"] + arguments["b"])
    (made,) = served.sent("tools/call")[:1]
    assert made["params"] == {"name": "add", "arguments": arguments}
    assert {headers["authorization"] for *_, headers in served.seen} == {"Bearer of-the-operator"}
    assert answer.usage.input_tokens > 0


def test_a_model_calls_a_tool_of_a_program(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    answer = client.responses.create(model=model, **ASKED | {"tools": [{**ASKED["tools"][0], "server_label": "local"}]})
    listed, call, *_ = answer.output
    assert (listed.type, call.type) == ("mcp_list_tools", "mcp_call")
    arguments = json.loads(call.arguments)
    assert call.output == str(arguments["a"] + arguments["b"])
