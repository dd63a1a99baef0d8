"""Shell completion: `headrace completion`, and how commands complete names.

The scripts are click's. They call `headrace` at each Tab, so that completers import what they need only when they are
called.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

import click

from headrace.common.commands import CommandError

_SHELLS = ("bash", "zsh", "fish")
VARIABLE = "_HEADRACE_COMPLETE"
"""The environment variable by which a script asks for completions."""

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def _beginning(incomplete: str, names: Iterable[str]) -> list[str]:
    return sorted({name for name in names if name.startswith(incomplete)})


def quietly(find: Callable[[click.Context], Iterable[str]]) -> Completer:
    """A completer that offers nothing if the names cannot be found, because completion must not print errors."""

    def complete(ctx: click.Context, _parameter: click.Parameter, incomplete: str) -> list[str]:
        try:
            return _beginning(incomplete, find(ctx))
        except Exception:
            return []

    return complete


@click.command()
@click.argument("shell", type=click.Choice(_SHELLS), required=False)
@click.option("--install", is_flag=True, help="Write it to the directory of this user from which the shell loads it.")
@click.pass_context
def completion(ctx: click.Context, shell: str | None, install: bool) -> None:
    """Print the completion of commands, options, models and workers for SHELL; by default the shell of $SHELL.

    For the running shell alone: eval "$(headrace completion bash)".
    """
    name = shell or Path(os.environ.get("SHELL", "")).name
    if name not in _SHELLS:
        raise CommandError(f"say which shell: {', '.join(_SHELLS)}")
    script = _script(ctx.find_root().command, name)
    if not install:
        click.echo(script)
        return
    path = _path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{script}\n")
    click.echo(f"wrote {path}; {_remedy(name, path)}")


def _script(cli: click.Command, shell: str) -> str:
    from click.shell_completion import ShellComplete, get_completion_class

    found = get_completion_class(shell)
    assert found is not None, "click knows these shells"
    # Its own `source` starts bash, to warn of versions of 2014.
    return ShellComplete.source(found(cli, {}, "headrace", VARIABLE)).strip()


def _path(shell: str) -> Path:
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local/share")
    configuration = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return {
        "bash": data / "bash-completion/completions/headrace",
        "zsh": data / "zsh/site-functions/_headrace",
        "fish": configuration / "fish/completions/headrace.fish",
    }[shell]


def _remedy(shell: str, path: Path) -> str:
    if shell == "zsh":
        return f"put `fpath=({path.parent} $fpath)` before `compinit` in ~/.zshrc, and start a new shell"
    if shell == "bash":
        return "the package bash-completion loads it in new shells"
    return "new shells load it"
