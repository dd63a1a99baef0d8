"""Holds command lines of manifests, compose files and units to the real commands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import click
import pytest

from headrace.cli.main import cli
from headrace.gateway.__main__ import command as gateway
from headrace.router.__main__ import command as router
from headrace.worker.__main__ import command as worker

ROLES: dict[str, click.Command] = {"gateway": gateway, "router": router, "worker": worker}
# Variables that no option of a command stands for.
OTHERS = {"HEADRACE_CACHE", "HEADRACE_HEALTH_TARGET", "HEADRACE_REDIS_PASSWORD_FILE", "HEADRACE_REDIS_TLS_DIR"}


def refuse_what_is_unknown(
    monkeypatch: pytest.MonkeyPatch, argv: Sequence[str], environment: Mapping[str, str] | None = None
) -> dict[str, object]:
    """The parameters that `headrace ARGV` would run with. Raises click.ClickException, or fails for a variable that no
    option reads."""
    name, *args = argv
    command = ROLES.get(name) or cli.get_command(click.Context(cli), name)
    assert command is not None, f"there is no headrace {name}"
    given = {name: value for name, value in (environment or {}).items() if name.startswith("HEADRACE_")}
    settings = {"auto_envvar_prefix": f"HEADRACE_{name.upper()}", **command.context_settings}
    with monkeypatch.context() as patched:
        for variable, value in given.items():
            patched.setenv(variable, value)
        context = command.make_context(name, list(args), **settings)
    known = {variable for parameter in command.params for variable in variables_of(parameter, settings)}
    assert set(given) <= known | OTHERS, f"headrace {name} does not read {set(given) - known - OTHERS}"
    return context.params


def variables_of(parameter: click.Parameter, settings: Mapping[str, object]) -> list[str]:
    """Environment variables that a parameter is read from."""
    if parameter.envvar is not None:
        return [parameter.envvar] if isinstance(parameter.envvar, str) else list(parameter.envvar)
    return [f"{settings['auto_envvar_prefix']}_{parameter.name}".upper()] if parameter.name else []
