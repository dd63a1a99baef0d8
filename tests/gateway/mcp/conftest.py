"""The MCP server that the tests of this folder share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.gateway.mcp_server import McpServer, serving_mcp


@pytest.fixture(scope="module")
def served() -> Iterator[McpServer]:
    with serving_mcp() as server:
        yield server
