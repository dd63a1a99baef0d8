"""Ollama's API as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.ollama import embed_endpoints, endpoints, model_endpoints
from headrace.gateway.ollama.fields import TABLES
from headrace.gateway.protocol import OpenProtocol, Protocol, Setup


class _Ollama(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        self.endpoints = [
            *endpoints.endpoints(setup.services),
            *embed_endpoints.endpoints(setup.services),
            *model_endpoints.endpoints(setup.services),
        ]


PROTOCOL = Protocol(_Ollama, fields=TABLES)
