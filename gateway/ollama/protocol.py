"""Ollama's API as a protocol of the gateway."""

from __future__ import annotations

import click

from headrace.gateway.ollama.endpoints import endpoints
from headrace.gateway.ollama.fields import TABLES
from headrace.gateway.ollama.managing import Managing
from headrace.gateway.protocol import OpenProtocol, Protocol, Setup


class OpenOllama(OpenProtocol):
    """Ollama's API while the gateway runs."""

    def __init__(self, setup: Setup) -> None:
        """Whether clients may change the host's models is a flag."""
        services = setup.services
        self._managing = Managing(services.models, services.host, is_allowed=setup.flags["ollama_manage"])
        super().__init__(endpoints(services, self._managing))

    async def close(self) -> None:
        """End what runs in the background."""
        await self._managing.close()


PROTOCOL = Protocol(
    OpenOllama,
    fields=TABLES,
    options=(
        click.Option(
            ["--ollama-manage/--no-ollama-manage"],
            default=False,
            help="Let clients of Ollama's API name models (copy, create, delete), and unload those that requests load "
            "(keep_alive).",
        ),
    ),
)
