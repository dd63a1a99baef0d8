"""The Responses API as a protocol of the gateway: its endpoints, and the store of its responses and conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import click

from headrace.common.flags import FiniteRange
from headrace.common.stores.redis_link import server_of
from headrace.gateway.mcp.configuration import read_configuration
from headrace.gateway.mcp.servers import OPTIONS as MCP_OPTIONS
from headrace.gateway.mcp.servers import McpServers
from headrace.gateway.protocol import CannotServeError, OpenProtocol, Protocol, Setup
from headrace.gateway.responses.background import ResponseRuns
from headrace.gateway.responses.conversation_endpoints import conversation_endpoints
from headrace.gateway.responses.conversations import Conversations
from headrace.gateway.responses.endpoints import endpoints
from headrace.gateway.responses.fields import TABLES
from headrace.gateway.responses.redis_store import RedisStore
from headrace.gateway.responses.store import DEFAULT_TTL_S, TENANT_BYTES, MemoryStore, Store
from headrace.gateway.services import Services
from headrace.gateway.telemetry.metrics import Metrics
from headrace.protos.router_pb2 import RedisState


class OpenResponses(OpenProtocol):
    """The Responses API while the gateway runs."""

    def __init__(self, services: Services, store: Store, servers: McpServers) -> None:
        """Closes the store and the connections to MCP servers at the end."""
        self._store = store
        self._servers = servers
        self.runs = ResponseRuns(store)
        """The responses that are generated in the background."""
        conversations = Conversations(store)
        super().__init__(
            [
                *endpoints(services, self.runs, conversations, servers),
                *conversation_endpoints(self.runs, conversations),
            ]
        )

    def redis_states(self) -> Mapping[str, RedisState]:
        """The state of the store's Redis; unspecified without one."""
        return {"responses": self._store.redis}

    async def run(self) -> None:
        """Watch the store's Redis, and keep the MCP servers that are programs running."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._store.watch())
            group.create_task(self._servers.run())

    async def drain(self, timeout_s: float) -> None:
        """Finish the responses in the background, or fail them."""
        await self.runs.drain(timeout_s)

    async def close(self) -> None:
        """Close the store, and the connections to MCP servers."""
        await self._store.close()
        await self._servers.close()


def _store(flags: Mapping[str, Any], shared_redis_url: str | None) -> Store:
    """The store for responses: a Redis that gateways share, or this process's memory."""
    url = flags["response_redis_url"]
    ttl_s = flags["response_ttl_s"]
    tenant_bytes = flags["response_tenant_mb"] << 20
    if url is None:
        return MemoryStore(ttl_s, tenant_bytes=tenant_bytes)
    if shared_redis_url is not None and server_of(url) == server_of(shared_redis_url):
        problem = (
            "--response-redis is the Redis of --redis: responses would fill it, and leases, limits and keys be lost"
        )
        raise CannotServeError(f"{problem}; give it a Redis of its own, or leave it out to keep responses here")
    try:
        return RedisStore(url, ttl_s, tenant_bytes=tenant_bytes)
    except ValueError as error:
        # Without the URL: it may have a password.
        raise CannotServeError(f"--response-redis is not a Redis URL: {error}") from None


def _servers(flags: Mapping[str, Any], metrics: Metrics) -> McpServers:
    """The MCP servers that the operator has named."""
    urls = flags["mcp_servers"]
    if flags["mcp_headers"] is not None and not urls:
        raise CannotServeError("--mcp-headers needs --mcp-server NAME=URL: the servers that get the headers")
    config = flags["mcp_config"]
    try:
        configured = None if config is None else read_configuration(config)
    except ValueError as error:
        raise CannotServeError(f"--mcp-config: {error}") from None
    try:
        return McpServers(
            urls,
            headers=flags["mcp_headers"],
            configured=configured,
            timeout_s=flags["mcp_timeout_s"],
            max_calls=flags["mcp_max_calls"],
            output_kb=flags["mcp_output_kb"],
            on_call=metrics.mcp_called,
            on_start=metrics.mcp_started,
        )
    except ValueError as error:
        raise CannotServeError(f"MCP servers: {error}") from None


def _open(setup: Setup) -> OpenResponses:
    store = _store(setup.flags, setup.shared_redis_url)
    return OpenResponses(setup.services, store, _servers(setup.flags, setup.services.metrics))


PROTOCOL = Protocol(
    _open,
    fields=TABLES,
    options=(
        click.Option(
            ["--response-ttl", "response_ttl_s"],
            default=DEFAULT_TTL_S,
            type=FiniteRange(min=1),
            help="Seconds for which responses of the Responses API are stored, and conversations after their "
            "last change.",
        ),
        click.Option(
            ["--response-redis", "response_redis_url"],
            envvar="HEADRACE_GATEWAY_RESPONSE_REDIS",
            metavar="URL",
            help="Redis for stored responses, shared by gateways; not the one of --redis.  [default: none, this "
            "gateway's memory]",
        ),
        click.Option(
            ["--response-tenant-mb"],
            default=TENANT_BYTES >> 20,
            type=click.IntRange(min=1),
            help="MiB of stored responses for each tenant; the oldest are deleted first.",
        ),
        *MCP_OPTIONS,
    ),
)
