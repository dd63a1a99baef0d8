"""The error handling that all commands share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from headrace.cli.main import cli
from headrace.cli.serving.serve import serve
from headrace.common.flags import SECTIONS
from headrace.gateway.__main__ import command as gateway
from headrace.router.__main__ import command as router
from headrace.worker.__main__ import command as worker
from tests.patience import patience

SERVING = {"serve": serve, "gateway": gateway, "router": router, "worker": worker}


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("serv",), "did you mean 'serve'? see headrace --help"),
        (("serve", "--prot", "80"), "'--port'"),
        (("keys", "lst"), "did you mean 'list'? see headrace keys --help"),
        (("chat", "--max-tokens", "few"), "'few' is not a valid integer; see headrace chat --help"),
        (("keys", "create"), "missing argument 'NAME'; see headrace keys create --help"),
        (("keys", "list"), "give the place of the keys: --file FILE or --redis URL"),
    ],
)
def test_every_refusal_is_one_line_with_its_remedy(args: tuple[str, ...], sentence: str) -> None:
    result = CliRunner().invoke(cli, args, prog_name="headrace")
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("error: ")
    assert sentence.lower() in result.stderr.lower()
    assert not result.stdout


@pytest.mark.parametrize(
    ("args", "lines"),
    [
        (("chat", "--url", "http://127.0.0.1:1", "--model", "m"), b"caf\xe9\n"),
        (("chat", "--url", "http://127.0.0.1:1", "--model", "\udcff"), b"hi\n"),
        (("explain", "--router", "127.0.0.1:1", "--tokens", "1", "--model", "\udcff"), b""),
        (("explain", "--router", "127.0.0.1:1", "--url", "http://127.0.0.1:1", "caf\udce9"), b""),
    ],
)
def test_text_that_is_not_utf_8_is_refused_in_one_line(args: tuple[str, ...], lines: bytes, cache: Path) -> None:
    result = CliRunner().invoke(cli, args, input=lines, prog_name="headrace")
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.exception
    assert result.stderr.startswith("error: a text that was given or would be shown does not fit its encoding: ")


@pytest.mark.parametrize(("args", "named"), [((), "serve"), (("models",), "list"), (("keys",), "revoke")])
def test_a_group_without_a_command_shows_its_help(args: tuple[str, ...], named: str) -> None:
    result = CliRunner().invoke(cli, args, prog_name="headrace")
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Usage: {' '.join(('headrace', *args))} [OPTIONS] COMMAND")
    assert f"\n  {named} " in result.stderr
    assert "error:" not in result.stderr


@pytest.mark.parametrize("role", ["worker", "router", "gateway"])
def test_roles_refuse_in_the_same_words(role: str) -> None:
    result = subprocess.run(
        [sys.executable, "-m", f"headrace.{role}", "--frobnicate"], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: no such option '--frobnicate'")
    assert result.stderr.count("\n") == 1


def test_ctrl_c_while_the_command_is_imported_gives_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-c", "from headrace.cli.main import main; main()", "models"]
    result = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=patience(60)
    )
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "")


def test_each_option_of_what_serves_is_in_one_section_of_its_help() -> None:
    options = {
        param.opts[0]
        for command in SERVING.values()
        for param in command.params
        if isinstance(param, click.Option) and not param.hidden
    }
    flags = [flag for section in SECTIONS.values() for flag in section]
    assert len(flags) == len(set(flags))
    assert set(flags) == options


@pytest.mark.parametrize("name", SERVING)
def test_the_help_of_what_serves_has_its_sections(name: str) -> None:
    command = SERVING[name]
    flags = {param.opts[0] for param in command.params if isinstance(param, click.Option)}
    text = CliRunner().invoke(command, ["--help"]).output
    titles = [line[:-1] for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")]
    assert titles == [*(title for title, of_section in SECTIONS.items() if flags & set(of_section)), "Options"]
    assert "--help" in text.rpartition("\nOptions:\n")[2]
