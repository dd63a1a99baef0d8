"""Reads adapters as PEFT writes them: adapter_config.json and adapter_model.safetensors in a directory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace.common.model_files.safetensors import SafetensorsError, floats, tensors_of
from headrace.worker.adapters.files import AdapterError, AdapterFiles, check, scaled
from headrace.worker.model.adapter_memory import BfloatArray, FloatArray, Linear, LowRank, name_from_layer

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_KEY = re.compile(r"^(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight$")
# Fields of the configuration that change an adapter's result and are not supported.
_UNSUPPORTED = {
    "use_dora": "weights of DoRA have a magnitude for each output",
    "modules_to_save": "whole layers are replaced",
    "lora_bias": "biases are trained",
    "layer_replication": "layers are repeated",
    "trainable_token_indices": "embeddings of tokens are trained",
    "target_parameters": "parameters of experts are adapted",
    "alora_invocation_tokens": "the adapter begins in the middle of a prompt",
    "use_qalora": "the inputs are pooled",
    "use_bdlora": "the weights are block-diagonal",
}
# Modules of multimodal models for images and audio, which do not process text.
_NOT_OF_TEXT = re.compile(r"(?:^|\.)(?:visual|vision_\w+|audio_\w+|multi_modal_projector)\.")
# With these, the base model's weights were also changed before training.
_CHANGES_BASE = ("pissa", "olora", "corda")


class _Config(NamedTuple):
    rank: int
    alpha: float
    is_rank_stabilised: bool
    ranks: Mapping[str, Any]
    alphas: Mapping[str, Any]

    def scale(self, module: str, rank: int) -> float:
        """The factor by which a module's product of A and B is scaled.

        Raises AdapterError if the configuration names another rank for the module, or no usable alpha.
        """
        expected = _matching(self.ranks, module, self.rank)
        if rank != expected:
            raise AdapterError(
                f"{module} has rank {rank}, but {CONFIG} says {expected}; the files do not belong together"
            )
        alpha = _matching(self.alphas, module, self.alpha)
        if not rank or not isinstance(alpha, (int, float)):
            raise AdapterError(
                f"{module} has rank {rank} and alpha {alpha!r} in {CONFIG}; both must be numbers above 0"
            )
        return alpha / math.sqrt(rank) if self.is_rank_stabilised else alpha / rank


def read_peft(path: Path, linears: Sequence[Linear]) -> AdapterFiles:
    """Read an adapter for a model with these layers. Raises AdapterError."""
    raw_config, raw = _read(path / CONFIG), _read(path / WEIGHTS)
    config = _config_of(raw_config, path / CONFIG)
    pairs: dict[str, dict[str, FloatArray | BfloatArray]] = {}
    modules: dict[str, str] = {}
    for key, values in _tensors(raw, path / WEIGHTS).items():
        match = _KEY.match(key)
        if match is None or values.ndim != 2:
            raise AdapterError(
                f"{path / WEIGHTS} has {key} of shape {list(values.shape)}, which is not a LoRA weight of a linear "
                "layer; only those are supported"
            )
        if _NOT_OF_TEXT.search(match["module"]):
            continue
        name = name_from_layer(match["module"])
        modules[name] = match["module"]
        pairs.setdefault(name, {})[match["side"]] = values
    weights = {}
    for name, sides in pairs.items():
        if len(sides) != 2:
            raise AdapterError(f"{path / WEIGHTS} has only one of lora_A and lora_B for {modules[name]}; it is damaged")
        weights[name] = LowRank(sides["A"], scaled(sides["B"], config.scale(modules[name], len(sides["A"]))))
    check(weights, linears, path)
    digest = sha256(len(raw_config).to_bytes(8, "little") + raw_config)
    digest.update(raw)
    return AdapterFiles(digest.hexdigest(), weights)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        hint = ""
        if path.name == WEIGHTS and path.with_suffix(".bin").exists():
            hint = "; save the adapter with safetensors, since .bin files may run code"
        raise AdapterError(f"there is no {path}{hint}") from None
    except OSError as error:
        raise AdapterError(f"{path} cannot be read: {error.strerror}") from None


def _config_of(raw: bytes, path: Path) -> _Config:
    try:
        config = json.loads(raw)
    except ValueError as error:
        raise AdapterError(f"{path} is not JSON ({error})") from None
    if not isinstance(config, dict) or config.get("peft_type", "LORA") != "LORA":
        kind = config.get("peft_type") if isinstance(config, dict) else None
        raise AdapterError(f"{path} has peft_type {kind!r}; only LORA is supported")
    for field, why in _UNSUPPORTED.items():
        if config.get(field):
            raise AdapterError(f"{path} has {field}: {why}, which is not supported; merge the adapter into its model")
    if config.get("bias", "none") != "none":
        raise AdapterError(
            f"{path} has bias {config['bias']!r}: biases are trained, which is not supported; merge the adapter into "
            "its model"
        )
    start = config.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise AdapterError(
            f"{path} has init_lora_weights {start!r}, which changes the base model's weights; convert the adapter with "
            "PEFT's path_initial_model_for_weight_conversion"
        )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or not isinstance(alpha, (int, float)):
        raise AdapterError(f"{path} must have the numbers r and lora_alpha")
    patterns = [config.get(name) or {} for name in ("rank_pattern", "alpha_pattern")]
    if not all(isinstance(pattern, dict) for pattern in patterns):
        raise AdapterError(f"{path} must have objects as rank_pattern and alpha_pattern")
    return _Config(rank, float(alpha), bool(config.get("use_rslora")), *patterns)


def _matching(pattern: Mapping[str, Any], module: str, default: float) -> Any:
    """The value of the first key that matches the end of a module's name, as PEFT looks it up."""
    for key, value in pattern.items():
        try:
            if re.match(rf"(?:.*\.)?(?:{key})$", module):
                return value
        except re.error:
            raise AdapterError(f"{CONFIG} has the pattern {key!r}, which is not a regular expression") from None
    return default


def _tensors(raw: bytes, path: Path) -> dict[str, FloatArray | BfloatArray]:
    """The tensors of a safetensors file. AdapterError if it is damaged."""
    try:
        found = tensors_of(raw, path)
    except SafetensorsError as error:
        raise AdapterError(str(error)) from None
    return {key: values if values.dtype == np.uint16 else floats(values) for key, values in found.items()}
