"""Tools of type `mcp`: which servers of the operator's list a response offers to the model, which of their tools, and
which calls its caller must approve (pure).

The caller names a server by its label and brings neither a URL nor a key: the gateway calls only what the operator has
named, so that nobody makes it call other hosts or read what its network can.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.gateway.checks import MAX_ECHO_CHARS, invalid, text_in, unsupported
from headrace.gateway.hints import ignored
from headrace.gateway.mcp.values import McpTool
from headrace.gateway.responses.tools import MCP, CallName

_NAME = re.compile(r"[a-zA-Z0-9_.-]{1,128}")
# Fields of the caller by which other servers find or enter an MCP server.
_OF_OPERATOR = {
    "server_url": "the server calls only MCP servers that its operator has named with --mcp-server",
    "connector_id": "the server calls only MCP servers that its operator has named with --mcp-server",
    "tunnel_id": "the server calls only MCP servers that its operator has named with --mcp-server",
    "headers": "the operator gives the headers of MCP servers with --mcp-headers",
    "authorization": "the operator gives the keys of MCP servers with --mcp-headers",
}


@dataclass(frozen=True, slots=True)
class _Filter:
    """Some of the tools of a server."""

    names: Collection[str] | None = None
    read_only: bool | None = None

    def has(self, tool: McpTool) -> bool:
        return (self.names is None or tool.name in self.names) and self.read_only in (None, tool.is_read_only)


@dataclass(frozen=True, slots=True)
class McpOffer:
    """A server whose tools a response offers."""

    label: str
    place: str
    """Where the caller wrote it."""
    allowed: _Filter
    never: _Filter | None
    """The tools whose calls need no approval; None: all need it."""

    def offered(self, tools: Sequence[McpTool]) -> list[McpTool]:
        """The tools of the server that are offered to the model."""
        kept = [tool for tool in tools if self.allowed.has(tool)]
        # Models can be told of no others.
        return [tool for tool in kept if _NAME.fullmatch(CallName(self.label, tool.name).known)]

    def needs_approval(self, tool: McpTool) -> bool:
        """Whether the caller must approve a call of this tool."""
        return self.never is None or not self.never.has(tool)


def mcp_offers(tools: Sequence[Mapping[str, Any]], servers: Collection[str]) -> list[McpOffer]:
    """The servers that a request offers, of those that the operator has named. Raises `StatusError`."""
    offers: list[McpOffer] = []
    for position, tool in enumerate(tools):
        if tool.get("type") == MCP:
            offer = _offer(f"tools[{position}]", tool, servers)
            if offer.label in {other.label for other in offers}:
                where = f"{offer.place}.server_label"
                raise invalid(where, f"{where}: there are two MCP servers with the label '{offer.label}'")
            offers.append(offer)
    return offers


def listed_in(items: Sequence[Mapping[str, Any]]) -> dict[str, list[McpTool]]:
    """The tools of servers that the items of a conversation list, by label; the last list counts."""
    found: dict[str, list[McpTool]] = {}
    for item in items:
        label, tools = item.get("server_label"), item.get("tools")
        if item["type"] == "mcp_list_tools" and isinstance(label, str) and isinstance(tools, list):
            found[label] = [
                McpTool(
                    tool["name"],
                    text if isinstance(text := tool.get("description"), str) else None,
                    schema if isinstance(schema := tool.get("input_schema"), dict) else {},
                    about if isinstance(about := tool.get("annotations"), dict) else None,
                )
                for tool in tools
                if isinstance(tool, dict) and isinstance(tool.get("name"), str)
            ]
    return found


def _offer(where: str, tool: Mapping[str, Any], servers: Collection[str]) -> McpOffer:
    named = ", ".join(sorted(servers)) or "none"
    for name, why in _OF_OPERATOR.items():
        if tool.get(name) is not None:
            field = f"{where}.{name}"
            raise unsupported(
                field, f"{field} is not taken: {why}; leave it out, and give the server_label of one: {named}"
            )
    label = text_in(where, tool, "server_label")
    if label not in servers:
        field = f"{where}.server_label"
        echo = label[:MAX_ECHO_CHARS]
        remedy = f"give one of {named}" if servers else "offer functions, or have the server named with --mcp-server"
        raise unsupported(field, f"{field}: the operator has named no MCP server '{echo}'; {remedy}")
    if tool.get("defer_loading"):
        ignored("tools.defer_loading", "there is no hosted search for tools, so that all tools are in the prompt")
    allowed = _filter(f"{where}.allowed_tools", tool.get("allowed_tools"))
    return McpOffer(label, where, allowed, _never(f"{where}.require_approval", tool.get("require_approval")))


def _filter(where: str, given: Any) -> _Filter:
    """A list of names, or an object with `tool_names` and `read_only`."""
    if given is None:
        return _Filter()
    if isinstance(given, list):
        given = {"tool_names": given}
    if not isinstance(given, dict):
        raise invalid(where, f"{where} must be a list of names, or an object with tool_names or read_only")
    names, read_only = given.get("tool_names"), given.get("read_only")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        raise invalid(f"{where}.tool_names", f"{where}.tool_names must be a list of texts")
    if not isinstance(read_only, bool | None):
        raise invalid(f"{where}.read_only", f"{where}.read_only must be true or false")
    return _Filter(None if names is None else frozenset(names), read_only)


def _never(where: str, given: Any) -> _Filter | None:
    """The tools that need no approval; the caller must approve all others."""
    if given in (None, "always"):
        return None
    if given == "never":
        return _Filter()
    if not isinstance(given, dict) or not given.keys() <= {"always", "never"}:
        raise invalid(where, f"{where} must be always, never, or an object with these and tools for each")
    if "always" in given:
        _filter(f"{where}.always", given["always"])
    return None if given.get("never") is None else _filter(f"{where}.never", given["never"])
