"""Reads adapters as llama.cpp writes them: one GGUF file.

general.type "adapter", adapter.type "lora", adapter.lora.alpha
blk.N.MATRIX.weight.lora_a [rank, inputs] and blk.N.MATRIX.weight.lora_b [outputs, rank], in any type that a GGUF has
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.common.model_files.gguf_files import (
    ADAPTED,
    INTERLEAVED,
    MODULES,
    GgufError,
    halves_of_pairs,
    metadata_of,
    open_gguf,
)
from headrace.worker.adapters.files import AdapterError, AdapterFiles, check, scaled
from headrace.worker.model.adapter_memory import FloatArray, Linear, LowRank

_NAME = re.compile(r"blk\.(?P<layer>\d+)\.(?P<matrix>\w+)\.weight\.lora_(?P<side>[ab])")
_ALORA = "adapter.alora.invocation_tokens.count"
_REMEDY = "give the adapter in PEFT's format"


def read_gguf(path: Path, linears: Sequence[Linear], num_kv_heads: int) -> AdapterFiles:
    """Read an adapter for a model with these linear layers and this number of key heads.

    Raises AdapterError if the file cannot be read or does not fit the model.
    """
    try:
        digest = sha256(path.read_bytes())
        reader = open_gguf(path)
        metadata = metadata_of(reader)
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None
    except GgufError as error:
        raise AdapterError(f"{path} cannot be read: {error}; copy it again") from None
    architecture, alpha = _checked(metadata, path)
    pairs: dict[str, dict[str, FloatArray]] = {}
    for tensor in reader.tensors:
        name, side = _module_of(tensor, path)
        pairs.setdefault(name, {})[side] = _floats(tensor, path)
    weights = {}
    for name, sides in pairs.items():
        if len(sides) != 2:
            raise AdapterError(f"{path} has only one of lora_a and lora_b for {name}; it is damaged")
        a, b = sides["a"], sides["b"]
        # Without an alpha, llama.cpp does not scale.
        weights[name] = LowRank(a, scaled(b, alpha / max(1, len(a)) if alpha else 1.0))
    check(weights, linears, path)
    if architecture in INTERLEAVED:
        weights = _with_halves(weights, linears, num_kv_heads, path)
    return AdapterFiles(digest.hexdigest(), weights)


def _checked(metadata: Mapping[str, Any], path: Path) -> tuple[str, float]:
    """The architecture and alpha. AdapterError if the file is not a supported adapter."""
    kind, method = metadata.get("general.type"), metadata.get("adapter.type")
    if kind != "adapter" or method != "lora":
        what = f"general.type {kind!r}" if kind != "adapter" else f"adapter.type {method!r}"
        raise AdapterError(f"{path} has {what}; an adapter has general.type 'adapter' and adapter.type 'lora'")
    architecture = metadata.get("general.architecture")
    if architecture not in ADAPTED:
        raise AdapterError(
            f"{path} is for the architecture {architecture}; GGUF adapters of {', '.join(ADAPTED)} are "
            f"supported; {_REMEDY}"
        )
    if metadata.get(_ALORA):
        raise AdapterError(
            f"{path} has adapter.alora.invocation_tokens: the adapter begins in the middle of a prompt, which is not "
            "supported; merge the adapter into its model"
        )
    alpha = metadata.get("adapter.lora.alpha")
    if not isinstance(alpha, (int, float)):
        raise AdapterError(f"{path} must have the number adapter.lora.alpha")
    return architecture, float(alpha)


def _module_of(tensor: Any, path: Path) -> tuple[str, str]:
    """The name of the linear layer that a tensor belongs to, and its side."""
    match = _NAME.fullmatch(tensor.name)
    if match is None or match["matrix"] not in MODULES or len(tensor.shape) != 2:
        raise AdapterError(
            f"{path} has {tensor.name}, which is not a LoRA weight of a linear layer; only those are supported"
        )
    return f"layers.{match['layer']}.{MODULES[match['matrix']]}", match["side"]


def _floats(tensor: Any, path: Path) -> npt.NDArray[np.float32]:
    from gguf.quants import dequantize

    try:
        return np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
    except NotImplementedError:
        raise AdapterError(f"{path} has {tensor.name} in {tensor.tensor_type.name}, which is not supported") from None


def _with_halves(
    weights: Mapping[str, LowRank], linears: Sequence[Linear], num_kv_heads: int, path: Path
) -> dict[str, LowRank]:
    """The weights with rows of queries and keys in the order of models."""
    outputs = {linear.name: linear.num_outputs for linear in linears}
    found = {}
    for name, (a, b) in weights.items():
        layer, _, part = name.partition(".self_attn.")
        if part in ("q_proj", "k_proj"):
            head_size, rest = divmod(outputs.get(f"{layer}.self_attn.k_proj", 0), num_kv_heads)
            if rest or not head_size or len(b) % head_size or head_size % 2:
                raise AdapterError(f"{path} adapts {name}, whose heads are of no known size in this model; {_REMEDY}")
            b = b[halves_of_pairs(len(b), head_size)]
        found[name] = LowRank(a, b)
    return found
