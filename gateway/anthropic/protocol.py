"""The Messages API as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.anthropic import endpoints
from headrace.gateway.anthropic.fields import TABLES
from headrace.gateway.protocol import OpenProtocol, Protocol, Setup


class _Anthropic(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        self.endpoints = endpoints.endpoints(setup.services)


PROTOCOL = Protocol(_Anthropic, fields=TABLES)
