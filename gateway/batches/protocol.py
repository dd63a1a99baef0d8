"""Files and batches as a protocol of the gateway: their endpoints, their store, and the work on batches."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import click

from headrace.common.flags import FiniteRange
from headrace.gateway.batches.endpoints import LINE_ENDPOINTS, endpoints
from headrace.gateway.batches.fields import TABLES
from headrace.gateway.batches.files import DAY_S, MIB, Bounds, Files
from headrace.gateway.batches.journal import LEASE_S
from headrace.gateway.batches.runner import BatchRunner
from headrace.gateway.batches.store import BatchStore
from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.protocol import CannotServeError, OpenProtocol, Protocol, Setup

DEFAULT_LINES = 32
_DEFAULT = Bounds()


class OpenBatches(OpenProtocol):
    """Files and batches while the gateway runs."""

    def __init__(self, runner: BatchRunner | None, files: Files | None, bounds: Bounds) -> None:
        """Without a store, `runner` and `files` are None."""
        super().__init__(endpoints(runner, files, bounds))
        self._runner = runner

    def meet(self, endpoints: Sequence[Endpoint]) -> None:
        """As `OpenProtocol.meet`."""
        if self._runner is not None:
            by_path = {endpoint.path: endpoint for endpoint in endpoints if endpoint.method == "POST"}
            self._runner.meet({path: by_path[path] for path in LINE_ENDPOINTS if path in by_path})

    async def run(self) -> None:
        """Run batches."""
        if self._runner is None:
            await asyncio.Event().wait()
        else:
            await self._runner.run()

    async def drain(self, timeout_s: float) -> None:
        """Let running lines finish within this time, and leave the others to other gateways."""
        if self._runner is not None:
            await self._runner.drain(timeout_s)


def _open(setup: Setup) -> OpenBatches:
    flags: Mapping[str, Any] = setup.flags
    bounds = Bounds(
        flags["batch_file_mb"] * MIB,
        flags["batch_tenant_mb"] * MIB,
        flags["batch_tenant_max"],
        flags["batch_max_lines"],
        retention_s=round(flags["batch_retention_days"] * DAY_S),
    )
    place = flags["batch_store"]
    if place is None:
        return OpenBatches(None, None, bounds)
    try:
        store = BatchStore(place)
    except ValueError as error:
        raise CannotServeError(
            f"--batch-store {place[:200]!r} cannot be used: {error}; name a directory, or a bucket such as s3://NAME"
        ) from None
    files = Files(store, bounds)
    runner = BatchRunner(
        store,
        files,
        bounds,
        setup.admission,
        setup.services.metrics,
        flags["batch_lines"],
        flags["batch_lease_s"],
    )
    return OpenBatches(runner, files, bounds)


PROTOCOL = Protocol(
    _open,
    fields=TABLES,
    options=(
        click.Option(
            ["--batch-store"],
            envvar="HEADRACE_GATEWAY_BATCH_STORE",
            metavar="DIR|URL",
            help="Where files and batches are kept: a directory, or a bucket (s3://, gs://, az://), which gateways may "
            "share.  [default: none, there are no batches]",
        ),
        click.Option(
            ["--batch-lines"],
            default=DEFAULT_LINES,
            type=click.IntRange(min=1, max=4096),
            help="Number of batch lines that this gateway runs at a time.",
        ),
        click.Option(
            ["--batch-max-lines"],
            default=_DEFAULT.max_lines,
            type=click.IntRange(min=1, max=1_000_000),
            help="Maximum number of lines of a batch.",
        ),
        click.Option(
            ["--batch-file-mb"],
            default=_DEFAULT.max_file_bytes // MIB,
            type=click.IntRange(min=1),
            help="Maximum size of an uploaded file, in MiB.",
        ),
        click.Option(
            ["--batch-tenant-mb"],
            default=_DEFAULT.max_tenant_bytes // MIB,
            type=click.IntRange(min=1),
            help="Maximum MiB of files of each tenant; further uploads are refused.",
        ),
        click.Option(
            ["--batch-tenant-max"],
            default=_DEFAULT.max_tenant_batches,
            type=click.IntRange(min=1),
            help="Maximum number of batches of each tenant that have not ended.",
        ),
        click.Option(
            ["--batch-retention-days"],
            default=_DEFAULT.retention_s / DAY_S,
            type=FiniteRange(min=0.01, max=3650),
            help="Days for which files and batches are kept.",
        ),
        click.Option(
            ["--batch-lease", "batch_lease_s"],
            default=LEASE_S,
            type=FiniteRange(min=1, max=600),
            help="Seconds after which other gateways of the same store take over the lines of one that died.",
        ),
    ),
)
