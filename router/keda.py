"""KEDA's external scaler: the scaling signals of this router, as KEDA asks for them.

A ScaledObject names the model, the metric and its target in the `metadata` of its trigger:

    model    name of the model; may be left out while there is one
    metric   one of `METRICS`; workers_wanted if it is left out
    target   for each replica, or for all with `metricType: Value`; 1 if it is left out
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, TypeAlias

import grpc
from grpc_health.v1 import health

from headrace.common.transport.channels import SERVER_OPTIONS
from headrace.common.transport.introspection import add_introspection, set_serving
from headrace.protos import keda_pb2, keda_pb2_grpc
from headrace.protos.status import Reason, StatusError, abort
from headrace.router.dispatch.scaling import Scaling, ScalingSignal

SCALER = "externalscaler.ExternalScaler"
METRICS: Mapping[str, Callable[[ScalingSignal], float]] = {
    "workers_wanted": lambda signal: signal.num_wanted,
    "queue_wait_ms": lambda signal: signal.queue_wait_ms,
    "backlog_seconds": lambda signal: signal.backlog_s,
    "kv_pressure_percent": lambda signal: 100 * signal.kv_pressure,
    "requests_waiting": lambda signal: signal.num_waiting,
}
"""The value of each metric in a signal."""
_MAX_CALLS = 256

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


class ExternalScaler(keda_pb2_grpc.ExternalScalerServicer):
    """Answers KEDA's calls."""

    def __init__(self, scaling: Scaling) -> None:
        self._scaling = scaling

    async def IsActive(self, request: keda_pb2.ScaledObjectRef, context: _Context) -> keda_pb2.IsActiveResponse:
        """Whether the model needs a worker."""
        signal = await self._signal(request, context)
        return keda_pb2.IsActiveResponse(result=signal.num_wanted > 0)

    async def StreamIsActive(
        self, request: keda_pb2.ScaledObjectRef, context: _Context
    ) -> AsyncIterator[keda_pb2.IsActiveResponse]:
        """Whether the model needs a worker, now and after each change."""
        told: bool | None = None
        while True:
            is_active = (await self._signal(request, context)).num_wanted > 0
            if is_active is not told:
                told = is_active
                yield keda_pb2.IsActiveResponse(result=is_active)
            await self._scaling.changed()

    async def GetMetricSpec(
        self, request: keda_pb2.ScaledObjectRef, context: _Context
    ) -> keda_pb2.GetMetricSpecResponse:
        """The metric and its target."""
        name, target = await self._metric(request, context)
        spec = keda_pb2.MetricSpec(metricName=name, targetSize=max(round(target), 1), targetSizeFloat=target)
        return keda_pb2.GetMetricSpecResponse(metricSpecs=[spec])

    async def GetMetrics(self, request: keda_pb2.GetMetricsRequest, context: _Context) -> keda_pb2.GetMetricsResponse:
        """The metric's value."""
        name, _ = await self._metric(request.scaledObjectRef, context)
        value = METRICS[name](await self._signal(request.scaledObjectRef, context))
        shown = keda_pb2.MetricValue(metricName=name, metricValue=math.ceil(value), metricValueFloat=value)
        return keda_pb2.GetMetricsResponse(metricValues=[shown])

    async def _signal(self, request: keda_pb2.ScaledObjectRef, context: _Context) -> ScalingSignal:
        """The signal of the model that the trigger names. Ends the call if there is none."""
        try:
            return _signal_for(request.scalerMetadata.get("model", ""), self._scaling.signals())
        except StatusError as error:
            await abort(context, error)

    async def _metric(self, request: keda_pb2.ScaledObjectRef, context: _Context) -> tuple[str, float]:
        """The metric that the trigger names, and its target. Ends the call if one of them is wrong."""
        try:
            return _metric_of(request.scalerMetadata)
        except StatusError as error:
            await abort(context, error)


def _signal_for(model: str, signals: Sequence[ScalingSignal]) -> ScalingSignal:
    """The signal of a model; "" names the only one. Raises StatusError."""
    for signal in signals:
        if signal.model == model or (not model and len(signals) == 1):
            return signal
    known = ", ".join(repr(signal.model) for signal in signals) or "none"
    if not model and signals:
        problem = f"the trigger's metadata names no model and there are several: write model, one of {known}"
        raise StatusError(Reason.INVALID_FIELD, problem, field="scalerMetadata.model")
    problem = (
        f"this router knows no model {model!r}; it knows {known}. A model whose workers come and go needs --on-demand "
        "at the router"
    )
    raise StatusError(Reason.MODEL_NOT_FOUND, problem, field="scalerMetadata.model")


def _metric_of(metadata: Mapping[str, str]) -> tuple[str, float]:
    """The metric that a trigger's metadata names, and its target. Raises StatusError."""
    name = metadata.get("metric", "workers_wanted")
    if name not in METRICS:
        problem = f"there is no metric {name!r}: write one of {', '.join(METRICS)}"
        raise StatusError(Reason.INVALID_FIELD, problem, field="scalerMetadata.metric")
    given = metadata.get("target", "1")
    try:
        target = float(given)
    except ValueError:
        target = 0.0
    if not 0.0 < target < math.inf:
        problem = f"target is {given!r}: write a number greater than 0"
        raise StatusError(Reason.INVALID_FIELD, problem, field="scalerMetadata.target")
    return name, target


async def start_scaler(address: str, scaling: Scaling) -> grpc.aio.Server:
    """Serve KEDA's calls at an address of their own, without TLS, because KEDA has no join token. They show numbers and
    change nothing. Raises RuntimeError if the address is taken."""
    server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=_MAX_CALLS)
    keda_pb2_grpc.add_ExternalScalerServicer_to_server(ExternalScaler(scaling), server)
    servicer: health.aio.HealthServicer = add_introspection(server, [SCALER])
    server.add_insecure_port(address)
    await server.start()
    await set_serving(servicer, [SCALER], True)
    return server
