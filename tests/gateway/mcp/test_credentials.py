"""Tokens for MCP servers: from files, and from an OAuth server. A real MCP server asks for them over HTTP."""

from __future__ import annotations

import asyncio
import base64
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.gateway.mcp.configuration import Remote
from headrace.gateway.mcp.credentials import BearerFile, ClientCredentials, Headers, OAuthClient
from headrace.gateway.mcp.servers import McpServers
from headrace.gateway.mcp.values import CONNECTION_LOST, McpError
from tests.gateway.mcp_server import McpServer

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(autouse=True)
def _fresh(served: McpServer) -> None:
    served.reset()


@pytest_asyncio.fixture(loop_scope="module")
async def servers(served: McpServer, tmp_path: Path) -> AsyncIterator[McpServers]:
    secret, token = tmp_path / "secret", tmp_path / "token"
    secret.write_text("p:w/d+\n")
    token.write_text("from-file\n")
    client = OAuthClient(served.url.replace("/mcp", "/token"), "gate way", secret, {"scope": "tools"})
    found = McpServers(
        {}, configured={"a": Remote(served.url, [("X-A", "b")], None, client), "b": Remote(served.url, [], token)}
    )
    yield found
    await found.close()


async def test_a_token_of_an_oauth_server_is_asked_for_once(servers: McpServers, served: McpServer) -> None:
    served.accepted = "Bearer one"
    sessions = [servers.sessions() for _ in range(3)]
    await asyncio.gather(*(one.tools("a") for one in sessions))
    assert (await sessions[0].call("a", "add", {"a": 1, "b": 2})).text == "3"
    ((form, authorization),) = served.token_requests
    assert form == {"grant_type": "client_credentials", "scope": "tools"}
    assert base64.b64decode(authorization.removeprefix("Basic ")) == b"gate+way:p%3Aw%2Fd%2B"
    assert {headers["x-a"] for *_, headers in served.seen} == {"b"}


async def test_a_token_that_the_server_refuses_is_renewed_once(servers: McpServers, served: McpServer) -> None:
    served.accepted = "Bearer one"
    sessions = servers.sessions()
    await sessions.tools("a")
    served.accepted = "Bearer two"
    served.token_answer = (200, {"access_token": "two", "token_type": "bearer"})
    assert (await sessions.call("a", "add", {"a": 1, "b": 2})).text == "3"
    assert len(served.token_requests) == 2
    served.accepted = "Bearer three"
    with pytest.raises(McpError) as caught:
        await sessions.call("a", "add", {"a": 1, "b": 2})
    assert (caught.value.code, caught.value.is_http) == (401, True)
    assert len(served.token_requests) == 3


@pytest.mark.parametrize(
    "answer",
    [
        (401, {"error": "invalid_client"}),
        (200, {"token_type": "bearer"}),
        (200, {"access_token": "a b", "token_type": "bearer"}),
        (200, {"access_token": "one", "token_type": "mac"}),
        (200, ["one"]),
    ],
)
async def test_no_token_is_an_error_without_keys(
    servers: McpServers, served: McpServer, caplog: pytest.LogCaptureFixture, answer: Any
) -> None:
    served.token_answer = answer
    with pytest.raises(McpError, match="gets no token for the MCP server") as caught:
        await servers.sessions().tools("a")
    assert caught.value.code == CONNECTION_LOST
    assert served.seen == []
    assert f"status {answer[0]}" in caplog.text
    assert "p:w" not in caplog.text


async def test_an_oauth_server_that_is_gone_is_an_error(tmp_path: Path, served: McpServer) -> None:
    (tmp_path / "secret").write_text("s")
    client = OAuthClient("http://127.0.0.1:1/token", "gateway", tmp_path / "secret")
    servers = McpServers({}, configured={"a": Remote(served.url, (), None, client)})
    with pytest.raises(McpError, match="gets no token"):
        await servers.sessions().tools("a")
    await servers.close()


async def test_a_token_is_renewed_before_it_expires_with_the_secret_as_it_is_then(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s1")
    times_s = [0.0]
    asked: list[str] = []

    async def post(url: str, headers: Headers, body: bytes) -> tuple[int, bytes]:
        asked.append(base64.b64decode(dict(headers)["Authorization"].removeprefix("Basic ")).decode())
        life_s = 300 if len(asked) == 1 else 40
        return 200, b'{"access_token": "t%d", "token_type": "Bearer", "expires_in": %d}' % (len(asked), life_s)

    client = OAuthClient("https://id.example/token", "gateway", secret)
    credentials = ClientCredentials(client, post, clock=lambda: times_s[-1])
    assert credentials.headers() == []
    held = []
    # 300 s are renewed after 240, 40 s after 20.
    for now_s in (0.0, 239.0, 240.0, 259.0, 260.0):
        times_s.append(now_s)
        await credentials.prepare()
        held.append(credentials.headers())
        secret.write_text("s2")
    assert [dict(headers)["Authorization"] for headers in held] == [f"Bearer t{i}" for i in (1, 1, 2, 2, 3)]
    assert asked == ["gateway:s1", "gateway:s2", "gateway:s2"]
    secret.unlink()
    await credentials.refused()
    with pytest.raises(McpError, match="gets no token"):
        await credentials.prepare()


async def test_a_token_in_a_file_is_read_again_when_it_is_refused(
    servers: McpServers, served: McpServer, tmp_path: Path
) -> None:
    served.accepted = "Bearer from-file"
    sessions = servers.sessions()
    await sessions.tools("b")
    (tmp_path / "token").write_text("newer")
    served.accepted = "Bearer newer"
    await sessions.tools("b")
    served.accepted = "Bearer other"
    with pytest.raises(McpError, match="status 401"):
        await sessions.tools("b")


async def test_a_token_in_a_file_follows_it(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("one")
    credentials = BearerFile(token, [("A", "b")])
    for content, held in (("two", "two"), ("", "two"), ("a b", "two"), ("three", "three")):
        token.write_text(content)
        os.utime(token, ns=(len(content), len(content)))
        credentials._watched._looked_at_s = float("-inf")
        await credentials.prepare()
        assert credentials.headers() == [("A", "b"), ("Authorization", f"Bearer {held}")]


@pytest.mark.parametrize("content", [None, "", "two words", "é", "x" * 20_000])
async def test_a_file_without_a_secret_is_refused_at_the_start(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
    for entry in (
        Remote("http://x/", (), file),
        Remote("http://x/", (), None, OAuthClient("http://x/", "gateway", file)),
    ):
        with pytest.raises(ValueError, match="token (cannot be read|must have a secret)"):
            McpServers({}, configured={"a": entry})
