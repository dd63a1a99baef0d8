"""`headrace models ps` and `headrace run` against a server that is not ready."""

from __future__ import annotations

from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli.fleet.run_state import RunState
from headrace.cli.hosting import remote
from headrace.cli.main import cli
from headrace.cli.serving import run
from tests.cli.test_status import record
from tests.http_server import http_server, respond


def test_a_server_that_loads_its_first_model_does_not_answer_yet(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "_LIST_TIMEOUT_S", 0.1)
    RunState(9).write(record(host_address=f"unix:{tmp_path}/host.sock"))
    done = CliRunner().invoke(cli, ["models", "ps"])
    assert done.exit_code == 1
    assert done.stderr == (
        "error: the server on port 9 does not answer: it may be loading its first model; headrace status shows its "
        "processes\n"
    )


def test_run_says_once_that_it_waits_for_a_server(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_PATIENCE_S", 0.0)
    monkeypatch.setattr(run, "_POLL_S", 0.01)
    left = [503, 503, 503, 200]

    def health(handler: BaseHTTPRequestHandler) -> None:
        respond(handler, left.pop(0))

    def answer(handler: BaseHTTPRequestHandler) -> None:
        respond(handler, 200, b'data: {"choices":[{"delta":{"content":"Hi."}}]}\n\ndata: [DONE]\n\n')

    with http_server(health, answer) as url:
        RunState(9).write(record(url=url, models=("m",)))
        done = CliRunner().invoke(cli, ["run", "m", "hello"])
    assert (done.exit_code, done.stdout) == (0, "Hi.\n")
    assert done.stderr.count("m is not ready yet, still waiting; headrace status") == 1
    assert not left
