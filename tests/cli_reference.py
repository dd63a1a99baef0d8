"""Write docs/reference/cli.md from the commands themselves: `make docs`. A test holds the page to them."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path

import click

from headrace.bench.__main__ import main as bench
from headrace.cli.main import cli
from headrace.gateway.__main__ import command as gateway
from headrace.plan.__main__ import main as plan
from headrace.ray.__main__ import main as ray
from headrace.router.__main__ import command as router
from headrace.sim.__main__ import main as sim
from headrace.worker.__main__ import command as worker

PAGE = Path(__file__).parent.parent / "docs" / "reference" / "cli.md"
# What `headrace NAME` hands its arguments to, where that is a command of its own.
DELEGATES: Mapping[str, click.Command] = {
    "worker": worker,
    "router": router,
    "gateway": gateway,
    "bench": bench,
    "plan": plan,
    "ray": ray,
    "sim": sim,
}
_HEAD = """\
# Command line

<!-- Written by tests/cli_reference.py (make docs). Change the help texts in the code instead. -->

Every command fails with one line, `error: SENTENCE`, on standard error. The exit status is

- 0 for success
- 1 if something else failed, such as a network
- 2 if the command cannot do what was asked: change the flags or the configuration
- 130 after Ctrl-C

Every option can also be set by the environment variable in its row. A flag wins over a variable. If an option may be
repeated, its variable has several values, separated by spaces.
"""


def commands() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Yield the words of each command after `headrace`, and the command with its options."""
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = DELEGATES.get(name) or cli.get_command(context, name)
        assert command is not None
        yield (name,), command
        if isinstance(command, click.Group):
            for inner in command.list_commands(click.Context(command)):
                found = command.get_command(click.Context(command), inner)
                assert found is not None
                yield (name, inner), found


def page() -> str:
    """The whole page."""
    return _HEAD + "".join(_section(words, command) for words, command in commands())


def _section(words: tuple[str, ...], command: click.Command) -> str:
    title = " ".join(("headrace", *words))
    prefix = "_".join(("HEADRACE", *words)).upper().replace("-", "_")
    settings = {"auto_envvar_prefix": prefix, **command.context_settings}
    context = click.Context(command, info_name=title, **settings)
    usage = " ".join((title, *command.collect_usage_pieces(context)))
    options = sorted(
        (option for option in command.params if isinstance(option, click.Option) and not option.hidden),
        key=lambda option: option.opts[-1],
    )
    rows = [_row(option, context) for option in options]
    table = "\n| Option | Default | Variable | Meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n" if rows else ""
    text = "\n\n".join(_paragraph(part) for part in inspect.cleandoc(command.help or "").split("\n\n"))
    return f"\n## {title}\n\n`{usage}`\n\n{text}\n{table}"


def _paragraph(text: str) -> str:
    """A paragraph in one line. One whose lines are kept, as click marks it, has commands, which tests of documents
    parse."""
    if not text.startswith("\b\n"):
        return " ".join(text.split())
    lines = text.removeprefix("\b\n").splitlines()
    title = "" if lines[0].startswith(" ") else f"{lines.pop(0)}\n\n"
    return f"{title}```sh\n" + textwrap.dedent("\n".join(lines)).strip() + "\n```"


def _row(option: click.Option, context: click.Context) -> str:
    """A row of the table of options."""
    told = option.get_help_record(context)
    assert told is not None, option.name
    extra = option.get_help_extra(context)
    text = (option.help or "").partition("  [default:")
    default = extra.get("default") or text[2].strip(" ]")
    bounds = f" ({extra['range']})" if "range" in extra else ""
    required = " Required." if option.required else ""
    variable = option.envvar or f"{context.auto_envvar_prefix}_{option.name}".upper()
    name = variable if isinstance(variable, str) else variable[0]
    flags = told[0].replace(" RANGE", "").replace("|", "/")
    cells = (f"`{flags}`", str(default), f"`{name}`", f"{text[0]}{bounds}{required}".strip())
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(page())
