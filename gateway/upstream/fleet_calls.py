"""What operators ask of a fleet: drain a worker, explain a placement. Both are answered by a router."""

from __future__ import annotations

import grpc

from headrace.gateway.upstream.address import Address
from headrace.protos.router_pb2 import DrainWorkerRequest, DrainWorkerResponse, ExplainRequest, ExplainResponse
from headrace.protos.status import Reason, StatusError, details_of

_EXPLAIN_TIMEOUT_S = 10.0
# Added to the time that a worker may take, so that its answer arrives.
_SLACK_S = 2.0


async def drain_worker(endpoint: Address, request: DrainWorkerRequest, wait_s: float) -> DrainWorkerResponse:
    """Drain a worker of the router's fleet, and wait for its requests for `wait_s`. Raises grpc.aio.AioRpcError, or
    `StatusError` (UNSUPPORTED) if there is no router; so does `explain`."""
    try:
        response: DrainWorkerResponse = await endpoint.router.DrainWorker(request, timeout=wait_s + _SLACK_S)
    except grpc.aio.AioRpcError as error:
        raise _no_router(endpoint, error) from None
    return response


async def explain(endpoint: Address, request: ExplainRequest) -> ExplainResponse:
    """The router's placement of a request."""
    try:
        response: ExplainResponse = await endpoint.router.Explain(request, timeout=_EXPLAIN_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise _no_router(endpoint, error) from None
    return response


def _no_router(endpoint: Address, error: grpc.aio.AioRpcError) -> Exception:
    """The error, or a readable one for an address without the Router service."""
    if error.code() is grpc.StatusCode.UNIMPLEMENTED and details_of(error) is None:
        problem = f"{endpoint.address} is a worker or an older router; this needs a router of this version"
        return StatusError(Reason.UNSUPPORTED, problem)
    return error
