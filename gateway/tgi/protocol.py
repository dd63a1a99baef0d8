"""The API of Text Generation Inference as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.protocol import OpenProtocol, Protocol, Setup
from headrace.gateway.tgi import endpoints
from headrace.gateway.tgi.fields import TABLES


class _Tgi(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        self.endpoints = endpoints.endpoints(setup.services)


PROTOCOL = Protocol(_Tgi, fields=TABLES)
