"""The operator's list of MCP servers, and the file of their headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.gateway.mcp.servers import McpServers, parse_servers


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("Bearer secret", "is not JSON"),
        ("[]", "must be like"),
        ('{"calc": "secret"}', "must be like"),
        ('{"unknown": {}}', "no --mcp-server names"),
        ('{"calc": {"Host": "secret"}}', "'Host' is no header that can be given"),
        ('{"calc": {"A b": "secret"}}', "'A b' is no header that can be given"),
        ('{"calc": {"A": "secret\\n"}}', "the value of A must be a text"),
        ('{"calc": {"A": 1}}', "the value of A must be a text"),
    ],
)
def test_a_bad_file_of_headers_is_named_without_its_keys(tmp_path: Path, content: str, problem: str) -> None:
    file = tmp_path / "headers.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=problem) as caught:
        McpServers({"calc": "http://x/"}, headers=file)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    "value", ["calc", "=http://x/", "1a=http://x/", "a b=http://x/", "é=http://x/", "x" * 65 + "=http://x/"]
)
def test_a_server_needs_a_name_and_a_url(value: str) -> None:
    with pytest.raises(ValueError, match="is not NAME=URL"):
        parse_servers([value])


def test_two_servers_of_a_name_are_refused() -> None:
    assert parse_servers(["a=http://x/?q=1", "b=https://y:8/z"]) == {"a": "http://x/?q=1", "b": "https://y:8/z"}
    with pytest.raises(ValueError, match="two servers named 'a'"):
        parse_servers(["a=http://x/", "a=http://y/"])


@pytest.mark.parametrize("url", ["ftp://x/", "http://", "x", "http://me:pw@x/", "http://x:99999/", "http://é/"])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="write a URL such as"):
        parse_servers([f"a={url}"])
