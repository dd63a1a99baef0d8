"""The OpenAI API as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.chat.generation import Plan
from headrace.gateway.openai.endpoints import Plans, endpoints
from headrace.gateway.openai.fields import TABLES
from headrace.gateway.protocol import OpenProtocol, Protocol, Setup


class _OpenAI(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        super().__init__(endpoints(setup.services))
        self._plans = Plans(setup.services)

    async def plan_of(self, path: str, body: bytes) -> Plan | None:
        return await self._plans.of(path, body)


PROTOCOL = Protocol(_OpenAI, fields=TABLES)
