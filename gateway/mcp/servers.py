"""The MCP servers that the operator has named, their bounds, and the sessions with them."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click

from headrace.common.flags import FiniteRange
from headrace.common.stores.watched_files import WatchedFiles
from headrace.gateway.mcp.configuration import SERVER_NAME, Entry, Program, Remote, check_url, checked_headers
from headrace.gateway.mcp.credentials import BearerFile, ClientCredentials, Credentials, GivenHeaders, Headers
from headrace.gateway.mcp.session import Exchange, McpSession
from headrace.gateway.mcp.stdio import StdioServer
from headrace.gateway.mcp.values import CONNECTION_LOST, McpError, McpResult, McpTool

TIMEOUT_S = 30.0
MAX_CALLS = 16
OUTPUT_KB = 64
END_S = 2.0
"""Time for messages that nobody waits for: a cancellation, and the end of a session."""
_LOG = logging.getLogger(__name__)


class McpServers:
    """The operator's list. Without any, no server is called."""

    def __init__(
        self,
        urls: Mapping[str, str],
        *,
        headers: Path | None = None,
        configured: Mapping[str, Entry] | None = None,
        timeout_s: float = TIMEOUT_S,
        max_calls: int = MAX_CALLS,
        output_kb: int = OUTPUT_KB,
        on_call: Callable[[str, str, float], None] = lambda server, outcome, seconds: None,
        on_start: Callable[[str], None] = lambda server: None,
    ) -> None:
        """`headers` is a file with headers for the servers of `urls`, read again when it changes. `configured` are
        further servers, which have their own. `on_call` is told of each call: its server, outcome and seconds;
        `on_start` of each start of a server that is a program. Raises ValueError for a bad file."""
        self.max_calls = max_calls
        """Calls of one response."""
        self.max_output_bytes = output_kb * 1024
        """Of one call."""
        self.on_call = on_call
        self._file = None if headers is None else HeaderFile(headers, urls)
        self._timeout_s = timeout_s
        self._pool: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._programs: list[StdioServer] = []
        self._exchanges: dict[str, Callable[[], Exchange]] = {}
        for name, url in urls.items():
            self._exchanges[name] = partial(self._over_http, name, url, GivenHeaders(partial(self._headers_of, name)))
        for name, entry in (configured or {}).items():
            if name in self._exchanges:
                raise ValueError(f"there are two servers named {name!r}")
            if isinstance(entry, Program):
                program = StdioServer(name, entry, timeout_s, on_start=on_start)
                self._programs.append(program)
                self._exchanges[name] = program.exchange
            else:
                self._exchanges[name] = partial(self._over_http, name, entry.url, self._credentials_of(entry))

    @property
    def names(self) -> Collection[str]:
        """The names of the servers."""
        return self._exchanges.keys()

    def sessions(self) -> McpSessions:
        """Sessions for one caller."""
        return McpSessions(self)

    def session(self, name: str) -> McpSession:
        """A new session with a server."""
        return McpSession(self._exchanges[name]())

    async def run(self) -> None:
        """Keep the servers that are programs running, until cancelled. Returns at once if there are none."""
        async with asyncio.TaskGroup() as group:
            for program in self._programs:
                group.create_task(program.run())

    async def close(self) -> None:
        """Finish what runs in the background, and close all connections. `run` must have been cancelled."""
        if self._tasks:
            await asyncio.wait(self._tasks)
        for program in self._programs:
            await program.close()
        if self._pool is not None:
            await self._pool.aclose()

    def _over_http(self, name: str, url: str, credentials: Credentials) -> Exchange:
        from headrace.gateway.mcp.http import HttpExchange, HttpServer  # its client loads slowly

        server = HttpServer(name, url, self._timeout_s, credentials)
        return HttpExchange(server, self._pool_of_all(), self._in_background)

    def _credentials_of(self, entry: Remote) -> Credentials:
        if entry.oauth is not None:
            return ClientCredentials(entry.oauth, self._post, entry.headers)
        if entry.bearer_token_file is not None:
            return BearerFile(entry.bearer_token_file, entry.headers)
        return GivenHeaders(lambda: entry.headers)

    async def _post(self, url: str, headers: Headers, body: bytes) -> tuple[int, bytes]:
        from headrace.gateway.mcp.http import post

        return await post(self._pool_of_all(), url, headers, body)

    def _pool_of_all(self) -> Any:
        from headrace.gateway.mcp.http import new_pool

        if self._pool is None:
            self._pool = new_pool()
        return self._pool

    def _in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                async with asyncio.timeout(END_S):
                    await work
            except Exception as error:  # whatever it is, nobody waits for it
                _LOG.debug("an MCP server was not told of an end: %r", error)

        task = asyncio.create_task(run())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _headers_of(self, name: str) -> Sequence[tuple[str, str]]:
        return () if self._file is None else self._file.of(name)


