"""The operations of this folder, for the OpenAPI document (pure)."""

from __future__ import annotations

from headrace.gateway.edge.description import Operation
from headrace.gateway.operations import answer_types

OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/v1/config", "Status of the models, in the format of OpenVINO Model Server", answer_types.Config),
    Operation(
        "POST",
        "/v1/config/reload",
        "Serve the models of the changed configuration, as OpenVINO Model Server does",
        answer_types.Config,
    ),
    Operation("GET", "/health/live", "Whether the gateway runs", answer_types.Health, prefixes=("", "/v2")),
    Operation(
        "GET",
        "/health/ready",
        "Whether a model is ready",
        answer_types.Health,
        prefixes=("", "/v2"),
        unavailable=answer_types.Health,
    ),
    *(
        Operation("GET", path, "Whether a model is ready", answer_types.Health, unavailable=answer_types.Health)
        for path in ("/health", "/v1/health", "/ping")
    ),
    Operation("GET", "/version", "The version of the gateway", answer_types.Version),
    Operation("GET", "/metrics", "Metrics of gateway and workers, for Prometheus"),
    Operation("GET", "/openapi.json", "This document", answer_types.Document),
)
"""All operations."""
