"""The Text service as a protocol of the gateway."""

from __future__ import annotations

import grpc

from headrace.gateway.edge.grpc_edge import GrpcService
from headrace.gateway.grpc_text.service import SERVICE_NAME, TextService
from headrace.gateway.protocol import OpenProtocol, Protocol, Setup
from headrace.protos.text_pb2_grpc import add_TextServicer_to_server


class _GrpcText(OpenProtocol):
    def __init__(self, setup: Setup) -> None:
        self._service = TextService(setup.services)
        grpc_service = GrpcService(SERVICE_NAME, self._add, uncounted=frozenset({"ListModels"}))
        super().__init__(grpc_services=[grpc_service])

    def _add(self, server: grpc.aio.Server) -> None:
        add_TextServicer_to_server(self._service, server)

    def refuse_new(self) -> None:
        self._service.calls.stopping = True


PROTOCOL = Protocol(_GrpcText)
