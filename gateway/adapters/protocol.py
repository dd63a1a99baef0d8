"""Loading and unloading adapters and models as a protocol of the gateway."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.gateway.adapters import model_endpoints
from headrace.gateway.adapters.admin_key import AdminKey
from headrace.gateway.adapters.endpoints import endpoints
from headrace.gateway.adapters.types import (
    AdapterInfos,
    LoadModelRequest,
    LoadRequest,
    ModelState,
    UnloadModelRequest,
    UnloadRequest,
)
from headrace.gateway.edge.description import API, Operation
from headrace.gateway.protocol import CannotServeError, OpenProtocol, Protocol, Setup

OPERATIONS = (
    Operation("POST", "/load_lora_adapter", "Load a LoRA adapter", None, (LoadRequest,), prefixes=API),
    Operation("POST", "/unload_lora_adapter", "Unload a LoRA adapter", None, (UnloadRequest,), prefixes=API),
    Operation("POST", "/load_model", "Load a model of the host", ModelState, (LoadModelRequest,), prefixes=API),
    Operation("POST", "/unload_model", "Unload a model of the host", ModelState, (UnloadModelRequest,), prefixes=API),
    Operation("GET", "/lora_adapters", "The LoRA adapters and where they are", AdapterInfos, prefixes=API),
)
_OPTIONS = (
    click.Option(
        ["--admin-key-file"],
        type=click.Path(path_type=Path),
        envvar="HEADRACE_ADMIN_KEY_FILE",
        help="File with the key for loading and unloading models and LoRA adapters over HTTP. Default: none, so that "
        "they cannot be.",
    ),
)


class _Adapters(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        try:
            admin_key = AdminKey(setup.flags["admin_key_file"])
        except ValueError as error:
            raise CannotServeError(str(error)) from None
        services = setup.services
        self.endpoints = [*endpoints(services, admin_key), *model_endpoints.endpoints(services, admin_key)]


PROTOCOL = Protocol(_Adapters, OPERATIONS, options=_OPTIONS)
