"""Ollama's API as a protocol of the gateway."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.common.flags import FiniteRange
from headrace.gateway.ollama.blobs import Blobs
from headrace.gateway.ollama.endpoints import endpoints
from headrace.gateway.ollama.fields import TABLES
from headrace.gateway.ollama.managing import Managing
from headrace.gateway.protocol import CannotServeError, OpenProtocol, Protocol, Setup


class OpenOllama(OpenProtocol):
    """Ollama's API while the gateway runs."""

    def __init__(self, setup: Setup) -> None:
        """Whether clients may change the host's models is a flag."""
        services = setup.services
        flags = setup.flags
        blobs = None if flags["ollama_blobs"] is None else _blobs(flags["ollama_blobs"], flags["ollama_blobs_gb"])
        self._managing = Managing(services.models, services.host, is_allowed=flags["ollama_manage"], blobs=blobs)
        super().__init__(endpoints(services, self._managing))

    async def close(self) -> None:
        """End what runs in the background."""
        await self._managing.close()


def _blobs(folder: Path, size_gb: float) -> Blobs:
    try:
        return Blobs(folder, round(size_gb * (1 << 30)))
    except OSError as error:
        raise CannotServeError(f"--ollama-blobs: {folder} cannot be made: {error.strerror}") from None


PROTOCOL = Protocol(
    OpenOllama,
    fields=TABLES,
    options=(
        click.Option(
            ["--ollama-manage/--no-ollama-manage"],
            default=False,
            help="Let clients of Ollama's API name models (copy, create), delete what they have made, and unload "
            "models that requests load (keep_alive).",
        ),
        click.Option(
            ["--ollama-blobs"],
            type=click.Path(path_type=Path),
            metavar="DIR",
            help="With --ollama-manage, also let them create models from GGUF files, which they upload into this "
            "directory. The host of the models must see it at the same path.  [default: none]",
        ),
        click.Option(
            ["--ollama-blobs-gb"],
            default=64.0,
            type=FiniteRange(min=0, min_open=True),
            help="Maximum GiB of these files together. One is removed when its model is made, or after a day.",
        ),
    ),
)
