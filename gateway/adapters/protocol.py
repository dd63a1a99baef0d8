"""Loading and unloading adapters as a protocol of the gateway."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.gateway.adapters.endpoints import AdminKey, endpoints
from headrace.gateway.adapters.types import AdapterInfos, LoadRequest, UnloadRequest
from headrace.gateway.edge.description import API, Operation
from headrace.gateway.protocol import CannotServeError, OpenProtocol, Protocol, Setup

OPERATIONS = (
    Operation("POST", "/load_lora_adapter", "Load a LoRA adapter", None, (LoadRequest,), prefixes=API),
    Operation("POST", "/unload_lora_adapter", "Unload a LoRA adapter", None, (UnloadRequest,), prefixes=API),
    Operation("GET", "/lora_adapters", "The LoRA adapters and where they are", AdapterInfos, prefixes=API),
)
_OPTIONS = (
    click.Option(
        ["--admin-key-file"],
        type=click.Path(path_type=Path),
        envvar="HEADRACE_ADMIN_KEY_FILE",
        help="File with the key for loading and unloading LoRA adapters over HTTP. Without it they cannot be.",
    ),
)


class _Adapters(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        try:
            admin_key = AdminKey(setup.flags["admin_key_file"])
        except ValueError as error:
            raise CannotServeError(str(error)) from None
        self.endpoints = endpoints(setup.services, admin_key)


PROTOCOL = Protocol(_Adapters, OPERATIONS, options=_OPTIONS)
