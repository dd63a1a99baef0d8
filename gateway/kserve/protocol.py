"""KServe's protocol as a protocol of the gateway."""

from __future__ import annotations

import grpc

from headrace.gateway.edge.grpc_edge import GrpcService
from headrace.gateway.kserve.endpoints import endpoints
from headrace.gateway.kserve.service import SERVICE_NAME, KserveService
from headrace.gateway.protocol import OpenProtocol, Protocol, Setup
from headrace.protos.kserve_pb2_grpc import add_GRPCInferenceServiceServicer_to_server

_OPEN = frozenset({"ServerLive", "ServerReady", "ServerMetadata"})
_READING = frozenset({"ModelReady", "ModelMetadata"})


class _Kserve(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        self._service = KserveService(setup.services)
        grpc_service = GrpcService(SERVICE_NAME, self._add, uncounted=_OPEN | _READING, is_open=_OPEN)
        super().__init__(endpoints(setup.services), [grpc_service])

    def _add(self, server: grpc.aio.Server) -> None:
        add_GRPCInferenceServiceServicer_to_server(self._service, server)

    def refuse_new(self) -> None:
        self._service.calls.stopping = True


PROTOCOL = Protocol(_Kserve)
