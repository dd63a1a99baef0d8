"""The `headrace` command. Each subcommand's module is imported only when it is called, so that --help is quick."""

from __future__ import annotations

import sys

try:
    import difflib
    import importlib
    from collections.abc import Sequence
    from typing import Any, NamedTuple

    import click
    from click.shell_completion import CompletionItem

    from headrace.common import startup
    from headrace.common.commands import told
except KeyboardInterrupt:  # from here on, click catches it
    sys.exit(130)


class _Subcommand(NamedTuple):
    target: str
    summary: str


# name -> the path of its click.Command below headrace.cli, and its line in --help
_SUBCOMMANDS = {
    "pull": _Subcommand("models.pull:pull", "Fetch a model, convert it if necessary, and store it in the cache."),
    "serve": _Subcommand("serving.serve:serve", "Serve models on this host: workers, router and gateway."),
    "ovms": _Subcommand("serving.ovms_command:ovms", "Serve models with the flags of OpenVINO Model Server."),
    "run": _Subcommand("serving.run:run", "Chat with a model; start and stop a server for it if none runs."),
    "models": _Subcommand("hosting.models:models", "List, show and remove cached models; load and unload served ones."),
    "status": _Subcommand("fleet.status:status", "Show the processes that serve on this host, or a fleet's workers."),
    "top": _Subcommand("fleet.top:top", "Watch the workers and models of a fleet, live."),
    "health": _Subcommand("fleet.health:health", "Check whether one process is serving."),
    "drain": _Subcommand("fleet.drain:drain", "Let a worker finish its requests and take no new ones."),
    "undrain": _Subcommand("fleet.drain:undrain", "Let a draining worker take requests again."),
    "topology": _Subcommand("serving.machine:topology", "Show this machine's cores, and where workers would run."),
    "doctor": _Subcommand(
        "serving.doctor:doctor", "Find settings of this host that cost speed, and say what to change."
    ),
    "adapters": _Subcommand("fleet.adapters:adapters", "List, load and unload LoRA adapters of a fleet."),
    "explain": _Subcommand("fleet.explain:explain", "Show which worker a prompt would go to, and why."),
    "chat": _Subcommand("chat.command:chat", "Chat with a served model in the terminal."),
    "batch": _Subcommand("fleet.batch:batch", "Run a file of requests (JSONL) at the lowest priority."),
    "keys": _Subcommand("fleet.keys:keys", "Create, list and revoke API keys."),
    "certs": _Subcommand("fleet.certs:certs", "Create certificates for a fleet."),
    "completion": _Subcommand("completion:completion", "Complete commands, models and workers in bash, zsh or fish."),
    "worker": _Subcommand("serving.roles:worker", "Run one worker, for fleets of several hosts."),
    "router": _Subcommand("serving.roles:router", "Run one router, for fleets of several hosts."),
    "gateway": _Subcommand("serving.roles:gateway", "Run one gateway, for fleets of several hosts."),
    "bench": _Subcommand("serving.roles:bench", "Measure a server's latency and throughput, and check its answers."),
    "plan": _Subcommand(
        "serving.roles:plan", "Plan a fleet for a load: hosts, workers, memory, and what breaks first."
    ),
    "ray": _Subcommand("serving.roles:ray", "Start, show and stop a fleet on a Ray cluster."),
    "sim": _Subcommand("serving.roles:sim", "Simulate a fleet, and compare routing policies on it."),
}


# Words of other programs, and where they are here.
_OTHER_WORDS = {
    "help": "headrace --help lists the commands",
    "version": "headrace --version shows the version",
    "stop": "Ctrl-C or SIGTERM stops headrace serve; headrace models unload unloads a model",
    **dict.fromkeys(("list", "ls"), "headrace models list shows the models in the cache"),
    **dict.fromkeys(("show", "info"), "headrace models show shows a model in the cache"),
    **dict.fromkeys(("rm", "remove", "delete"), "headrace models rm removes a model from the cache"),
    **dict.fromkeys(("load", "unload"), "headrace models loads and unloads models of a running server"),
    "ps": "headrace models ps shows the models of a running server, headrace status its processes",
    **dict.fromkeys(("download", "fetch", "convert", "export"), "headrace pull fetches and converts a model"),
    **dict.fromkeys(("start", "up", "launch"), "headrace serve starts a server"),
    **dict.fromkeys(("benchmark", "perf", "measure"), "headrace bench measures a server"),
    **dict.fromkeys(("calibrate", "study"), "it is a command of headrace bench"),
}


class _LazyGroup(click.Group):
    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command as click does, but report every failure as one line, `error: SENTENCE`."""
        try:
            status = super().main(args, prog_name, complete_var, standalone_mode=False, **extra)
        except (click.ClickException, click.Abort, OSError, UnicodeError) as error:
            if not standalone_mode:
                raise
            sys.exit(told(error))
        if standalone_mode:
            sys.exit(status if isinstance(status, int) else 0)
        return status

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in _SUBCOMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, _SUBCOMMANDS, 1)
            hint = _OTHER_WORDS.get(name) or (f"did you mean {near[0]!r}?" if near else "")
            raise click.UsageError(f"no such command {name[:40]!r}" + (f"; {hint}" if hint else ""), ctx)
        return super().resolve_command(ctx, args)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        found = _SUBCOMMANDS.get(cmd_name)
        if found is None:
            return None
        module, _, attribute = found.target.partition(":")
        command = getattr(importlib.import_module(f"headrace.cli.{module}"), attribute)
        startup.after_imports()
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """The commands, and the options of the group, without importing any command."""
        found = [
            CompletionItem(name, help=found.summary)
            for name, found in _SUBCOMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, found.summary) for name, found in _SUBCOMMANDS.items()])


def _print_version(ctx: click.Context, _option: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        from importlib.metadata import version

        click.echo(f"headrace {version('headrace')}")
        ctx.exit()


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def cli() -> None:
    """headrace serves large language models on CPU servers."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the console command; ends the process with the command's exit status."""
    startup.before_imports()
    cli.main(args=None if argv is None else list(argv), prog_name="headrace", auto_envvar_prefix="HEADRACE")
