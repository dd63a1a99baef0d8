"""The services that all protocols share."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.gateway.chat.answering import Answering
from headrace.gateway.chat.generation import Generator
from headrace.gateway.chat.planning import Chats
from headrace.gateway.chat.shadowing import Shadows
from headrace.gateway.encoding.planning import Encodings
from headrace.gateway.encoding.running import EncodingRunner
from headrace.gateway.telemetry.metrics import Metrics
from headrace.gateway.text.models import Models
from headrace.gateway.upstream.model_host import ModelHost
from headrace.gateway.upstream.routers import Upstream


@dataclass(frozen=True, slots=True)
class Services:
    """The services that endpoints and gRPC services use."""

    models: Models
    chats: Chats
    shadows: Shadows
    generator: Generator
    answering: Answering
    encodings: Encodings
    encoding_runner: EncodingRunner
    upstream: Upstream
    host: ModelHost
    metrics: Metrics
