"""The description of these endpoints for the OpenAPI document. Pure."""

from __future__ import annotations

from typing import Any

from headrace.gateway.edge.description import Operation
from headrace.gateway.kserve import answers
from headrace.gateway.kserve.endpoints import MODEL_PATHS
from headrace.gateway.kserve.wire import KserveGenerate, KserveInfer

_PATHS = tuple(path.replace(":path", "") for path in MODEL_PATHS)


def _operation(method: str, path: str, summary: str, answer: Any, **more: Any) -> Operation:
    return Operation(method, path, f"{summary}, for KServe's clients", answer, error=answers.KserveError, **more)


OPERATIONS: tuple[Operation, ...] = (
    _operation("GET", "/v2", "Describe the gateway", answers.KserveServer),
    *(
        operation
        for path in _PATHS
        for operation in (
            _operation("GET", path, "Describe a model", answers.KserveModel),
            _operation("GET", f"{path}/ready", "Tell that a model can be asked for", answers.KserveReady),
            _operation(
                "POST",
                f"{path}/infer",
                "Continue texts in tensors",
                answers.KserveInferAnswer,
                requests=(KserveInfer,),
                is_generated=True,
            ),
            _operation(
                "POST",
                f"{path}/generate",
                "Continue texts",
                answers.KserveGenerateAnswer,
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
