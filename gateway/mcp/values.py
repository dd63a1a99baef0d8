"""The tools and results of MCP servers (pure)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CONNECTION_LOST = -32000
TIMED_OUT = -32001
INVALID_PARAMS = -32602
"""Codes of errors, as JSON-RPC and other clients of MCP have them."""


class McpError(Exception):
    """A request to an MCP server failed: by the status of HTTP, or by an error of the protocol or of the connection.
    Neither the URL nor a header is in the message, which callers see."""

    def __init__(self, message: str, code: int, *, is_http: bool = False) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        """The status of HTTP if `is_http`, else the code of JSON-RPC."""
        self.is_http = is_http


@dataclass(frozen=True, slots=True)
class McpTool:
    """A tool of a server."""

    name: str
    description: str | None = None
    input_schema: Mapping[str, Any] = field(default_factory=dict)
    annotations: Mapping[str, Any] | None = None

    @property
    def is_read_only(self) -> bool:
        """Whether the server declares that the tool changes nothing."""
        return bool((self.annotations or {}).get("readOnlyHint"))


@dataclass(frozen=True, slots=True)
class McpResult:
    """The result of a call."""

    text: str
    """What the model reads."""
    content: Sequence[Any]
    """As the server sent it."""
    is_error: bool
    """The tool ran and failed."""
