"""Messages of JSON-RPC as MCP has them, whatever carries them (pure).
https://modelcontextprotocol.io/specification/2025-06-18/basic
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from headrace.common.version import headrace_version
from headrace.gateway.mcp.values import CONNECTION_LOST, McpError

VERSIONS = ("2025-06-18", "2025-11-25", "2025-03-26")
"""Versions of the protocol that are spoken; the first is asked for."""
MAX_ANSWER_BYTES = 4 * 1024 * 1024
METHOD_NOT_FOUND = -32601
INITIALIZED = {"jsonrpc": "2.0", "method": "notifications/initialized"}
_MAX_TEXT_CHARS = 1000


def first_params() -> dict[str, Any]:
    """The parameters of `initialize`."""
    client = {"name": "headrace", "version": headrace_version()}
    return {"protocolVersion": VERSIONS[0], "capabilities": {}, "clientInfo": client}


def version_in(result: Mapping[str, Any]) -> str:
    """The version that the result of `initialize` agrees on. Raises `McpError`."""
    version = result.get("protocolVersion")
    if version not in VERSIONS:
        raise McpError(f"the MCP server speaks none of the versions {', '.join(VERSIONS)}", CONNECTION_LOST)
    return str(version)


def cancellation_of(request_id: int) -> dict[str, Any]:
    """The message that tells a server to cancel a request."""
    reason = {"requestId": request_id, "reason": "the caller does not wait any more"}
    return {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": reason}


def message_in(data: bytes) -> dict[str, Any]:
    """The message in these bytes. Raises `McpError`."""
    try:
        message = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise McpError("the MCP server's answer is no message of JSON-RPC", CONNECTION_LOST)
    return message


def result_in(message: Mapping[str, Any]) -> dict[str, Any]:
    """The result in an answer. Raises `McpError`, also for an error that it has."""
    error = message.get("error")
    if isinstance(error, dict):
        code, text = error.get("code"), error.get("message")
        raise McpError(
            text[:_MAX_TEXT_CHARS] if isinstance(text, str) else "the MCP server refused the request",
            code if isinstance(code, int) else CONNECTION_LOST,
        )
    result = message.get("result")
    if not isinstance(result, dict):
        raise McpError("the MCP server's answer has no result", CONNECTION_LOST)
    return result


def refusal_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to a request of the server. This client has no abilities that a server could ask for."""
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request["id"]}
    if request["method"] == "ping":
        return {**answer, "result": {}}
    return {**answer, "error": {"code": METHOD_NOT_FOUND, "message": "the client has no such method"}}
