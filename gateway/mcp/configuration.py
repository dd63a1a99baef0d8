"""The file of MCP servers in the form that agents have (`{"mcpServers": {"NAME": {...}}}`), checked.

Paths in it are relative to its folder. It may hold keys, so no value of `env` or of a header is in an error.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from headrace.gateway.mcp.credentials import Headers, OAuthClient

SERVER_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,63}")
PASSED_ON = ("HOME", "LANG", "LC_ALL", "LOGNAME", "PATH", "TMPDIR", "TZ", "USER")
"""What programs get of the gateway's environment."""
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
_VALUE = re.compile(r"[\x20-\x7e]{0,8192}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OWN_HEADERS = frozenset(
    (
        "accept",
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "host",
        "mcp-protocol-version",
        "mcp-session-id",
        "transfer-encoding",
    )
)
_OF_PROGRAMS = ("command", "args", "env", "cwd")
_OF_URLS = ("url", "headers", "bearer_token_file", "oauth")
_OF_BOTH = ("type", "disabled")
_OF_OAUTH = ("token_url", "client_id", "client_secret_file", "scope", "parameters")
_HTTP_TYPES = (None, "http", "streamable-http", "streamableHttp")


@dataclass(frozen=True, slots=True)
class Program:
    """A server that is a program, whose standard input and output carry the messages."""

    argv: Sequence[str]
    """The first is a path."""
    environment: Mapping[str, str]
    """All of it."""
    folder: Path


@dataclass(frozen=True, slots=True)
class Remote:
    """A server at a URL, and the credentials that it is sent."""

    url: str
    headers: Headers = field(default=())
    bearer_token_file: Path | None = None
    oauth: OAuthClient | None = None


Entry: TypeAlias = Program | Remote


