"""The description of these endpoints for the OpenAPI document. Pure."""

from __future__ import annotations

from typing import Any

from headrace.gateway.edge.description import Operation
from headrace.gateway.kserve import answer_types
from headrace.gateway.kserve.endpoints import MODEL_PATHS
from headrace.gateway.kserve.wire import KserveGenerate, KserveInfer

_PATHS = tuple(path.replace(":path", "") for path in MODEL_PATHS)


def _operation(method: str, path: str, summary: str, answer: Any, **more: Any) -> Operation:
    return Operation(method, path, f"{summary}, for KServe's clients", answer, error=answer_types.KserveError, **more)


OPERATIONS: tuple[Operation, ...] = (
    _operation("GET", "/v2", "Describe the gateway", answer_types.KserveServer),
    *(
        operation
        for path in _PATHS
        for operation in (
            _operation("GET", path, "Describe a model", answer_types.KserveModel),
            _operation("GET", f"{path}/ready", "Tell that a model can be asked for", answer_types.KserveReady),
            _operation(
                "POST",
                f"{path}/infer",
                "Continue texts in tensors",
                answer_types.KserveInferAnswer,
                requests=(KserveInfer,),
                is_generated=True,
            ),
            _operation(
                "POST",
                f"{path}/generate",
                "Continue texts",
                answer_types.KserveGenerateAnswer,
                requests=(KserveGenerate,),
                is_generated=True,
            ),
            _operation(
                "POST",
                f"{path}/generate_stream",
                "Stream the continuation of a text",
                None,
                requests=(KserveGenerate,),
                is_streamed=True,
            ),
        )
    ),
)
"""All operations."""