class McpSessions:
    """The sessions of one response, one with each server that it needs."""

    def __init__(self, servers: McpServers) -> None:
        self._servers = servers
        self._sessions: dict[str, McpSession] = {}

    async def tools(self, server: str) -> list[McpTool]:
        """The tools of a server. Raises `McpError`."""
        return await self._session(server).tools()

    async def call(self, server: str, tool: str, arguments: Mapping[str, Any]) -> McpResult:
        """Call a tool. Raises `McpError`, also if the result is larger than the operator allows."""
        begun_s = time.monotonic()
        outcome = "cancelled"
        try:
            result = await self._session(server).call(tool, arguments)
            num_bytes = len(result.text.encode())
            if num_bytes > self._servers.max_output_bytes:
                most = self._servers.max_output_bytes
                problem = f"the tool's output has {num_bytes} bytes, more than {most}; ask it for less"
                raise McpError(problem, CONNECTION_LOST)
            outcome = "tool_error" if result.is_error else "ok"
            return result
        except McpError:
            outcome = "failed"
            raise
        finally:
            self._servers.on_call(server, outcome, time.monotonic() - begun_s)

    def close(self) -> None:
        """End the sessions."""
        for session in self._sessions.values():
            session.close()
        self._sessions.clear()

    def _session(self, server: str) -> McpSession:
        if server not in self._sessions:
            self._sessions[server] = self._servers.session(server)
        return self._sessions[server]


class HeaderFile:
    """Headers for servers, in a file of JSON: `{"NAME": {"Authorization": "Bearer ..."}}`. A file that was changed and
    cannot be read leaves the headers as they were. No value is ever logged."""

    def __init__(self, path: Path, names: Collection[str]) -> None:
        """Raises ValueError if the file is not as it should be, or names another server than `names`."""
        self._path = path
        self._names = names
        self._watched = WatchedFiles([path], time.monotonic)
        self._headers = self._read()

    def of(self, name: str) -> Sequence[tuple[str, str]]:
        """The headers for a server."""
        if self._watched.changed():
            try:
                self._headers = self._read()
            except ValueError as error:
                _LOG.warning("the known headers stay: %s", error)
        return self._headers.get(name, ())

    def _read(self) -> dict[str, Sequence[tuple[str, str]]]:
        try:
            given = json.loads(self._path.read_bytes())
        except OSError as error:
            raise ValueError(f"{self._path} cannot be read: {error.strerror}") from None
        except ValueError:
            raise ValueError(f"{self._path} is not JSON") from None  # without the text, which has keys
        if not isinstance(given, dict) or not all(isinstance(headers, dict) for headers in given.values()):
            raise ValueError(f'{self._path} must be like {{"NAME": {{"Authorization": "Bearer ..."}}}}')
        unknown = sorted(set(given) - set(self._names))
        if unknown:
            raise ValueError(f"{self._path} names {unknown[0][:64]!r}, which no --mcp-server names")
        return {server: checked_headers(f"{self._path}: {server}", headers) for server, headers in given.items()}


def parse_servers(values: Sequence[str]) -> dict[str, str]:
    """The URLs of servers by name, from NAME=URL. Raises ValueError."""
    urls: dict[str, str] = {}
    for value in values:
        name, separator, url = value.partition("=")
        if not separator or SERVER_NAME.fullmatch(name) is None:
            raise ValueError(
                f"{value[:64]!r} is not NAME=URL with a name of up to 64 letters, digits, underscores and hyphens"
            )
        if name in urls:
            raise ValueError(f"there are two servers named {name!r}")
        check_url(name, url)
        urls[name] = url
    return urls


def _servers(context: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> dict[str, str]:
    try:
        return parse_servers(values)
    except ValueError as error:
        raise click.BadParameter(str(error)) from error


OPTIONS = (
    click.Option(
        ["--mcp-server", "mcp_servers"],
        multiple=True,
        envvar="HEADRACE_GATEWAY_MCP_SERVER",
        callback=_servers,
        metavar="NAME=URL",
        help="An MCP server (Streamable HTTP) whose tools responses may offer to the model by this name; the gateway "
        "calls them. May be repeated.  [default: none]",
    ),
    click.Option(
        ["--mcp-headers"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        help='Headers for these servers, such as their keys: JSON like {"NAME": {"Authorization": "Bearer ..."}}. Read '
        "again when it changes.",
    ),
    click.Option(
        ["--mcp-config"],
        type=click.Path(path_type=Path),
        metavar="FILE",
        help='Further MCP servers: JSON as agents have it, {"mcpServers": {"NAME": {"command": ..., "args": [...]}}}. '
        "The gateway starts those with a command, and calls those with a url.",
    ),
    click.Option(
        ["--mcp-timeout", "mcp_timeout_s"],
        default=TIMEOUT_S,
        type=FiniteRange(min=0, min_open=True),
        help="Maximum seconds for each answer of an MCP server.",
    ),
    click.Option(
        ["--mcp-max-calls"],
        default=MAX_CALLS,
        type=click.IntRange(min=1),
        help="Maximum calls of MCP tools in one response.",
    ),
    click.Option(
        ["--mcp-output-kb"],
        default=OUTPUT_KB,
        type=click.IntRange(min=1, max=4096),
        help="Maximum KiB of text that a call of an MCP tool gives to the model.",
    ),
)
"""The flags of the list."""
