"""Chooses the kind of weights with which a checkpoint is exported by default, and states the reason, which `pull` shows
before the download (docs/decisions/models.md#exports)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace.cli.export.exporter import TEXT
from headrace.cli.export.weights import (
    BF16,
    FP16,
    INT4,
    INT8,
    ExportedWeights,
    has_exact_experts,
    keeps_integers,
    sizes_of,
)
from headrace.cli.models.requirements import USUAL_CONTEXT_TOKENS, kv_cache_gib, worker_bytes
from headrace.cli.models.shape import ModelShape
from headrace.common.host_memory import GIB


def default_weights(
    config: Mapping[str, Any],
    safetensors_bytes: int,
    node_bytes: int,
    *,
    task: str = TEXT,
    shape: ModelShape | None = None,
    with_images: bool = False,
) -> tuple[ExportedWeights, str]:
    """The default weights, and the reason as a sentence without a full stop. `node_bytes` is the memory of one NUMA
    node."""
    if task != TEXT:
        kind = BF16 if config.get("dtype", config.get("torch_dtype")) == "bfloat16" else FP16
        return ExportedWeights(kind), (
            f"weights in {kind}, because fewer bits would not make a model that encodes texts faster; --weights int8 "
            "takes half the memory"
        )
    needed = {
        kind: _needed_bytes(ExportedWeights(kind), config, safetensors_bytes, shape, with_images=with_images)
        for kind in (INT8, INT4, BF16)
    }
    if keeps_integers(config):
        return ExportedWeights(INT8), (
            "the integers of its quantised layers are kept, and the other weights get int8; --weights bf16 keeps those "
            "in 16 bits"
        )
    kind = next((kind for kind in (INT8, INT4) if needed[kind] <= node_bytes), INT4)
    fits = f"{_gib(needed[kind])} of the {_gib(node_bytes)} of a NUMA node" if node_bytes else _gib(needed[kind])
    if kind == INT8:
        exact = ", which keeps the values of its experts" if has_exact_experts(config) else ", close to the original"
        return ExportedWeights(kind), (
            f"weights in int8{exact}: with a context they take {fits}; --weights int4 takes {_gib(needed[INT4])} and "
            f"about half the time per token, with more loss, and bf16 takes {_gib(needed[BF16])} and twice the time"
        )
    size = f"int8 would take {_gib(needed[INT8])}, more than a NUMA node has"
    if needed[INT4] > node_bytes:
        return ExportedWeights(kind), (
            f"weights in int4, the smallest, and they are too large for a NUMA node: with a context they take "
            f"{_gib(needed[INT4])} of {_gib(node_bytes)}; a smaller model, or more nodes (--tensor-parallel), would do"
        )
    return ExportedWeights(kind), (
        f"weights in int4, because {size}: with a context they take {fits}, with more loss; --weights int8 is closer "
        "to the original"
    )


def _needed_bytes(
    weights: ExportedWeights,
    config: Mapping[str, Any],
    safetensors_bytes: int,
    shape: ModelShape | None,
    *,
    with_images: bool,
) -> int:
    """The memory of a worker with these weights and one usual context."""
    sizes = sizes_of(weights, config, safetensors_bytes, with_images=with_images)
    context = min(USUAL_CONTEXT_TOKENS, shape.context_tokens or USUAL_CONTEXT_TOKENS) if shape else 0
    of_context = kv_cache_gib(shape, context) if shape else 0.0
    return worker_bytes(sizes.text_bytes, sizes.vision_bytes) + int(of_context * GIB)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.1f} GiB"
