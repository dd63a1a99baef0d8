"""Small heads in the published format of EAGLE-3, and what they compute, in numpy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
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
    """Random weights, which rounding to 8-bit integers does not change."""
    rng = np.random.default_rng(seed)
    size, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    inner, num_draft, vocab_size = config["intermediate_size"], config["draft_vocab_size"], config["vocab_size"]
    head_size = config.get("head_dim", size // heads)

    matrix = partial(_matrix, rng)
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


def _matrix(rng: np.random.Generator, rows: int, columns: int) -> FloatArray:
    """8-bit integers with a scale for each row."""
    integers = rng.integers(-127, 128, (rows, columns))
    integers[:, 0] = 127
    scales = rng.uniform(0.5, 1.5, (rows, 1)) / (70 * np.sqrt(columns))
    return (integers * scales.astype(np.float32)).astype(np.float32)


def mtp_config(**changes: Any) -> dict[str, Any]:
    """config.json of a checkpoint with a layer that predicts more tokens, for the demo model."""
    config: dict[str, Any] = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "hidden_act": "silu",
        "hidden_size": TARGET_SIZE,
        "num_hidden_layers": 36,
        "num_nextn_predict_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "rms_norm_eps": 1e-5,
        "rope_theta": 640000,
        "vocab_size": VOCAB_SIZE,
        "tie_word_embeddings": False,
    }
    return {**config, **changes}


def mtp_tensors(config: Mapping[str, Any], inner: int = 96, seed: int = 0) -> dict[str, _Array]:
    """Random weights of such a layer, and of the vocabulary that it shares."""
    rng = np.random.default_rng(seed)
    size, heads, kv_heads = config["hidden_size"], config["num_attention_heads"], config["num_key_value_heads"]
    head_size = config.get("head_dim", size // heads)
    shapes = {
        "input_proj": (size, 2 * size),
        "self_attn.q_proj": (heads * head_size, size),
        "self_attn.k_proj": (kv_heads * head_size, size),
        "self_attn.v_proj": (kv_heads * head_size, size),
        "self_attn.o_proj": (size, heads * head_size),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm")
    layer: dict[str, _Array] = {f"{name}.weight": _matrix(rng, *shape) for name, shape in shapes.items()}
    layer |= {f"{name}.weight": rng.uniform(0.5, 1.5, size).astype(np.float32) for name in norms}
    layer |= {
        f"self_attn.{part}_proj.bias": rng.standard_normal(len(layer[f"self_attn.{part}_proj.weight"])).astype(
            np.float32
        )
        for part in "qkv"
    }
    return {
        **{f"model.mtp_layers.0.{name}": values for name, values in layer.items()},
        "lm_head.weight": _matrix(rng, config["vocab_size"], size),
        "model.layers.0.self_attn.q_proj.weight": np.zeros((2, 2), np.int32),
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
    layer = _Layer(config, {name.removeprefix("midlayer."): values for name, values in tensors.items()})
    mixed = layer.norm(features, "hidden_norm")
    residual = mixed if config.get("norm_before_residual") else features
    states = layer.after(residual, np.concatenate([layer.norm(embeddings, "input_layernorm"), mixed], -1))
    return layer.linear(layer.norm(states, "norm"), "lm_head").astype(np.float32), states.astype(np.float32)


def mtp_reference(
    config: Mapping[str, Any], tensors: Mapping[str, _Array], embeddings: FloatArray, features: FloatArray
) -> tuple[FloatArray, FloatArray]:
    """The same for a layer that predicts more tokens. `features` are the last hidden states of the tokens before."""
    layer = _Layer(config, {name.removeprefix("model.mtp_layers.0."): values for name, values in tensors.items()})
    both = [layer.norm(features, "hidden_layernorm"), layer.norm(embeddings, "token_layernorm")]
    mixed = layer.linear(np.concatenate(both, -1), "input_proj")
    states = layer.norm(layer.after(mixed, layer.norm(mixed, "input_layernorm")), "final_layernorm")
    return layer.linear(states, "lm_head").astype(np.float32), states.astype(np.float32)


class _Layer:
    """A layer with these weights, over one sequence."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, _Array]) -> None:
        self._config, self._weights = config, weights
        self._heads, self._kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        self._head_size = config.get("head_dim", config["hidden_size"] // self._heads)

    def norm(self, states: FloatArray, name: str) -> FloatArray:
        """Root mean square normalisation."""
        root = np.sqrt((states**2).mean(-1, keepdims=True) + self._config["rms_norm_eps"])
        normal: FloatArray = states / root * self._weights[f"{name}.weight"]
        return normal

    def linear(self, states: FloatArray, name: str) -> FloatArray:
        """A product, with its bias."""
        found: FloatArray = states @ self._weights[f"{name}.weight"].T + self._weights.get(
            f"{name}.bias", np.float32(0)
        )
        return found

    def after(self, residual: FloatArray, inputs: FloatArray) -> FloatArray:
        """The states after attention of the inputs, added to `residual`, and the MLP."""
        heads, kv_heads, head_size = self._heads, self._kv_heads, self._head_size
        query, key, value = (self.linear(inputs, f"self_attn.{name}_proj") for name in "qkv")
        query = self._turned(query.reshape(-1, heads, head_size))
        key = np.repeat(self._turned(key.reshape(-1, kv_heads, head_size)), heads // kv_heads, 1)
        value = np.repeat(value.reshape(-1, kv_heads, head_size), heads // kv_heads, 1)
        scores = np.einsum("qhd,khd->hqk", query, key) / np.sqrt(head_size)
        scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        attended = np.einsum("hqk,khd->qhd", shares / shares.sum(-1, keepdims=True), value)
        states = residual + self.linear(attended.reshape(len(inputs), -1), "self_attn.o_proj")
        normal = self.norm(states, "post_attention_layernorm")
        gate = self.linear(normal, "mlp.gate_proj")
        return states + self.linear(gate / (1 + np.exp(-gate)) * self.linear(normal, "mlp.up_proj"), "mlp.down_proj")

    def _turned(self, states: FloatArray) -> FloatArray:
        head_size = self._head_size
        frequencies = self._config["rope_theta"] ** -(np.arange(0, head_size, 2) / head_size)
        angles = np.arange(len(states))[:, None, None] * frequencies
        first, second = np.split(states, 2, -1)
        cosines, sines = np.cos(angles), np.sin(angles)
        return np.concatenate([first * cosines - second * sines, second * cosines + first * sines], -1)


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
