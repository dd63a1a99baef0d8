"""KServe's protocol as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.edge.grpc_edge import GrpcService
from headrace.gateway.kserve.endpoints import endpoints
from headrace.gateway.kserve.service import SERVICE_NAME, KserveService
from headrace.gateway.protocol import OpenProtocol, Protocol, Setup
from headrace.protos.kserve_pb2_grpc import add_GRPCInferenceServiceServicer_to_server as add

_OPEN = frozenset({"ServerLive", "ServerReady", "ServerMetadata"})
_READING = frozenset({"ModelReady", "ModelMetadata"})


def _opened(setup: Setup) -> OpenProtocol:
    service = GrpcService(SERVICE_NAME, KserveService(setup.services), add, _OPEN | _READING, _OPEN)
    return OpenProtocol(endpoints(setup.services), [service])


PROTOCOL = Protocol(_opened)
