"""`python -m headrace.ray`: starts, shows and stops a fleet on a running Ray cluster.

If the flags are wrong, it prints one sentence on standard error and exits with status 2; if the cluster cannot be
reached, or the fleet does not start, with status 1.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from headrace.common import commands
from headrace.common.commands import CommandError, CommandFailed
from headrace.common.flags import FiniteRange
from headrace.common.worker_flags import WORKER_FLAGS, serve_options
from headrace.ray.settings import (
    GATEWAY_DRAIN_S,
    RESOURCE,
    WORKER_DRAIN_S,
    Fleet,
    Model,
    Scaling,
    SettingsError,
    fleet_of,
)

if TYPE_CHECKING:
    from headrace.ray.directory import Member

_APP = "headrace"
_POLL_S = 0.5
_ASK_TIMEOUT_S = 10.0
_DEFAULTS = Scaling()

_app_option = click.option("--app", default=_APP, show_default=True, help="Name of the application in Ray Serve.")
_address_option = click.option(
    "--address",
    envvar="RAY_ADDRESS",
    help="Address of the Ray cluster, as `ray start` prints it.  [default: the one that runs here]",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def main() -> None:
    """Run a fleet on a Ray cluster."""


@main.command()
@click.argument("models", nargs=-1, required=True)
@click.option("--name", help="Name of the model in requests, if there is one model.  [default: the model's own]")
@click.option(
    "--min-workers",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Workers of each model. With 0, the first request after a pause waits until a worker has started.",
)
@click.option(
    "--max-workers", type=click.IntRange(1), help="Workers that load may bring.  [default: as many as --min-workers]"
)
@click.option(
    "--numa-nodes",
    type=click.IntRange(1),
    help="NUMA nodes of one host for each worker.  [default: one for each rank of --tensor-parallel]",
)
@click.option("--resource", default=RESOURCE, show_default=True, help="Ray's resource that stands for NUMA nodes.")
@click.option(
    "--cpus", type=FiniteRange(0), default=0.0, show_default=True, help="CPUs that each worker takes of Ray's."
)
@click.option(
    "--queue-wait",
    type=FiniteRange(0, min_open=True),
    default=_DEFAULTS.queue_wait_s,
    show_default=True,
    help="Seconds that an arriving request may be expected to wait; above, there are more workers.",
)
@click.option(
    "--kv-pressure",
    type=FiniteRange(0, min_open=True),
    default=_DEFAULTS.kv_pressure,
    show_default=True,
    help="Part of the KV blocks that requests may use; above, there are more workers.",
)
@click.option(
    "--down-delay",
    type=FiniteRange(0),
    default=_DEFAULTS.down_delay_s,
    show_default=True,
    help="Seconds for which fewer workers must be enough before one is stopped.",
)
@click.option("--gateways", type=click.IntRange(1), default=1, show_default=True, help="Gateways, each with a router.")
@click.option("--host", help="Address on which gateways listen.  [default: the node's address in Ray]")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=8000,
    show_default=True,
    help="Port of gateways; 0: any free one.",
)
@click.option(
    "--worker-drain",
    type=FiniteRange(0),
    default=WORKER_DRAIN_S,
    show_default=True,
    help="Seconds that requests have to finish when a worker stops. The rest continue on other workers.",
)
@click.option(
    "--gateway-drain",
    type=FiniteRange(0),
    default=GATEWAY_DRAIN_S,
    show_default=True,
    help="Seconds that answers have to finish when a gateway stops.",
)
@click.option("--join-token-file", help="File on every node with a secret by which the processes know each other.")
@click.option("--tls-dir", help="Directory on every node with certificates, for mutual TLS between the processes.")
@click.option("--api-keys", help="File on every node with the API keys of gateways.")
@click.option("--admin-key-file", help="File on every node with the admin key of gateways, for headrace drain --url.")
@click.option("--wait/--no-wait", default=True, show_default=True, help="Wait until the fleet serves.")
@_app_option
@_address_option
@serve_options
def up(models: tuple[str, ...], app: str, address: str | None, wait: bool, **options: Any) -> None:
    """Start a fleet for MODELS, or change the running one.

    If settings of workers have changed, the workers are replaced one by one.

    Nodes offer NUMA nodes to workers as a resource: `ray start --resources="$(headrace ray resources)"` on each host.
    """
    try:
        fleet = fleet_of(_fleet_of_options(models, options))
    except SettingsError as error:
        raise CommandError(str(error)) from None
    with _connected(address) as out:
        from ray import serve

        from headrace.ray.app import build_app, describes
        from headrace.ray.nodes import offered

        _check_offer({model.resource for model in fleet.models}, offered)
        click.echo(f"{app}: {describes(fleet)}", err=True)
        if not _is_serving():
            # Clients reach the gateways themselves.
            serve.start(proxy_location="Disabled")
        target = serve.RunTarget(build_app(fleet), name=app, route_prefix=f"/{app}")
        serve.run_many([target], wait_for_applications_running=False)
        if wait:
            _wait_until_running(app)
            for front in _fronts(app):
                click.echo(f"ready: {front}/v1", file=out)


def _fleet_of_options(models: tuple[str, ...], options: dict[str, Any]) -> Fleet:
    if options["name"] is not None and len(models) > 1:
        raise CommandError("--name is for one model; leave it out, or start the models one by one")
    flags = {
        flag.option: _plain(value) for flag in WORKER_FLAGS if (value := options.get(flag.option)) not in (None, ())
    }
    scaling = Scaling(
        queue_wait_s=options["queue_wait"], kv_pressure=options["kv_pressure"], down_delay_s=options["down_delay"]
    )
    files = {"--api-keys": options["api_keys"], "--admin-key-file": options["admin_key_file"]}
    gateway_args = tuple(part for flag, path in files.items() if path is not None for part in (flag, path))
    return Fleet(
        models=tuple(
            Model(
                _absolute(model),
                name=options["name"],
                min_workers=options["min_workers"],
                max_workers=options["max_workers"],
                numa_nodes=options["numa_nodes"],
                cpus=options["cpus"],
                resource=options["resource"],
                flags=flags,
                scaling=scaling,
            )
            for model in models
        ),
        gateways=options["gateways"],
        host=options["host"],
        port=options["port"],
        worker_drain_s=options["worker_drain"],
        gateway_drain_s=options["gateway_drain"],
        gateway_args=gateway_args,
        join_token_file=options["join_token_file"],
        tls_dir=options["tls_dir"],
    )


def _plain(value: Any) -> Any:
    """A value that every node understands. Paths become absolute."""
    if isinstance(value, tuple):
        return tuple(map(_plain, value))
    return str(value.absolute()) if isinstance(value, Path) else value


def _absolute(model: str) -> str:
    """The absolute path of a directory, because actors run elsewhere. Other names stay as they are."""
    return os.path.abspath(model) if os.sep in model and os.path.isdir(model) else model


@main.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@_app_option
@_address_option
def status(as_json: bool, app: str, address: str | None) -> None:
    """Show the gateways and workers of a fleet.

    The output has the node of each, and the signals that scaling follows.
    """
    with _connected(address) as out:
        from headrace.ray.report import as_object, as_tables

        state, message, deployments = _state(app)
        members = _members(app)
        if as_json:
            click.echo(json.dumps(as_object(app, state, message, deployments, members), indent=2), file=out)
        else:
            with contextlib.redirect_stdout(out):
                as_tables(app, state, message, deployments, members)


@main.command()
@_app_option
@_address_option
def down(app: str, address: str | None) -> None:
    """Stop a fleet when its requests have finished.

    Requests that take longer than --worker-drain or --gateway-drain of `up` are cut off.
    """
    with _connected(address):
        from ray import serve

        _state(app)
        click.echo(f"{app}: stopping", err=True)
        serve.delete(app)
        if not serve.status().applications:
            serve.shutdown()


@main.command()
@click.option("--resource", default=RESOURCE, show_default=True, help="Name of the resource.")
def resources(resource: str) -> None:
    """Print this host's NUMA nodes as a Ray resource.

    The output is the value for `ray start --resources`.
    """
    from headrace.cli.serving.placement import place_workers
    from headrace.cli.serving.topology import read_topology

    # One for each NUMA node with memory and cores.
    click.echo(json.dumps({resource: len(place_workers(read_topology()))}))


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[TextIO]:
    """Context manager: a connection to the cluster. Yields the stream for output; meanwhile, standard output goes to
    standard error, because Ray prints messages about dead nodes there. Raises CommandError without Ray, CommandFailed
    if there is no cluster."""
    try:
        import ray
    except ImportError:
        raise CommandError("Ray is not installed; install headrace[ray] on every node") from None
    try:
        ray.init(address or "auto", logging_level="warning", log_to_driver=False, namespace="serve")
    except ConnectionError as error:
        where = f"at {address}" if address else "here"
        raise CommandFailed(
            f"no Ray cluster can be reached {where} ({str(error).partition(chr(10))[0][:200]}); start one with "
            'ray start --head --resources="$(headrace ray resources)", or name one with --address'
        ) from None
    logging.getLogger("ray.serve").setLevel(logging.WARNING)
    try:
        out = sys.stdout
        with contextlib.redirect_stdout(sys.stderr):
            yield out
    finally:
        ray.shutdown()


def _check_offer(wanted: set[str], offered: Any) -> None:
    """Raise CommandError if no node has a resource: Ray would wait for one forever."""
    for resource in sorted(wanted):
        if not offered(resource):
            raise CommandError(
                f"no node of the cluster has the resource {resource!r}, by which workers get their NUMA nodes; start "
                'each node with ray start ... --resources="$(headrace ray resources)"'
            )


def _is_serving() -> bool:
    from ray import serve

    return bool(serve.status().proxies or serve.status().applications)


def _wait_until_running(app: str) -> None:
    """Wait until the application runs. Raises CommandFailed with the reason if it does not."""
    told = ""
    while True:
        state, message, _ = _state(app)
        if state == "RUNNING":
            return
        if state in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise CommandFailed(f"the fleet does not start: {_last_line(message)}")
        if message and message != told:
            click.echo(f"{app}: {_last_line(message)}", err=True)
            told = message
        time.sleep(_POLL_S)


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    named = [line for line in lines if "Error: " in line]
    return (named or lines or ["no reason given"])[-1]


def _state(app: str) -> tuple[str, str, dict[str, Any]]:
    """The state of an application, its message, and its deployments by name. Raises CommandFailed if there is none."""
    from ray import serve

    found = serve.status().applications.get(app)
    if found is None:
        raise CommandFailed(f"no application {app!r} runs on this cluster; start one with headrace ray up")
    deployments = {
        name: {"state": one.status.value, "replicas": dict(one.replica_states), "message": one.message}
        for name, one in found.deployments.items()
    }
    messages = [found.message, *(one["message"] for one in deployments.values())]
    return found.status.value, next((text for text in messages if text), ""), deployments


def _members(app: str) -> list[Member]:
    """The members of a fleet; none if the directory does not answer."""
    from ray import serve

    from headrace.ray.app import DIRECTORY

    try:
        handle = serve.get_deployment_handle(DIRECTORY, app)
        found: list[Member] = handle.members.remote().result(timeout_s=_ASK_TIMEOUT_S)
    except Exception as error:  # of Ray, which has many
        click.echo(f"{app}: the directory does not answer: {str(error).partition(chr(10))[0]}", err=True)
        return []
    return found


def _fronts(app: str) -> list[str]:
    return [asdict(member)["url"] for member in _members(app) if hasattr(member, "url")]


if __name__ == "__main__":
    sys.exit(commands.run(main, "headrace ray"))
