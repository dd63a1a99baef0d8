"""The output of `headrace ray status`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import click

from headrace.cli.fleet.tables import print_columns
from headrace.common.kernel_files import format_list
from headrace.ray.directory import Front, Member, WorkerMember, merged


def as_object(
    app: str, state: str, message: str, deployments: Mapping[str, Any], members: Sequence[Member]
) -> dict[str, Any]:
    """The object for --json: Ray's state of the application, the fleet's members, and the signal of each model."""
    return {
        "app": app,
        "state": state,
        "message": message,
        "deployments": dict(deployments),
        "gateways": [asdict(one) for one in members if isinstance(one, Front)],
        "workers": [asdict(one) for one in members if isinstance(one, WorkerMember)],
        "signals": {model: dict(merged(_fronts(members), model)) for model in _models(members)},
    }


def as_tables(app: str, state: str, message: str, deployments: Mapping[str, Any], members: Sequence[Member]) -> None:
    """Print the state as tables."""
    click.echo(f"{app}: {state.lower()}{f' ({message.splitlines()[-1]})' if message else ''}")
    rows = [("deployment", "state", "replicas")]
    for name, one in sorted(deployments.items()):
        replicas = ", ".join(f"{count} {what.lower()}" for what, count in sorted(one["replicas"].items()))
        rows.append((name, one["state"].lower(), replicas))
    print_columns(rows)
    if fronts := _fronts(members):
        click.echo()
        print_columns([("gateway", "router", "node"), *((one.url, one.router, one.node) for one in fronts)])
    if workers := [one for one in members if isinstance(one, WorkerMember)]:
        click.echo()
        print_columns([("worker", "model", "address", "CPUs", "pid", "restarts", "state"), *map(_row, workers)])
    for model in _models(members):
        if signal := merged(fronts, model):
            click.echo()
            values = ", ".join(f"{name} {value:.2f}" for name, value in sorted(signal.items()) if name != "workers")
            click.echo(f"{model}: {values}")


def _row(worker: WorkerMember) -> tuple[str, ...]:
    pid = "-" if worker.pid is None else str(worker.pid)
    state = "draining" if worker.is_draining else "serving"
    cpus = format_list(worker.cpus)
    return worker.worker_id, worker.model, worker.address, cpus, pid, str(worker.restarts), state


def _fronts(members: Sequence[Member]) -> list[Front]:
    return [one for one in members if isinstance(one, Front)]


def _models(members: Sequence[Member]) -> list[str]:
    """The models of workers, and those that routers know although they have no worker."""
    of_workers = {one.model for one in members if isinstance(one, WorkerMember)}
    return sorted(of_workers.union(*(front.signals for front in _fronts(members))))
