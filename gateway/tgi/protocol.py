"""The API of Text Generation Inference as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.protocol import OpenProtocol, Protocol
from headrace.gateway.tgi.endpoints import endpoints
from headrace.gateway.tgi.fields import TABLES

PROTOCOL = Protocol(lambda setup: OpenProtocol(endpoints(setup.services)), fields=TABLES)
