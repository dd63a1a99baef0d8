"""The API of llama.cpp's server as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.llamacpp.endpoints import endpoints
from headrace.gateway.llamacpp.fields import TABLES
from headrace.gateway.protocol import OpenProtocol, Protocol

PROTOCOL = Protocol(lambda setup: OpenProtocol(endpoints(setup.services)), fields=TABLES)
