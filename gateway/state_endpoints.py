"""Whether the gateway can be asked, and its metrics with those of the fleet."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace.gateway.endpoint import Endpoint, Services
from headrace.gateway.exchange import Exchange
from headrace.gateway.metrics import CONTENT_TYPE
from headrace.gateway.openai_answers import encode
from headrace.protos.status import StatusError

_LOG = logging.getLogger(__name__)


def endpoints(services: Services) -> Sequence[Endpoint]:
    """GET /metrics, /health/live and /health/ready; the latter two also where KServe has them."""
    own = _State(services)
    return [
        Endpoint("GET", "/metrics", "metrics", own.show_metrics),
        *(Endpoint("GET", f"{prefix}/health/live", "health", own.live, is_open=True) for prefix in ("", "/v2")),
        *(Endpoint("GET", f"{prefix}/health/ready", "health", own.ready, is_open=True) for prefix in ("", "/v2")),
    ]


class _State:
    def __init__(self, services: Services) -> None:
        self._services = services

    async def show_metrics(self, exchange: Exchange) -> None:
        try:
            workers = await self._services.upstream.list_workers()
        except StatusError as error:
            _LOG.debug("the workers cannot be listed: %s", error.message)
            workers = []
        await exchange.respond(self._services.metrics.exposition(workers), content_type=CONTENT_TYPE.encode())

    async def live(self, exchange: Exchange) -> None:
        await exchange.respond(encode({"status": "live"}))

    async def ready(self, exchange: Exchange) -> None:
        ready = self._services.models.ready
        body = {"status": "ready" if ready else "no model can be asked for"}
        await exchange.respond(encode(body), status=200 if ready else 503)
