"""Services of every headrace server: grpc.health.v1, reflection (v1 and v1alpha), and an error for unknown methods."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from headrace.common.transport.channels import SERVER_OPTIONS
from headrace.protos.status import Reason, StatusError, abort

# The v1 protocol has the messages of v1alpha, byte for byte, under another service name.
_MAX_PROBES = 64
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


def add_introspection(server: grpc.aio.Server, service_names: Sequence[str]) -> health.aio.HealthServicer:
    """Add health and reflection for the named services. The caller sets the serving status on the returned object.

    Until then, every service (and "", the whole server) is NOT_SERVING. Call it after the services are added, because
    it refuses all methods that none of them has.
    """
    servicer = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    names = [*service_names, health.SERVICE_NAME, reflection.SERVICE_NAME, _REFLECTION_V1]
    reflection.enable_server_reflection(names, server)
    reflector = reflection.aio.ReflectionServicer(names)
    handler = grpc.stream_stream_rpc_method_handler(
        reflector.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_REFLECTION_V1, {"ServerReflectionInfo": handler}),)
    )
    server.add_generic_rpc_handlers((_Refusal(),))
    return servicer


class _Refusal(grpc.GenericRpcHandler):
    """Refuses every method, with details that gRPC's own refusal lacks."""

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[Any, Any]:
        method = handler_call_details.method[:200]
        error = StatusError(Reason.UNSUPPORTED, f"there is no method {method}; reflection lists the methods")

        async def refuse(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
            await abort(context, error)
            yield b""  # never reached: it makes this a stream, which interceptors recognise

        return grpc.unary_stream_rpc_method_handler(refuse)


async def start_probe(address: str, servicer: health.aio.HealthServicer) -> grpc.aio.Server:
    """Serve only health checks, without TLS, at a separate address.

    It is for probes without a certificate, such as those of a kubelet. Raises RuntimeError if the address is taken.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=_MAX_PROBES)
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    server.add_insecure_port(address)
    await server.start()
    return server


async def set_serving(servicer: health.aio.HealthServicer, service_names: Sequence[str], serving: bool) -> None:
    """Set the health of the named services and of the server as a whole."""
    serving_status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
    for name in ("", *service_names):
        await servicer.set(name, serving_status)
