"""The protocols that the gateway serves. docs/reference/http-api.md has every field.

Each name is a folder of `gateway/`. To leave a protocol out, delete its folder and its line here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

from headrace.gateway.edge.endpoint import Endpoint
from headrace.gateway.operations import endpoints as operations
from headrace.gateway.protocol import OpenProtocol, Protocol
from headrace.gateway.services import Services

NAMES = (
    "openai",
    "rerank",
    "responses",
    "batches",
    "anthropic",
    "ollama",
    "tgi",
    "llamacpp",
    "kserve",
    "adapters",
    "grpc_text",
    "console",
)


def _load(name: str) -> Protocol:
    protocol = importlib.import_module(f"headrace.gateway.{name}.protocol").PROTOCOL
    assert isinstance(protocol, Protocol), f"headrace.gateway.{name}.protocol.PROTOCOL is no Protocol"
    return protocol


PROTOCOLS = {name: _load(name) for name in NAMES}
"""The protocols by name, in the order in which paths are matched."""


def endpoints(services: Services, opened: Sequence[OpenProtocol]) -> Sequence[Endpoint]:
    """All HTTP endpoints of the open protocols and for operators."""
    own = [endpoint for protocol in opened for endpoint in protocol.endpoints]
    for protocol in opened:
        protocol.meet(own)
    return operations.endpoints(services, [protocol.redis_states for protocol in opened], own)
