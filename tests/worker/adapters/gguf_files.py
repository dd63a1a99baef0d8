"""Writes GGUF adapters from PEFT's tensors, as llama.cpp's converter does."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

from tests.architectures.gguf_model import NAMES, interleaved

_KEY = re.compile(r"base_model\.model\.model\.layers\.(\d+)\.(.+)\.lora_([AB])\.weight")


def write_gguf_adapter(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    *,
    alpha: float | None,
    heads: Mapping[str, int],
    architecture: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    but: Sequence[str] = (),
    general_type: str = "adapter",
    adapter_type: str = "lora",
    alora: Sequence[int] = (),
    more: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write the tensors of all modules, except those whose name ends in one of `but`. `heads` of q_proj and k_proj."""
    writer = GGUFWriter(path, architecture)
    writer.add_string("general.type", general_type)
    writer.add_string("adapter.type", adapter_type)
    if alpha is not None:
        writer.add_float32("adapter.lora.alpha", alpha)
    if alora:
        writer.add_array("adapter.alora.invocation_tokens", list(alora))
    for key, values in tensors.items():
        match = _KEY.fullmatch(key)
        assert match is not None
        layer, module, side = match.groups()
        last = module.rpartition(".")[2]
        if last in but:
            continue
        if architecture == "llama" and side == "B" and last in heads:
            values = interleaved(values, heads[last])
        name = f"blk.{layer}.{NAMES[module]}.weight.lora_{side.lower()}"
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    for name, values in (more or {}).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
