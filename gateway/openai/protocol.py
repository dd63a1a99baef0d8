"""The OpenAI API as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.openai import embedding_endpoints, endpoints, model_endpoints
from headrace.gateway.openai.fields import TABLES
from headrace.gateway.protocol import OpenProtocol, Protocol, Setup


class _OpenAi(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        self.endpoints = [
            *endpoints.endpoints(setup.services),
            *embedding_endpoints.endpoints(setup.services),
            *model_endpoints.endpoints(setup.services),
        ]


PROTOCOL = Protocol(_OpenAi, fields=TABLES)
