"""The status of the models, for clients of OpenVINO Model Server."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.gateway.edge.endpoint import Endpoint, Operation
from headrace.gateway.edge.exchange import Exchange
from headrace.gateway.edge.wire import encode
from headrace.gateway.operations.answers import Config, ModelStatus, VersionError, VersionStatus
from headrace.gateway.services import Services
from headrace.gateway.text.listing import ListedModel
from headrace.protos.status import Reason, StatusError

# The statuses of OpenVINO Model Server.
_RELOADED, _UNCHANGED, _NOT_RELOADED = 201, 200, 412
_STATES = {
    "unloaded": "END",
    "loading": "LOADING",
    "loaded": "AVAILABLE",
    "unloading": "UNLOADING",
    "failed": "LOADING",
}


def endpoints(services: Services) -> Sequence[Endpoint]:
    """GET /v1/config, and POST /v1/config/reload."""

    async def states() -> bytes:
        models = await services.models.overview()
        return encode({model.name: ModelStatus([_version(model)]) for model in models})

    async def config(exchange: Exchange) -> None:
        await exchange.respond(await states())

    async def reload(exchange: Exchange) -> None:
        try:
            done = await services.host.reload()
        except StatusError as error:
            if error.reason is not Reason.INVALID_FIELD:
                raise
            await exchange.respond(encode({"error": error.message}), status=_NOT_RELOADED)
            return
        await services.models.refresh()
        if done.problems:
            await exchange.respond(encode({"error": "; ".join(done.problems)}), status=_NOT_RELOADED)
        else:
            await exchange.respond(await states(), status=_RELOADED if done.has_changed else _UNCHANGED)

    status = Operation("Status of the models, in the format of OpenVINO Model Server", Config)
    changed = Operation("Serve the models of the changed configuration, as OpenVINO Model Server does", Config)
    return [
        Endpoint("GET", "/v1/config", "config", config, status),
        Endpoint("POST", "/v1/config/reload", "config", reload, changed),
    ]


def _version(model: ListedModel) -> VersionStatus:
    status = VersionError("UNKNOWN", model.problem) if model.problem else VersionError("OK", "OK")
    return VersionStatus(state=_STATES[model.state], status=status)
