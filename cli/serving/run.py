"""`headrace run`: chats with a model by name. It uses a running server of the model, or starts one."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import httpx

from headrace.cli.chat.client import ChatClient
from headrace.cli.chat.command import ChatOptions, chat_options, talk
from headrace.cli.fleet.fleet_access import ApiAccess, api_options
from headrace.cli.fleet.run_state import running_serves, runtime_directory
from headrace.cli.hosting.finding import find_model
from headrace.cli.http_client import tls_problem
from headrace.cli.models.catalogue import DEFAULT_MODEL
from headrace.cli.models.completers import complete_known_models
from headrace.cli.models.model_cache import offline_option
from headrace.cli.models.progress import say, stages
from headrace.cli.models.reference import parse_reference
from headrace.common import launch
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.load_stages import LoadStage, stage_in

_STOP_S = 15.0
_POLL_S = 0.1
_PATIENCE_S = 10.0


@click.command()
@click.argument("model", default=DEFAULT_MODEL, shell_complete=complete_known_models)
@click.argument("prompt", nargs=-1)
@chat_options
@offline_option
@api_options
def run(model: str, prompt: tuple[str, ...], options: ChatOptions, offline: bool, access: ApiAccess) -> None:
    """Chat with MODEL, or answer PROMPT and exit.

    MODEL is the same as for headrace serve; it is pulled if missing. If this user already runs headrace serve with
    MODEL, that server answers. Otherwise a server starts on a free port and stops at the end. Set its options with
    variables such as HEADRACE_SERVE_KV_CACHE_GB. In the conversation, /? shows the commands.
    """
    question = " ".join(prompt) or None
    with _server_of(model, offline, access) as (url, name):
        talk(ChatClient(url, name, access), options, question)


@contextmanager
def _server_of(model: str, offline: bool, access: ApiAccess) -> Iterator[tuple[str, str]]:
    """The URL of a ready server, and the model's name there."""
    reference = parse_reference(model)
    name = model if reference is None else reference.name
    url = _running(name)
    if url is None:
        _directory, name = find_model(model, offline=offline)
        url = _running(name)
    if url is not None:
        say(f"{name} is served at {url}")
        _wait_until_ready(url, name, access)
        yield url, name
        return
    say(f"{name}: starting")
    with _started(model, name) as url:
        yield url, name


def _running(name: str) -> str | None:
    """The URL of this user's running serve with that model; None if there is none."""
    found = (record.url for record in running_serves() if name in record.models)
    return next((url.replace("//0.0.0.0:", "//127.0.0.1:") for url in found), None)


def _wait_until_ready(url: str, name: str, access: ApiAccess) -> None:
    """Wait until the server has loaded its model. Raises CommandFailed if the server ends."""
    since_s = time.monotonic()
    is_told = False
    with access.client(url, 5.0) as client:
        while True:
            if not is_told and time.monotonic() - since_s >= _PATIENCE_S:
                say(f"{name} is not ready yet, still waiting; headrace status and the server's log show why")
                is_told = True
            try:
                if client.get(f"{url}/health/ready").status_code == 200:
                    return
            except httpx.TransportError as error:
                if (problem := tls_problem(error)) is not None:
                    raise CommandFailed(f"{url}: {problem}") from None
                if _running(name) is None:
                    raise CommandFailed(f"the server at {url} has ended ({error})") from None
            time.sleep(_POLL_S)


@contextmanager
def _started(model: str, name: str) -> Iterator[str]:
    """Start `headrace serve`, show what it does until it is ready, and yield its URL. Stop it at the end, or when this
    process dies."""
    log = runtime_directory() / f"run-{os.getpid()}.log"
    serve = (sys.executable, "-m", "headrace.cli", "serve", model, "--port", "0", "--offline")
    command = launch.with_parent([*serve])
    with log.open("w") as file:
        # A separate session, so that Ctrl-C stops the answer but not the server.
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=file, text=True, start_new_session=True
        )
    try:
        with stages(name) as at:
            line = _ready_line(process, log, at)
        if not line.startswith("ready: "):
            raise _failure(process.wait(_STOP_S), log)
        yield line.removeprefix("ready: ").strip().removesuffix("/v1")
    finally:
        _stop(process)
        log.unlink(missing_ok=True)


def _ready_line(process: subprocess.Popen[str], log: Path, at: Callable[[str], None]) -> str:
    """The first line of a server's output; empty if the server ends without one. `at` is called with each loading stage
    in the log, that of the most advanced worker."""
    assert process.stdout is not None
    order = list(LoadStage)
    reached, rest = -1, ""
    at("starting the server")
    with selectors.DefaultSelector() as selector, log.open(errors="replace") as file:
        selector.register(process.stdout, selectors.EVENT_READ)
        while not selector.select(_POLL_S):
            *lines, rest = (rest + file.read()).split("\n")
            for stage in filter(None, map(stage_in, lines)):
                if order.index(stage) > reached:
                    reached = order.index(stage)
                    at(stage)
    return process.stdout.readline()


def _failure(status: int, log: Path) -> CommandError:
    """The error for a server that did not become ready, with the last line of its log."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if line.startswith("error: ")]
    if errors:
        return CommandError(errors[-1])
    return CommandFailed(f"headrace serve ended with status {status}: {lines[-1] if lines else 'no reason given'}")


def _stop(process: subprocess.Popen[str]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdout is not None
    process.stdout.close()
