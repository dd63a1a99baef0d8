"""Small heads in the published format of EAGLE-3, and what they compute, in numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.worker.adapters.files import safetensors

_Array = npt.NDArray[Any]
FloatArray = npt.NDArray[np.float32]
# Of the demo model.
TARGET_SIZE, VOCAB_SIZE = 576, 49_152


def eagle_config(**changes: Any) -> dict[str, Any]:
    """config.json of heads for the demo model."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_act": "silu",
        "hidden_size": TARGET_SIZE,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": 1000,
        "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
    }
    return {**config, **changes}


def eagle_tensors(config: Mapping[str, Any], seed: int = 0) -> dict[str, _Array]:
    """Random weights. Each matrix has 8-bit integers with a scale for each row, so rounding to such changes nothing."""
    rng = np.random.default_rng(seed)
    size, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    inner, num_draft, vocab_size = config["intermediate_size"], config["draft_vocab_size"], config["vocab_size"]
    head_size = config.get("head_dim", size // heads)

    def matrix(rows: int, columns: int) -> FloatArray:
        integers = rng.integers(-127, 128, (rows, columns))
        integers[:, 0] = 127
        scales = rng.uniform(0.5, 1.5, (rows, 1)) / (70 * np.sqrt(columns))
        return (integers * scales.astype(np.float32)).astype(np.float32)

    known = np.sort(rng.choice(vocab_size, num_draft, replace=False))
    return {
        "fc.weight": matrix(size, 3 * config.get("target_hidden_size", size)),
        "midlayer.self_attn.q_proj.weight": matrix(heads * head_size, 2 * size),
        "midlayer.self_attn.k_proj.weight": matrix(kv_heads * head_size, 2 * size),
        "midlayer.self_attn.v_proj.weight": matrix(kv_heads * head_size, 2 * size),
        "midlayer.self_attn.o_proj.weight": matrix(size, heads * head_size),
        "midlayer.mlp.gate_proj.weight": matrix(inner, size),
        "midlayer.mlp.up_proj.weight": matrix(inner, size),
        "midlayer.mlp.down_proj.weight": matrix(size, inner),
        "midlayer.input_layernorm.weight": rng.uniform(0.5, 1.5, size).astype(np.float32),
        "midlayer.hidden_norm.weight": rng.uniform(0.5, 1.5, size).astype(np.float32),
        "midlayer.post_attention_layernorm.weight": rng.uniform(0.5, 1.5, size).astype(np.float32),
        "norm.weight": rng.uniform(0.5, 1.5, size).astype(np.float32),
        "lm_head.weight": matrix(num_draft, size),
        "d2t": (known - np.arange(num_draft)).astype(np.int64),
        "t2d": np.isin(np.arange(vocab_size), known),
    }


def write_heads(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, _Array]) -> Path:
    """Write a directory with heads."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(safetensors(tensors))
    return directory


def eagle_reference(
    config: Mapping[str, Any], tensors: Mapping[str, _Array], embeddings: FloatArray, features: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """Logits over the draft vocabulary and states after each of a sequence's tokens, given their embeddings and the
    features of the tokens before them, `[tokens, size]` each."""
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim", config["hidden_size"] // heads)
    weights = {name.removeprefix("midlayer."): values for name, values in tensors.items()}

    def norm(states: FloatArray, name: str) -> FloatArray:
        root = np.sqrt((states**2).mean(-1, keepdims=True) + config["rms_norm_eps"])
        return states / root * weights[f"{name}.weight"]

    def linear(states: FloatArray, name: str) -> FloatArray:
        return states @ weights[f"{name}.weight"].T

    def turned(states: FloatArray) -> FloatArray:
        frequencies = config["rope_theta"] ** -(np.arange(0, head_size, 2) / head_size)
        angles = np.arange(len(states))[:, None, None] * frequencies
        first, second = np.split(states, 2, -1)
        cosines, sines = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], -1)

    mixed = norm(features, "hidden_norm")
    residual = mixed if config.get("norm_before_residual") else features
    both = np.concatenate([norm(embeddings, "input_layernorm"), mixed], -1)
    query, key, value = (linear(both, f"self_attn.{name}_proj") for name in "qkv")
    query = turned(query.reshape(-1, heads, head_size))
    key = np.repeat(turned(key.reshape(-1, kv_heads, head_size)), heads // kv_heads, 1)
    value = np.repeat(value.reshape(-1, kv_heads, head_size), heads // kv_heads, 1)
    scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(head_size)
    scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    attended = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), value)
    states = residual + linear(attended.reshape(len(features), -1), "self_attn.o_proj")
    normal = norm(states, "post_attention_layernorm")
    gate = linear(normal, "mlp.gate_proj")
    states = states + linear(gate / (1 + np.exp(-gate)) * linear(normal, "mlp.up_proj"), "mlp.down_proj")
    return linear(norm(states, "norm"), "lm_head").astype(np.float32), states.astype(np.float32)


def medusa_tensors(size: int, vocab_size: int, num_heads: int, num_layers: int, seed: int = 0) -> dict[str, _Array]:
    """Random weights in the format of Medusa, which rounding to 8-bit integers does not change."""
    rng = np.random.default_rng(seed)
    found: dict[str, _Array] = {}

    def matrix(rows: int) -> FloatArray:
        integers = rng.integers(-127, 128, (rows, size))
        integers[:, 0] = 127
        return (integers / np.float32(73 * np.sqrt(size))).astype(np.float32)

    for head in range(num_heads):
        for layer in range(num_layers):
            found[f"{head}.{layer}.linear.weight"] = matrix(size)
            found[f"{head}.{layer}.linear.bias"] = rng.standard_normal(size).astype(np.float32)
        found[f"{head}.{num_layers}.weight"] = matrix(vocab_size)
    return found


def medusa_reference(tensors: Mapping[str, _Array], states: FloatArray, head: int, num_layers: int) -> FloatArray:
    """The logits of a head after these last hidden states."""
    for layer in range(num_layers):
        inner = states @ tensors[f"{head}.{layer}.linear.weight"].T
        inner = inner + tensors.get(f"{head}.{layer}.linear.bias", np.float32(0))
        states = states + inner / (1 + np.exp(-inner))
    logits: FloatArray = states @ tensors[f"{head}.{num_layers}.weight"].T
    return logits
