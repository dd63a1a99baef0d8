"""Health and version of the gateway, and the metrics of the gateway and the fleet."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from msgspec import UNSET

from headrace.common.stores.redis_link import word_for
from headrace.common.version import headrace_version
from headrace.gateway.edge.endpoint import Endpoint, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import encode
from headrace.gateway.operations.answers import Health, Version
from headrace.gateway.services import Services
from headrace.gateway.telemetry.metrics import CONTENT_TYPE
from headrace.protos.router_pb2 import REDIS_STATE_UNSPECIFIED, RedisState
from headrace.protos.status import StatusError

_LOG = logging.getLogger(__name__)

RedisStates: TypeAlias = Callable[[], Mapping[str, RedisState]]


def endpoints(services: Services, redis_states: Sequence[RedisStates]) -> Sequence[Endpoint]:
    """The endpoints GET /metrics and /version, and the health endpoints, also under the paths of other servers.

    `redis_states` returns the state of each Redis by purpose, except the one for leases.
    """
    own = _State(services, redis_states)
    metrics = Operation("Metrics of gateway and workers, for Prometheus")
    live = Operation("Whether the gateway runs", Health)
    ready = Operation("Whether a model is ready", Health, unavailable=Health)
    version = Operation("The version of the gateway", Version)
    ready_paths = ("/health/ready", "/v2/health/ready", "/health", "/v1/health", "/ping")
    return [
        Endpoint("GET", "/metrics", "metrics", own.show_metrics, metrics),
        *under(("/health/live", "/v2/health/live"), Endpoint("GET", "", "health", own.live, live, is_open=True)),
        *under(ready_paths, Endpoint("GET", "", "health", own.ready, ready, is_open=True)),
        Endpoint("GET", "/version", "version", own.version, version, is_open=True),
    ]


class _State:
    def __init__(self, services: Services, redis_states: Sequence[RedisStates]) -> None:
        self._services = services
        self._of_protocols = redis_states

    async def show_metrics(self, exchange: Exchange) -> None:
        try:
            workers = await self._services.upstream.list_workers()
        except StatusError as error:
            _LOG.debug("the workers cannot be listed: %s", error.message)
            workers = []
        text = self._services.metrics.exposition(workers, self._services.host.models.values())
        await exchange.respond(text, content_type=CONTENT_TYPE.encode())

    async def version(self, exchange: Exchange) -> None:
        await exchange.respond(encode(Version(headrace_version())))

    def _redis_states(self) -> dict[str, str]:
        """The state of each Redis in use, by purpose."""
        states = {"leases": self._services.upstream.redis}
        for states_of in self._of_protocols:
            states |= states_of()
        return {name: word_for(state) for name, state in states.items() if state != REDIS_STATE_UNSPECIFIED}

    async def live(self, exchange: Exchange) -> None:
        await exchange.respond(encode(Health("live")))

    async def ready(self, exchange: Exchange) -> None:
        ready = self._services.models.ready
        health = Health("ready" if ready else "no model is ready", self._redis_states() or UNSET)
        await exchange.respond(encode(health), status=200 if ready else 503)
