"""The Messages API as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.anthropic.endpoints import endpoints
from headrace.gateway.anthropic.fields import TABLES
from headrace.gateway.protocol import OpenProtocol, Protocol

PROTOCOL = Protocol(lambda setup: OpenProtocol(endpoints(setup.services)), fields=TABLES)
