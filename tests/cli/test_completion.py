"""Completion in a real shell, and what each command completes."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
from click.testing import CliRunner

from headrace.cli.fleet import run_state
from headrace.cli.main import cli
from headrace.common.commands import told
from headrace.router.__main__ import command as router_command
from tests.cli_reference import DELEGATES, commands
from tests.patience import patience

TAB = """
eval "$(headrace completion bash)"
COMP_WORDS=({words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
_headrace_completion headrace
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


def tab(words: str) -> list[str]:
    """What bash offers for a command line; an empty last word is ''."""
    done = subprocess.run(
        ["bash", "-euc", TAB.format(words=words)],
        env={**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=patience(60),
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("headrace stat", ["status"]),
        ("headrace models un", ["unload"]),
        ("headrace top --int", ["--interval"]),
        ("headrace router --max-ind", ["--max-index-entries"]),
        ("headrace run smollm2-1", ["smollm2-135m"]),
        ("headrace completion ''", ["bash", "zsh", "fish"]),
    ],
)
def test_bash_completes_commands_options_and_models(cache: Path, words: str, offered: list[str]) -> None:
    assert set(offered) <= set(tab(words))
    if not words.endswith("''"):
        assert all(each.startswith(words.split()[-1]) for each in tab(words))


def test_the_options_of_a_role_are_its_own(cache: Path) -> None:
    offered = tab("headrace router --")
    assert {option.opts[-1] for option in router_command.params} <= set(offered)


def long_options(command: click.Command) -> set[str]:
    """The options that a command shows, by their long names."""
    options = [option for option in command.params if isinstance(option, click.Option) and not option.hidden]
    return {next(name for name in option.opts if name.startswith("--")) for option in options}


OWN = [(words, command) for words, command in commands() if words[0] not in DELEGATES]


@pytest.mark.parametrize(("words", "command"), OWN, ids=[" ".join(words) for words, _ in OWN])
def test_every_command_completes_its_options_and_hints_at_a_mistyped_one(
    cache: Path, words: tuple[str, ...], command: click.Command
) -> None:
    options = long_options(command)
    assert options <= set(offered(*words, "--"))
    mistyped = f"{max(options, key=len)}x" if options else "--hlep"
    said = CliRunner().invoke(cli, [*words, mistyped], prog_name="headrace")
    assert said.exit_code == 2
    assert re.fullmatch(
        rf"error: no such option '{mistyped}'; did you mean .*\? see headrace {' '.join(words)} --help\n", said.output
    )


@pytest.mark.parametrize("role", [name for name, command in DELEGATES.items() if not isinstance(command, click.Group)])
def test_every_role_completes_its_options(cache: Path, role: str) -> None:
    assert long_options(DELEGATES[role]) <= set(tab(f"headrace {role} --"))


def offered(*args: str) -> list[str]:
    """What is completed for the last of these arguments, in this process."""
    from click.shell_completion import ShellComplete

    completer = ShellComplete(cli, {}, "headrace", "_HEADRACE_COMPLETE")
    return [item.value for item in completer.get_completions([*args[:-1]], args[-1])]


def test_workers_of_this_host_are_completed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processes = [SimpleNamespace(role=role, name=name) for role, name in (("worker", "worker-0"), ("router", "router"))]
    monkeypatch.setattr(run_state, "running_serves", lambda: [SimpleNamespace(processes=processes)])
    assert offered("drain", "w") == offered("undrain", "") == ["worker-0"]


def test_a_gateway_that_is_not_there_completes_nothing_and_complains_of_nothing(cache: Path) -> None:
    assert offered("drain", "--url", "http://127.0.0.1:1", "w") == []
    assert offered("status", "--url", "nonsense", "--model", "") == []


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_script_is_installed_where_the_shell_looks(
    shell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for variable in ("XDG_DATA_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("SHELL", f"/usr/bin/{shell}")
    printed = CliRunner().invoke(cli, ["completion"])
    done = CliRunner().invoke(cli, ["completion", "--install"])
    assert (done.exit_code, printed.exit_code) == (0, 0)
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    assert str(path) in done.stdout
    assert path.read_text() == printed.stdout
    assert "_HEADRACE_COMPLETE" in path.read_text()


def test_an_unknown_shell_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/sh")
    done = CliRunner().invoke(cli, ["completion"])
    assert (done.exit_code, done.output) == (2, "error: say which shell: bash, zsh, fish\n")


# --- what was mistyped ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["stauts"], "error: no such command 'stauts'; did you mean 'status'? see headrace --help\n"),
        (["models", "lsit"], "error: no such command 'lsit'; did you mean 'list'? see headrace models --help\n"),
        (
            ["drain", "w", "--undoo"],
            "error: no such option '--undoo'; did you mean '--undo'? see headrace drain --help\n",
        ),
        (["keys", "creat"], "error: no such command 'creat'; did you mean 'create'? see headrace keys --help\n"),
        (
            ["ls"],
            "error: no such command 'ls'; headrace models list shows the models in the cache; see headrace --help\n",
        ),
        (
            ["serve", "--max-model-len", "9"],
            "error: no such option '--max-model-len'; did you mean '--max-context-tokens'? see headrace serve --help\n",
        ),
        (
            ["serve", "--model", "m"],
            "error: no such option '--model'; give MODEL without a flag; see headrace serve --help\n",
        ),
        (
            ["serve", "--speculative_model", "m"],
            "error: no such option '--speculative_model'; did you mean '--draft-model'? see headrace serve --help\n",
        ),
    ],
)
def test_a_mistyped_word_gets_the_nearest_one_in_one_style(args: list[str], said: str) -> None:
    assert CliRunner().invoke(cli, args, prog_name="headrace").output == said


@pytest.mark.parametrize(("role", "option"), [("gateway", "--router"), ("router", "--listen"), ("worker", "--model")])
def test_a_role_without_a_required_flag_names_it_and_its_help(
    role: str, option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [role])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"headrace.{role}.__main__").main()
    assert ended.value.code == 2
    assert capsys.readouterr().err == f"error: missing option '{option}'; see headrace {role} --help\n"


def test_a_role_has_the_same_style(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.UsageError) as mistyped:
        router_command.main(["--listten", "x"], "headrace router", standalone_mode=False)
    told(mistyped.value)
    said = "error: no such option '--listten'; did you mean '--listen'? see headrace router --help\n"
    assert capsys.readouterr().err == said
