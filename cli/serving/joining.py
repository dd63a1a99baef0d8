"""`headrace serve --join`: offers this host as stages of a pipeline whose worker is on another one, until stopped.

Each NUMA node is a stage, as otherwise each would be a worker, or several nodes are one that divides its layers among
them. Gateway and router run only on the worker's host.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from headrace.cli.fleet.run_state import JoinRecord, JoinState, own_start_ticks
from headrace.cli.hosting.finding import find_model
from headrace.cli.serving.log_sink import LogSink
from headrace.cli.serving.machine import describe_plan
from headrace.cli.serving.placement import place_workers
from headrace.cli.serving.plan import ProcessSpec, SecurityFiles, StageOptions, stage_specs
from headrace.cli.serving.recording import Recording, records_of
from headrace.cli.serving.supervisor import StopSignals, Supervisor
from headrace.cli.serving.topology import read_topology
from headrace.common.commands import CommandError
from headrace.common.worker_flags import AUTO_RANKS

DEFAULT_LISTEN = "0.0.0.0:50071"
# What a stage has no use for is an error: the worker decides it.
_OF_A_STAGE = {
    *("models", "join", "stage_listen", "workers", "threads", "tensor_parallel", "kv_cache_gb", "offline", "dry_run"),
    *("log_level", "log_format", "otlp_endpoint", "tls_dir", "join_token_file"),
}


def refuse_other_flags(context: click.Context) -> None:
    """Raise CommandError for a flag that is for a server."""
    for parameter in context.command.params:
        assert parameter.name is not None
        is_given = context.get_parameter_source(parameter.name) is ParameterSource.COMMANDLINE
        if is_given and parameter.name not in _OF_A_STAGE:
            raise CommandError(
                f"{parameter.opts[0]} is for the server that has the first stage; leave it out beside --join, with "
                "which this host computes for that server"
            )


def join(
    models: Sequence[str], address: str, listen: str | None, files: SecurityFiles, given: Mapping[str, Any]
) -> None:
    """Offer this host to the worker at an address until stopped, and end the process with the exit status; or with
    --dry-run, print where stages would run. Raises CommandError."""
    if len(models) != 1:
        raise CommandError("--join needs one MODEL, the same as the server that has the first stage")
    num_ranks = given["tensor_parallel"] or 1
    if num_ranks == AUTO_RANKS:
        raise CommandError(
            "--tensor-parallel auto chooses by the weights, and only the server that has the first stage knows which "
            "of them are for this host; give a number beside --join"
        )
    places = place_workers(read_topology(), given["workers"], given["threads"], num_ranks)
    if given["dry_run"]:
        click.echo(describe_plan(places, "stage"))
        return
    log = LogSink(sys.stderr.buffer, colour=sys.stderr.isatty(), as_json=given["log_format"] == "json")
    try:
        # Only the worker knows which part of the weights is for this host.
        directory, name = find_model(models[0], offline=given["offline"], num_workers=0)
        options = StageOptions(
            name=name,
            directory=directory,
            join=address,
            listen=listen or DEFAULT_LISTEN,
            kv_cache_gb=given["kv_cache_gb"],
            log_level=given["log_level"],
            log_format=given["log_format"],
            otlp_endpoint=given["otlp_endpoint"],
            files=files,
        )
        sys.exit(asyncio.run(Stages(options, stage_specs(options, places, sys.executable), log).run()))
    finally:
        log.close()


class Stages:
    """One run of `headrace serve --join`: its supervisor, and its record for other commands."""

    def __init__(self, options: StageOptions, specs: Sequence[ProcessSpec], log: LogSink) -> None:
        self._options, self._log = options, log
        self._state = JoinState()
        recording = Recording(lambda: self._state.write(self._record()), lambda line: log.line("serve", line))
        self._supervisor = Supervisor(specs, log, on_change=recording.update)

    async def run(self) -> int:
        """Keep the stages running until a signal arrives. Returns the exit status. Raises CommandError with the message
        of a stage that is refused."""
        signals = StopSignals(self._supervisor, self._log)
        signals.listen()
        try:
            await self._supervisor.run()
        finally:
            self._state.remove()
        return signals.exit_status()

    def _record(self) -> JoinRecord:
        options = self._options
        files = options.files
        return JoinRecord(
            pid=os.getpid(),
            start_ticks=own_start_ticks(),
            model=options.name,
            join=options.join,
            processes=records_of(self._supervisor.processes),
            tls_dir=None if files.tls_dir is None else str(files.tls_dir),
            join_token_file=None if files.join_token_file is None else str(files.join_token_file),
        )
