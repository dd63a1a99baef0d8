"""The OpenAI API as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.openai.endpoints import endpoints
from headrace.gateway.openai.fields import TABLES
from headrace.gateway.protocol import OpenProtocol, Protocol

PROTOCOL = Protocol(lambda setup: OpenProtocol(endpoints(setup.services)), fields=TABLES)
