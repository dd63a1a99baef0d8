"""Ollama's API as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.ollama.endpoints import endpoints
from headrace.gateway.ollama.fields import TABLES
from headrace.gateway.protocol import OpenProtocol, Protocol

PROTOCOL = Protocol(lambda setup: OpenProtocol(endpoints(setup.services)), fields=TABLES)
