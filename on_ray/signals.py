"""The need of each model as a router reports it, in the values that scaling follows. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from headrace.protos import router_pb2

Signal = Mapping[str, float]
"""`workers` that take requests, `workers_wanted`, and the values whose targets are in `settings.Scaling`."""


def signals_of(signals: Iterable[router_pb2.ScalingSignal]) -> dict[str, Signal]:
    """The signal of each model. Only this function reads the router's message."""
    return {
        signal.model: {
            "workers": float(signal.workers_ready),
            "workers_wanted": float(signal.workers_wanted),
            "queue_wait_s": signal.queue_wait_ms / 1000.0,
            "kv_pressure": signal.kv_pressure,
        }
        for signal in signals
    }
