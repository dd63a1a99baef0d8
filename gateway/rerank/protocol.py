"""Rerank and score as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.protocol import OpenProtocol, Protocol, Setup
from headrace.gateway.rerank import endpoints
from headrace.gateway.rerank.fields import TABLES


class _Rerank(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        self.endpoints = endpoints.endpoints(setup.services)


PROTOCOL = Protocol(_Rerank, fields=TABLES)
