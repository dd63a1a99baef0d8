"""Health, version, metrics of gateway and fleet, the status of models in the format of OpenVINO Model Server, and the
OpenAPI document."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeAlias

from msgspec import UNSET, UnsetType

from headrace.common.stores.redis_link import word_for
from headrace.common.version import headrace_version
from headrace.gateway.edge.endpoint import Endpoint, Operation, under
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import Shape, encode
from headrace.gateway.operations.openapi import document
from headrace.gateway.services import Services
from headrace.gateway.text.models import ListedModel
from headrace.protos.router_pb2 import REDIS_STATE_UNSPECIFIED, RedisState
from headrace.protos.status import Reason, StatusError


class Health(Shape):
    """The state in a word or two, and that of each Redis that is used."""

    status: str
    redis: dict[str, str] | UnsetType = UNSET


class Version(Shape):
    """The version of the gateway."""

    version: str


class VersionError(Shape):
    """The error of a version of a model; there is never one."""

    error_code: str
    error_message: str


class VersionStatus(Shape, kw_only=True):
    """The state of a version."""

    version: str = "1"
    state: str
    status: VersionError


class ModelStatus(Shape):
    """The versions of a model; here there is one."""

    model_version_status: list[VersionStatus]


Config = dict[str, ModelStatus]
Document = dict[str, Any]


# The statuses of OpenVINO Model Server.
_UNCHANGED = 200
_RELOADED = 201
_NOT_RELOADED = 412
_STATES = {
    "unloaded": "END",
    "loading": "LOADING",
    "loaded": "AVAILABLE",
    "unloading": "UNLOADING",
    "failed": "LOADING",
}
_LOG = logging.getLogger(__name__)

RedisStates: TypeAlias = Callable[[], Mapping[str, RedisState]]


def endpoints(
    services: Services, redis_states: Sequence[RedisStates], others: Sequence[Endpoint]
) -> Sequence[Endpoint]:
    """Health, under the paths of other servers too, version, metrics, the status of models, and the OpenAPI document of
    these endpoints and `others`.

    `redis_states` returns the state of each Redis by purpose, except the one for leases.
    """
    own = _State(services, redis_states)
    metrics = Operation("Metrics of gateway and workers, for Prometheus")
    live = Operation("Whether the gateway runs", Health)
    ready = Operation("Whether a model is ready", Health, unavailable=Health)
    version = Operation("The version of the gateway", Version)
    status = Operation("Status of the models, in the format of OpenVINO Model Server", Config)
    changed = Operation("Serve the models of the changed configuration, as OpenVINO Model Server does", Config)
    ready_paths = ("/health/ready", "/v2/health/ready", "/health", "/v1/health", "/ping")
    own_document = Operation("This document", Document)
    described = [*others]
    described += [
        Endpoint("GET", "/metrics", "metrics", own.show_metrics, metrics),
        *under(("/health/live", "/v2/health/live"), Endpoint("GET", "", "health", own.live, live, is_open=True)),
        *under(ready_paths, Endpoint("GET", "", "health", own.ready, ready, is_open=True)),
        Endpoint("GET", "/version", "version", own.version, version, is_open=True),
        Endpoint("GET", "/v1/config", "config", own.config, status),
        Endpoint("POST", "/v1/config/reload", "config", own.reload, changed),
        Endpoint("GET", "/openapi.json", "openapi", _Document(described).show, own_document, is_open=True),
    ]
    return described


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
        block_sizes = {card.name: card.block_size for card in self._services.models.cards}
        hosted = self._services.host.models.values()
        accept = exchange.header("accept")
        text, content_type = self._services.metrics.exposition(workers, hosted, block_sizes, accept=accept)
        await exchange.respond(text, content_type=content_type.encode())

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

    # The statuses of OpenVINO Model Server.

    async def _states(self) -> bytes:
        models = await self._services.models.overview()
        return encode({model.name: ModelStatus([_version(model)]) for model in models})

    async def config(self, exchange: Exchange) -> None:
        await exchange.respond(await self._states())

    async def reload(self, exchange: Exchange) -> None:
        try:
            done = await self._services.host.reload()
        except StatusError as error:
            if error.reason is not Reason.INVALID_FIELD:
                raise
            await exchange.respond(encode({"error": error.message}), status=_NOT_RELOADED)
            return
        await self._services.models.refresh()
        if done.problems:
            await exchange.respond(encode({"error": "; ".join(done.problems)}), status=_NOT_RELOADED)
        else:
            await exchange.respond(await self._states(), status=_RELOADED if done.has_changed else _UNCHANGED)


def _version(model: ListedModel) -> VersionStatus:
    status = VersionError("UNKNOWN", model.problem) if model.problem else VersionError("OK", "OK")
    return VersionStatus(state=_STATES[model.state], status=status)


class _Document:
    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self._endpoints = endpoints

    @cached_property
    def _encoded(self) -> bytes:
        return encode(document(self._endpoints))

    async def show(self, exchange: Exchange) -> None:
        await exchange.respond(self._encoded)
