"""The operations of this folder, for the OpenAPI document (pure)."""

from __future__ import annotations

from headrace.gateway.edge.description import Operation
from headrace.gateway.operations import answers

OPERATIONS: tuple[Operation, ...] = (
    Operation("GET", "/v1/config", "Status of the models, in the format of OpenVINO Model Server", answers.Config),
    Operation(
        "POST",
        "/v1/config/reload",
        "Serve the models of the changed configuration, as OpenVINO Model Server does",
        answers.Config,
    ),
    Operation("GET", "/health/live", "Whether the gateway runs", answers.Health, prefixes=("", "/v2")),
    Operation(
        "GET",
        "/health/ready",
        "Whether a model is ready",
        answers.Health,
        prefixes=("", "/v2"),
        unavailable=answers.Health,
    ),
    *(
        Operation("GET", path, "Whether a model is ready", answers.Health, unavailable=answers.Health)
        for path in ("/health", "/v1/health", "/ping")
    ),
    Operation("GET", "/version", "The version of the gateway", answers.Version),
    Operation("GET", "/metrics", "Metrics of gateway and workers, for Prometheus"),
    Operation("GET", "/openapi.json", "This document", answers.Document),
)
"""All operations."""
