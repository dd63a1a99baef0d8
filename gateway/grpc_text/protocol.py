"""The Text service as a protocol of the gateway."""

from __future__ import annotations

from headrace.gateway.edge.grpc_edge import GrpcService
from headrace.gateway.grpc_text.service import SERVICE_NAME, TextService
from headrace.gateway.protocol import OpenProtocol, Protocol, Setup
from headrace.protos.text_pb2_grpc import add_TextServicer_to_server

_READING = frozenset({"ListModels"})


def _opened(setup: Setup) -> OpenProtocol:
    service = GrpcService(SERVICE_NAME, TextService(setup.services), add_TextServicer_to_server, _READING)
    return OpenProtocol(grpc_services=[service])


PROTOCOL = Protocol(_opened)
