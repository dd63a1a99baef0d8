"""The credentials that the gateway sends to MCP servers: the operator's headers, tokens in files, and tokens that an
OAuth 2.0 server issues to the gateway (the grant `client_credentials`). Nothing here ever comes from a caller, and
nothing is logged."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote_plus, urlencode

from headrace.common.stores.watched_files import WatchedFiles
from headrace.gateway.mcp.values import CONNECTION_LOST, McpError

MAX_SECRET_BYTES = 64 * 1024
_SECRET = re.compile(r"[\x21-\x7e]{1,16384}")
_EARLY_S = 60.0
"""A token is renewed this long before it expires, or after half of its life."""
_LOG = logging.getLogger(__name__)

Headers = Sequence[tuple[str, str]]
Post = Callable[[str, Headers, bytes], Awaitable[tuple[int, bytes]]]
"""Posts a body to a URL, and gives the status and the body of the answer. Raises `McpError`."""


class Credentials(Protocol):
    """The headers that are sent with requests to one server."""

    async def prepare(self) -> None:
        """Obtain the credentials that `headers` returns. Raises `McpError`."""
        ...

    def headers(self) -> Headers:
        """The headers, as they are now."""
        ...

    async def refused(self) -> bool:
        """Handle a refusal of the credentials by the server (401). Returns whether new credentials may exist, so that
        the request should be tried once more."""
        ...


class GivenHeaders:
    """Headers that a function returns."""

    def __init__(self, headers: Callable[[], Headers]) -> None:
        self.headers = headers

    async def prepare(self) -> None:
        """See `Credentials`."""

    async def refused(self) -> bool:
        """See `Credentials`."""
        return False


class BearerFile:
    """A token in a file, which is read again when it changes. A file that cannot be read leaves the token as it was."""

    def __init__(self, path: Path, others: Headers = ()) -> None:
        """`others` are further headers. Raises ValueError if the file has no token."""
        self._path = path
        self._others = others
        self._watched = WatchedFiles([path], time.monotonic)
        self._token = secret_in(path)

    async def prepare(self) -> None:
        """See `Credentials`."""
        if self._watched.changed():
            self._read()

    def headers(self) -> Headers:
        """See `Credentials`."""
        return [*self._others, ("Authorization", f"Bearer {self._token}")]

    async def refused(self) -> bool:
        """See `Credentials`."""
        before = self._token
        self._read()
        return self._token != before

    def _read(self) -> None:
        try:
            self._token = secret_in(self._path)
        except ValueError as error:
            _LOG.warning("the known token stays: %s", error)


@dataclass(frozen=True, slots=True)
class OAuthClient:
    """The gateway as a client of an OAuth 2.0 server."""

    token_url: str
    client_id: str
    client_secret_file: Path
    """Read each time a token is asked for."""
    parameters: Mapping[str, str] = field(default_factory=dict)
    """Of the request for a token, beside `grant_type`."""


class ClientCredentials:
    """Tokens that an OAuth 2.0 server gives to the gateway: one for all sessions with an MCP server. It is renewed
    before it expires, and when the MCP server refuses it."""

    def __init__(
        self,
        client: OAuthClient,
        post: Post,
        others: Headers = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`others` are further headers. Raises ValueError if the file has no secret."""
        secret_in(client.client_secret_file)
        self._client = client
        self._post = post
        self._others = others
        self._clock = clock
        self._token = ""
        self._renew_at_s = 0.0
        self._asking = asyncio.Lock()

    async def prepare(self) -> None:
        """See `Credentials`."""
        async with self._asking:
            if not self._token or self._clock() >= self._renew_at_s:
                self._token = ""
                self._token, lifetime_s = await self._asked()
                self._renew_at_s = self._clock() + lifetime_s - min(_EARLY_S, lifetime_s / 2)

    def headers(self) -> Headers:
        """See `Credentials`."""
        return [*self._others, *([("Authorization", f"Bearer {self._token}")] if self._token else [])]

    async def refused(self) -> bool:
        """See `Credentials`."""
        self._token = ""
        return True

    async def _asked(self) -> tuple[str, float]:
        """Request a token. Returns it, and the seconds for which it is valid."""
        client = self._client
        try:
            secret = secret_in(client.client_secret_file)
        except ValueError as error:
            _LOG.warning("no token for an MCP server: %s", error)
            raise _no_token() from None
        # RFC 6749, 2.3.1: both are encoded as in a form before they are joined.
        pair = f"{quote_plus(client.client_id)}:{quote_plus(secret)}"
        headers = [
            ("Authorization", "Basic " + base64.b64encode(pair.encode()).decode()),
            ("Content-Type", "application/x-www-form-urlencoded"),
            ("Accept", "application/json"),
        ]
        form = {"grant_type": "client_credentials", **client.parameters}
        status, body = await self._post(client.token_url, headers, urlencode(form).encode())
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError):
            answer = None
        found: Mapping[str, Any] = answer if isinstance(answer, dict) else {}
        token, lifetime_s = found.get("access_token"), found.get("expires_in", float("inf"))
        kind = str(found.get("token_type", "")).lower()
        if status != 200 or not isinstance(token, str) or _SECRET.fullmatch(token) is None or kind != "bearer":
            _LOG.warning("%s gives no token: status %d, error %.64r", client.token_url, status, found.get("error"))
            raise _no_token()
        is_number = isinstance(lifetime_s, int | float) and not isinstance(lifetime_s, bool) and lifetime_s > 0
        return token, float(lifetime_s) if is_number else float("inf")


def secret_in(path: Path) -> str:
    """The secret in a file, without white space around it. Raises ValueError."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_SECRET_BYTES).decode("ascii", "replace").strip()
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    if _SECRET.fullmatch(text) is None:
        raise ValueError(f"{path} must have a secret of up to 16384 printable ASCII characters, without spaces")
    return text


def _no_token() -> McpError:
    return McpError("the gateway gets no token for the MCP server", CONNECTION_LOST)
