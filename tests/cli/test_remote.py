"""`headrace models ps` and its like against a server that does not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.cli.fleet.run_state import RunState
from headrace.cli.hosting import remote
from headrace.cli.main import cli
from tests.cli.test_status import record


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
