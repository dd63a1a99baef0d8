"""The file of MCP servers: what it may have, and that what it may not is named without its keys."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.gateway.mcp.configuration import Program, Remote, read_configuration
from headrace.gateway.mcp.credentials import OAuthClient
from headrace.gateway.mcp.servers import McpServers

OAUTH = {"token_url": "https://id.example/token", "client_id": "gateway", "client_secret_file": "secret"}
URL = "https://tools.example/mcp"


def read(folder: Path, servers: Any, environment: dict[str, str] | None = None) -> dict[str, Any]:
    file = folder / "mcp.json"
    file.write_text(json.dumps({"mcpServers": servers}))
    return dict(read_configuration(file, environment or {}))


def test_programs_get_their_arguments_folder_and_environment(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    script = tmp_path / "work" / "serve"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    environment = {"PATH": str(Path(sys.executable).parent), "HOME": "/h", "HEADRACE_KEY": "secret", "TZ": "UTC"}
    servers = {
        "a": {
            "type": "stdio",
            "command": Path(sys.executable).name,
            "args": ["-m", "x"],
            "env": {"TZ": "CET", "K": "v"},
        },
        "b": {"command": "./serve", "cwd": "work"},
        "c": {"command": "nonexistent", "disabled": True},
    }
    found = read(tmp_path, servers, environment)
    kept = {"PATH": environment["PATH"], "HOME": "/h"}
    assert found == {
        "a": Program((sys.executable, "-m", "x"), {**kept, "TZ": "CET", "K": "v"}, tmp_path),
        "b": Program((str(script),), {**kept, "TZ": "UTC"}, tmp_path / "work"),
    }


def test_servers_at_urls_get_their_headers_and_tokens(tmp_path: Path) -> None:
    further = {"scope": "tools", "parameters": {"audience": "all", "resource": ""}}
    servers = {
        "a": {"url": URL, "headers": {"X-Key": "v"}, "type": "http"},
        "b": {"url": URL, "bearer_token_file": "token"},
        "c": {"url": URL, "oauth": OAUTH},
        "d": {"url": URL, "oauth": {**OAUTH, **further}},
    }
    client = OAuthClient(OAUTH["token_url"], "gateway", tmp_path / "secret", {"resource": URL})
    without = OAuthClient(OAUTH["token_url"], "gateway", tmp_path / "secret", {"scope": "tools", "audience": "all"})
    assert read(tmp_path, servers) == {
        "a": Remote(URL, [("X-Key", "v")]),
        "b": Remote(URL, [], tmp_path / "token"),
        "c": Remote(URL, [], None, client),
        "d": Remote(URL, [], None, without),
    }


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ("x", "must be an object with a command or a url"),
        ({}, "must have either a command or a url"),
        ({"command": sys.executable, "url": URL}, "must have either a command or a url"),
        ({"command": sys.executable, "arg": []}, "'arg' is not known here; there are command, args, env, cwd"),
        ({"command": sys.executable, "headers": {}}, "'headers' is not known here"),
        ({"command": "nonexistent-program"}, "there is no program 'nonexistent-program'; install it"),
        ({"command": ""}, "command must be a text"),
        ({"command": sys.executable, "args": "x"}, "args must be a list of texts"),
        ({"command": sys.executable, "args": ["${secret}"]}, "which is not expanded"),
        ({"command": sys.executable, "env": {"A": 1}}, "env must have names of variables and texts: 'A'"),
        ({"command": sys.executable, "env": {"A=": "secret"}}, "env must have names of variables and texts: 'A='"),
        ({"command": sys.executable, "env": {"A": "${secret}"}}, "the value of A in env has"),
        ({"command": sys.executable, "cwd": "none"}, "is no directory"),
        ({"command": sys.executable, "type": "http"}, "type must be stdio beside a command"),
        ({"command": sys.executable, "disabled": "yes"}, "disabled must be true or false"),
        ({"url": URL, "type": "sse"}, "not over its older HTTP"),
        ({"url": "tools"}, "write a URL such as"),
        ({"url": URL, "args": []}, "'args' is not known here"),
        ({"url": URL, "headers": {"Host": "secret"}}, "'Host' is no header that can be given"),
        ({"url": URL, "headers": {"A": "secret\n"}}, "the value of A must be a text"),
        ({"url": URL, "headers": {"authorization": "secret"}, "oauth": OAUTH}, "must have one of the header"),
        ({"url": URL, "bearer_token_file": "token", "oauth": OAUTH}, "must have one of the header"),
        ({"url": URL, "oauth": "secret"}, "oauth must be an object"),
        ({"url": URL, "oauth": {**OAUTH, "client_secret": "secret"}}, "oauth: 'client_secret' is not known here"),
        ({"url": URL, "oauth": {**OAUTH, "token_url": "x"}}, "token_url: write a URL"),
        ({"url": URL, "oauth": {**OAUTH, "client_id": 1}}, "client_id must be a text"),
        ({"url": URL, "oauth": {**OAUTH, "parameters": {"a": 1}}}, "parameters must be an object"),
    ],
)
def test_what_is_wrong_is_named_without_keys(tmp_path: Path, entry: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem) as caught:
        read(tmp_path, {"calc": entry})
    assert "mcp.json: calc" in str(caught.value)
    assert "secret" not in str(caught.value).replace("client_secret", "")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Bearer secret", "is not JSON"),
        ("[]", "must be like"),
        ('{"servers": {}}', "must be like"),
        ('{"mcpServers": {"a b": {"url": "http://x/"}}}', "'a b' is no name"),
    ],
)
def test_a_file_that_is_none_is_refused(tmp_path: Path, text: str, problem: str) -> None:
    file = tmp_path / "mcp.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=problem):
        read_configuration(file)
    with pytest.raises(ValueError, match="cannot be read"):
        read_configuration(tmp_path / "none.json")


def test_a_name_that_a_flag_has_too_is_refused() -> None:
    with pytest.raises(ValueError, match="two servers named 'calc'"):
        McpServers({"calc": URL}, configured={"calc": Remote(URL)})
