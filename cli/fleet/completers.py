"""Completes the workers and models of a fleet. What cannot be found within a second is not offered."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click

from headrace.cli.completion import quietly

_PATIENCE_S = 1.0


def _fleet_of(ctx: click.Context) -> Any:
    """The answer of the gateway that --url names, or of the only one on this host."""
    from headrace.cli.fleet.fleet_access import ApiAccess
    from headrace.cli.fleet.gateway_access import FleetClient, default_url

    access = ApiAccess(ctx.params.get("api_key"), ctx.params.get("ca_file"))
    if (path := ctx.params.get("admin_key_file")) is not None:
        access = ApiAccess(Path(path).read_text().strip(), access.ca_file)
    with FleetClient(ctx.params.get("url") or default_url(), access, timeout_s=_PATIENCE_S) as client:
        return client.picture()


def _workers(ctx: click.Context) -> Iterable[str]:
    if not ctx.params.get("url"):
        from headrace.cli.fleet.run_state import running_serves

        return [each.name for record in running_serves() for each in record.processes if each.role == "worker"]
    return [worker.worker_id for worker in _fleet_of(ctx).workers]


def _served_models(ctx: click.Context) -> Iterable[str]:
    return [model["id"] for model in _fleet_of(ctx).models]


complete_workers = quietly(_workers)
"""Workers of the fleet of --url, or of this host."""
complete_served_models = quietly(_served_models)
"""Models of the gateway of --url, or of that on this host."""
