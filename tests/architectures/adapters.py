"""Write LoRA adapters of a small model as PEFT does, and what transformers computes with each merged into the weights:
`adapters.py OUTDIR NAME...`.

Runs in the environment that exports models.

OUTDIR/NAME/ADAPTER/           adapter_config.json and adapter_model.safetensors
OUTDIR/NAME/weights.npz        the model's own weights, by their names in transformers
OUTDIR/NAME/reference.npz      tokens i64 [LENGTH]; log-probabilities f32 [LENGTH, vocabulary] of base and each adapter
"""

from __future__ import annotations

import copy
import json
import math
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tests.architectures.export import log_probabilities, model_of
from tests.architectures.families import FAMILIES, VOCABULARY, directory_name

LENGTH = 60
NUM_ADAPTERS = 8
_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_OTHER_NAMES = {
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "lfm2": ("in_proj", "out_proj", "q_proj", "k_proj", "v_proj", "w1", "w2", "w3"),
    "phi3-longrope": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
}
_PATTERNS = {"rank_pattern": {"q_proj": 4, r"layers\.1\.mlp\.up_proj": 12}, "alpha_pattern": {"k_proj": 3.0}}
# Name -> fields of the configuration, and the type of the tensors.
SPECIAL: dict[str, tuple[dict[str, Any], torch.dtype]] = {
    "rslora": ({"r": 8, "lora_alpha": 4, "use_rslora": True}, torch.float32),
    "patterns": ({"r": 8, **_PATTERNS}, torch.float32),
    "subset": ({"r": 8, "target_modules": ["v_proj", "down_proj"]}, torch.float16),
    "bfloat16": ({"r": 8}, torch.bfloat16),
    "wide": ({"r": 64, "lora_alpha": 32}, torch.float32),
}


def config_of(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """A configuration as PEFT writes it."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 16,
        "lora_alpha": 16,
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
        "modules_to_save": None,
        "rank_pattern": {},
        "alpha_pattern": {},
        "target_modules": list(_OTHER_NAMES.get(name, _ALL)),
        **fields,
    }


def _of(pattern: dict[str, Any], module: str, default: Any) -> Any:
    return next((value for key, value in pattern.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def write(
    model: PreTrainedModel, config: dict[str, Any], dtype: torch.dtype, directory: Path, seed: int
) -> PreTrainedModel:
    """Write an adapter with random weights, and give the model that it makes of this one."""
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = copy.deepcopy(model), {}
    for name, module in merged.named_modules():
        if name.rpartition(".")[2] not in config["target_modules"] or not hasattr(module, "weight"):
            continue
        is_transposed = type(module).__name__ == "Conv1D"
        outputs, inputs = reversed(module.weight.shape) if is_transposed else module.weight.shape
        rank, alpha = (
            _of(config["rank_pattern"], name, config["r"]),
            _of(config["alpha_pattern"], name, config["lora_alpha"]),
        )
        a = (torch.randn(rank, inputs, generator=generator) / math.sqrt(inputs)).to(dtype)
        b = (torch.randn(outputs, rank, generator=generator) / math.sqrt(rank)).to(dtype)
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
        scale = alpha / math.sqrt(rank) if config["use_rslora"] else alpha / rank
        change = scale * b.float() @ a.float()
        with torch.no_grad():
            module.weight += change.T if is_transposed else change
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    return merged


def export(name: str, directory: Path) -> None:
    """Write the adapters of one model and their reference."""
    model = model_of(FAMILIES[name])
    tokens = np.random.default_rng(11).integers(4, VOCABULARY, LENGTH)
    reference = {"tokens": tokens, "base": log_probabilities(model, tokens)}
    part = directory.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    adapters = {f"a{number}": ({}, torch.float32) for number in range(NUM_ADAPTERS)}
    if name == "llama":
        adapters |= SPECIAL
    for seed, (adapter, (fields, dtype)) in enumerate(adapters.items()):
        merged = write(model, config_of(name, fields), dtype, part / adapter, seed)
        reference[adapter] = log_probabilities(merged, tokens)
    np.savez(part / "reference.npz", **reference)
    np.savez(part / "weights.npz", **{key: value.numpy() for key, value in model.state_dict().items()})
    part.rename(directory)


if __name__ == "__main__":
    for family in sys.argv[2:]:
        if not (Path(sys.argv[1]) / directory_name(family)).is_dir():
            export(family, Path(sys.argv[1]) / directory_name(family))
