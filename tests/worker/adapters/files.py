"""Writes adapters' files for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.worker.adapters.reader import Layers
from headrace.worker.model.adapter_memory import Linear, LowRank

LINEARS = [
    Linear("layers.0.self_attn.q_proj", "q", 12, 20),
    Linear("layers.0.mlp.down_proj", "down", 30, 12),
]
# Queries of five heads of size 4.
LAYERS = Layers(LINEARS, 1)
_DTYPES = {"float32": "F32", "float16": "F16", "uint16": "BF16", "int32": "I32", "int64": "I64", "bool": "BOOL"}


def random_adapter(linears: Sequence[Linear], lora_rank: int, seed: int) -> dict[str, LowRank]:
    """An adapter of every layer, which changes answers by much."""
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> npt.NDArray[np.float32]:
        return (rng.standard_normal(shape) / np.sqrt(shape[1])).astype(np.float32)

    return {
        linear.name: LowRank(matrix(lora_rank, linear.num_inputs), matrix(linear.num_outputs, lora_rank))
        for linear in linears
    }


def safetensors(tensors: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """A safetensors file. 16-bit integers represent bfloat16."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    content = b""
    for name, values in tensors.items():
        raw = values.tobytes()
        header[name] = {
            "dtype": _DTYPES[str(values.dtype)],
            "shape": list(values.shape),
            "data_offsets": [len(content), len(content) + len(raw)],
        }
        content += raw
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + content


def tensors_of(rank: int = 4, seed: int = 0, linears: Sequence[Linear] = LINEARS) -> dict[str, npt.NDArray[np.float32]]:
    """Weights for these layers by their names in files."""
    rng = np.random.default_rng(seed)
    found = {}
    for linear in linears:
        key = f"base_model.model.model.{linear.name}"
        found[f"{key}.lora_A.weight"] = rng.standard_normal((rank, linear.num_inputs)).astype(np.float32)
        found[f"{key}.lora_B.weight"] = rng.standard_normal((linear.num_outputs, rank)).astype(np.float32)
    return found


def write_adapter(
    directory: Path,
    *,
    rank: int = 4,
    seed: int = 0,
    tensors: Mapping[str, npt.NDArray[Any]] | None = None,
    **fields: Any,
) -> Path:
    """Write an adapter to a directory. `fields` are added to its configuration."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", **fields}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    content = safetensors(tensors_of(rank, seed) if tensors is None else tensors)
    (directory / "adapter_model.safetensors").write_bytes(content)
    return directory
