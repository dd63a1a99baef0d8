"""A session with one MCP server: its tools, and calls of them. An exchange carries the requests: over HTTP (`http`), or
over the pipes of a process (`stdio`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

from headrace.gateway.mcp.values import CONNECTION_LOST, McpError, McpResult, McpTool

MAX_TOOLS = 256
MAX_PAGES = 16


class Exchange(Protocol):
    """Requests to one server, for one caller."""

    async def result(self, method: str, params: Mapping[str, Any]) -> dict[str, Any]:
        """The result of a request, within the server's time. If the task is cancelled, the server is told so. Raises
        `McpError`."""
        ...

    def close(self) -> None:
        """Make no more requests."""
        ...


class McpSession:
    """One session, for one caller."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def tools(self) -> list[McpTool]:
        """The tools of the server, on all of its pages. Raises `McpError`."""
        found: list[McpTool] = []
        params: dict[str, Any] = {}
        for _ in range(MAX_PAGES):
            result = await self._exchange.result("tools/list", params)
            tools = result.get("tools")
            found += filter(None, map(_tool_of, tools if isinstance(tools, list) else ()))
            if len(found) > MAX_TOOLS:
                raise McpError(f"the MCP server has more than {MAX_TOOLS} tools", CONNECTION_LOST)
            cursor = result.get("nextCursor")
            if not isinstance(cursor, str):
                return found
            params = {"cursor": cursor}
        raise McpError(f"the MCP server lists its tools on more than {MAX_PAGES} pages", CONNECTION_LOST)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> McpResult:
        """Call a tool. If the task is cancelled, the server is told so. Raises `McpError`."""
        result = await self._exchange.result("tools/call", {"name": name, "arguments": arguments})
        content = result.get("content")
        parts = content if isinstance(content, list) else []
        texts = [_text_of(part) for part in parts]
        if not texts and result.get("structuredContent") is not None:
            texts = [json.dumps(result["structuredContent"], ensure_ascii=False)]
        return McpResult("\n".join(texts), parts, bool(result.get("isError")))

    def close(self) -> None:
        """End the session, in the background."""
        self._exchange.close()


def _tool_of(value: Any) -> McpTool | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    description, schema, annotations = (value.get(name) for name in ("description", "inputSchema", "annotations"))
    return McpTool(
        value["name"],
        description if isinstance(description, str) else None,
        schema if isinstance(schema, dict) else {"type": "object", "properties": {}},
        annotations if isinstance(annotations, dict) else None,
    )


def _text_of(part: Any) -> str:
    """A part of a result as the model reads it."""
    if not isinstance(part, dict):
        return ""
    kind = part.get("type")
    if kind == "text" and isinstance(part.get("text"), str):
        return str(part["text"])
    resource = part.get("resource")
    if kind == "resource" and isinstance(resource, dict) and isinstance(resource.get("text"), str):
        return str(resource["text"])
    if kind == "resource_link" and isinstance(part.get("uri"), str):
        return str(part["uri"])
    return f"[{str(kind)[:32]}: omitted, because only text is read]"
