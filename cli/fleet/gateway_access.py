"""The fleet behind a gateway, from anywhere: its workers and models, draining, explanations. Over HTTP, with an API key
or the admin key."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import httpx

from headrace.cli.fleet.fleet_access import ApiAccess, api_options
from headrace.cli.fleet.run_state import running_serves
from headrace.cli.http_client import server_url, tls_problem
from headrace.common.commands import CommandError, CommandFailed

if TYPE_CHECKING:
    from headrace.protos import router_pb2

DEFAULT_URL = "http://127.0.0.1:8000"
_TIMEOUT_S = 15.0
_CONNECT_S = 5.0
_NOT_FOUND = 404
_UNAUTHENTICATED = 401


def default_url() -> str:
    """The serve of this host if there is exactly one, else port 8000 of this host."""
    records = running_serves()
    return records[0].url.replace("//0.0.0.0:", "//127.0.0.1:") if len(records) == 1 else DEFAULT_URL


def operator_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add --api-key, --ca-file and --admin-key-file to a command, which gets them as `access`. The admin key is sent
    instead of the API key if both are given."""

    @api_options
    @functools.wraps(command)
    def with_access(*args: Any, access: ApiAccess, admin_key_file: Path | None, **options: Any) -> Any:
        return command(*args, access=_with_admin_key(access, admin_key_file), **options)

    return click.option(
        "--admin-key-file",
        envvar="HEADRACE_ADMIN_KEY_FILE",
        type=click.Path(path_type=Path),
        help="File with the admin key of the gateway.",
    )(with_access)


def _with_admin_key(access: ApiAccess, path: Path | None) -> ApiAccess:
    if path is None:
        return access
    try:
        return replace(access, api_key=path.read_text().strip())
    except OSError as error:
        raise CommandError(f"--admin-key-file {path} cannot be read: {error.strerror}") from None


@dataclass(frozen=True, slots=True)
class FleetPicture:
    """The fleet as a gateway sees it. `problem` says why no workers are known; `models` and `routers` are as in the
    answer of GET /v1/fleet."""

    gateway: dict[str, Any]
    routers: Sequence[dict[str, Any]]
    problem: str
    workers: Sequence[router_pb2.WorkerInfo]
    models: Sequence[dict[str, Any]]


class FleetClient:
    """A client of one gateway for operators. Every failure is a CommandError with the reason. A context manager."""

    def __init__(self, url: str, access: ApiAccess, *, timeout_s: float = _TIMEOUT_S) -> None:
        """`timeout_s` limits each request, in addition to the time that the request itself may wait."""
        self.url = server_url(url)
        self._timeout_s = timeout_s
        self._http = access.client(self.url, timeout_s)

    def __enter__(self) -> FleetClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def picture(self) -> FleetPicture:
        """The fleet now."""
        from google.protobuf.json_format import ParseDict, ParseError

        from headrace.protos import router_pb2

        answer = self._ask("GET", "/v1/fleet")
        try:
            workers = [ParseDict(raw, router_pb2.WorkerInfo(), ignore_unknown_fields=True) for raw in answer["workers"]]
            return FleetPicture(answer["gateway"], answer["routers"], answer["problem"], workers, answer["models"])
        except (KeyError, TypeError, ParseError):
            raise self._strange() from None

    def drain(self, worker: str, *, undo: bool = False, wait_s: float = 10.0) -> tuple[str, int]:
        """Drain a worker, or let it take requests again. Returns its name, and the requests that it still has."""
        body = {"worker": worker, "undo": undo, "wait_s": wait_s}
        answer = self._ask("POST", "/v1/fleet/drain", body, wait_s=wait_s)
        try:
            return str(answer["worker"]), int(answer["num_running"])
        except (KeyError, TypeError, ValueError):
            raise self._strange() from None

    def explain(self, body: dict[str, Any]) -> router_pb2.ExplainResponse:
        """Ask where a prompt would go. `body` is that of POST /v1/fleet/explain."""
        from google.protobuf.json_format import ParseDict, ParseError

        from headrace.protos import router_pb2

        try:
            answer = self._ask("POST", "/v1/fleet/explain", body)
            return ParseDict(answer, router_pb2.ExplainResponse(), ignore_unknown_fields=True)
        except ParseError:
            raise self._strange() from None

    def change_model(self, action: str, body: dict[str, Any]) -> None:
        """Load or unload a model of the gateway's host, and wait for it."""
        self._ask("POST", f"/v1/{action}_model", body, wait_s=None)

    def _ask(
        self, method: str, path: str, body: dict[str, Any] | None = None, *, wait_s: float | None = 0.0
    ) -> dict[str, Any]:
        """The answer, which may take `wait_s` longer than others; None: any time."""
        try:
            bound_s = None if wait_s is None else self._timeout_s + wait_s
            timeout = httpx.Timeout(bound_s, connect=min(self._timeout_s, _CONNECT_S))
            response = self._http.request(method, f"{self.url}{path}", json=body, timeout=timeout)
        except httpx.HTTPError as error:
            if (problem := tls_problem(error)) is not None:
                raise CommandFailed(f"{self.url}: {problem}") from None
            if isinstance(error, httpx.ConnectError | httpx.ConnectTimeout):
                raise CommandFailed(
                    f"no gateway at {self.url}; start one with headrace serve, or name another with --url"
                ) from None
            raise CommandFailed(f"{self.url} did not answer: {str(error) or type(error).__name__}") from None
        try:
            answer = response.json()
            if response.status_code == 200:
                return dict(answer)
            message = str(answer["error"]["message"])
        except (ValueError, KeyError, TypeError):
            raise self._strange() from None
        if response.status_code == _UNAUTHENTICATED:
            # What changes the fleet takes no API key.
            wants_admin = "the admin key" in message
            message += "; " + ("give it with --admin-key-file" if wants_admin else "give one with --api-key")
        if response.status_code == _NOT_FOUND and "there is nothing at" in message:
            message = "it is a gateway without this view: an older version of headrace"
        raise CommandFailed(f"{self.url}: {message}")

    def _strange(self) -> CommandError:
        return CommandError(f"{self.url} is not a headrace gateway: its answer is not valid")