def read_configuration(path: Path, environment: Mapping[str, str] = os.environ) -> dict[str, Entry]:
    """The servers of a file by name, without those that are disabled. Raises ValueError."""
    try:
        given = json.loads(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None  # without the text, which may have keys
    servers = given.get("mcpServers") if isinstance(given, dict) else None
    if not isinstance(servers, dict):
        raise ValueError(f'{path} must be like {{"mcpServers": {{"NAME": {{"command": "...", "args": ["..."]}}}}}}')
    found: dict[str, Entry] = {}
    for name, entry in servers.items():
        if SERVER_NAME.fullmatch(name) is None:
            raise ValueError(
                f"{path}: {name[:64]!r} is no name: it needs up to 64 letters, digits, underscores and hyphens"
            )
        where = f"{path}: {name}"
        if not isinstance(entry, dict):
            raise ValueError(f"{where} must be an object with a command or a url")
        if entry.get("disabled") not in (None, False, True):
            raise ValueError(f"{where}: disabled must be true or false")
        if not entry.get("disabled"):
            found[name] = _entry(where, entry, path.absolute().parent, environment)
    return found


def check_url(where: str, url: str) -> None:
    """Raises ValueError unless requests can go to this URL."""
    try:
        found = urlsplit(url)
        usable = found.scheme in ("http", "https") and bool(found.hostname) and found.username is None
        usable = usable and url.isascii() and found.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise ValueError(f"{where}: write a URL such as https://tools.example.com/mcp, without a user or password")


def checked_headers(where: str, headers: Mapping[str, Any]) -> Headers:
    """The headers of an object. Raises ValueError."""
    for name, value in headers.items():
        if _HEADER.fullmatch(name) is None or name.lower() in _OWN_HEADERS:
            raise ValueError(f"{where}: {name[:64]!r} is no header that can be given")
        if not isinstance(value, str) or _VALUE.fullmatch(value) is None:
            raise ValueError(f"{where}: the value of {name} must be a text of printable ASCII characters")
    return [*headers.items()]


def _entry(where: str, entry: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> Entry:
    if ("command" in entry) == ("url" in entry):
        raise ValueError(f"{where} must have either a command or a url")
    is_program = "command" in entry
    _check_names(where, entry, (*(_OF_PROGRAMS if is_program else _OF_URLS), *_OF_BOTH))
    kind = entry.get("type")
    if is_program and kind not in (None, "stdio"):
        raise ValueError(f"{where}: type must be stdio beside a command, or absent")
    if not is_program and kind not in _HTTP_TYPES:
        problem = f"{where}: type must be http, or absent: servers are called over MCP's Streamable HTTP"
        raise ValueError(f"{problem}, not over its older HTTP+SSE" if kind == "sse" else problem)
    return _program(where, entry, folder, environment) if is_program else _remote(where, entry, folder)


def _program(where: str, entry: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> Program:
    command, args = _text(where, entry, "command"), entry.get("args", [])
    if not isinstance(args, list) or not all(isinstance(one, str) and "\0" not in one for one in args):
        raise ValueError(f"{where}: args must be a list of texts")
    if any("${" in one for one in args):
        raise ValueError(f"{where}: args have ${{, which is not expanded; write the value itself")
    given = entry.get("env", {})
    if not isinstance(given, dict):
        raise ValueError(f"{where}: env must be an object of names and values")
    for name, value in given.items():
        if _VARIABLE.fullmatch(name) is None or not isinstance(value, str) or "\0" in value:
            raise ValueError(f"{where}: env must have names of variables and texts: {name[:64]!r}")
        if "${" in value:
            raise ValueError(
                f"{where}: the value of {name} in env has ${{, which is not expanded; write the value itself"
            )
    own = {name: environment[name] for name in PASSED_ON if name in environment} | given
    place = folder / _text(where, entry, "cwd") if "cwd" in entry else folder
    if not place.is_dir():
        raise ValueError(f"{where}: cwd {place} is no directory")
    found = shutil.which(place / command if os.sep in command else command, path=own.get("PATH", os.defpath))
    if found is None:
        raise ValueError(f"{where}: there is no program {command!r}; install it, or write its path")
    return Program((str(found), *args), own, place)


def _remote(where: str, entry: Mapping[str, Any], folder: Path) -> Remote:
    url, headers = _text(where, entry, "url"), entry.get("headers", {})
    check_url(where, url)
    if not isinstance(headers, dict):
        raise ValueError(f"{where}: headers must be an object of names and values")
    shown = checked_headers(where, headers)
    names = [name for name in ("bearer_token_file", "oauth") if name in entry]
    if len(names) > 1 or (names and any(name.lower() == "authorization" for name, _ in shown)):
        raise ValueError(f"{where} must have one of the header Authorization, bearer_token_file and oauth")
    token = folder / _text(where, entry, "bearer_token_file") if "bearer_token_file" in entry else None
    oauth = _oauth(f"{where}: oauth", entry["oauth"], url, folder) if "oauth" in entry else None
    return Remote(url, shown, token, oauth)


def _oauth(where: str, given: Any, url: str, folder: Path) -> OAuthClient:
    if not isinstance(given, dict):
        raise ValueError(f"{where} must be an object with token_url, client_id and client_secret_file")
    _check_names(where, given, _OF_OAUTH)
    token_url = _text(where, given, "token_url")
    check_url(f"{where}: token_url", token_url)
    further = given.get("parameters", {})
    if not isinstance(further, dict) or not all(isinstance(value, str) for value in further.values()):
        raise ValueError(f"{where}: parameters must be an object of names and texts")
    scope = {"scope": _text(where, given, "scope")} if "scope" in given else {}
    # MCP has clients name the server that the token is for (RFC 8707).
    all_of_them = {"resource": url, **scope, **further}
    secret = folder / _text(where, given, "client_secret_file")
    named = {name: value for name, value in all_of_them.items() if value}
    return OAuthClient(token_url, _text(where, given, "client_id"), secret, named)


def _text(where: str, given: Mapping[str, Any], name: str) -> str:
    value = given.get(name)
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError(f"{where}: {name} must be a text")
    return value


def _check_names(where: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    unknown = sorted(set(given) - set(known))
    if unknown:
        raise ValueError(f"{where}: {unknown[0][:64]!r} is not known here; there are {', '.join(known)}")
