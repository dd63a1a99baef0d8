"""Rerank and score as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.protocol import OpenProtocol, Protocol
from headrace.gateway.rerank.endpoints import endpoints
from headrace.gateway.rerank.fields import TABLES

PROTOCOL = Protocol(lambda setup: OpenProtocol(endpoints(setup.services)), fields=TABLES)
