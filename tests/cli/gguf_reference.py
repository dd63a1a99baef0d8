"""A reference implementation of a small GGUF model in float64, with llama.cpp's order of rotated pairs."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from tests.gguf_models import TinyModel

_Array = npt.NDArray[Any]


def log_probabilities(model: TinyModel, weights: dict[str, _Array], tokens: list[int]) -> _Array:
    """Log-probabilities after each token: f64 [tokens, vocabulary]. `weights` maps the file's tensor names to
    dequantised weights."""
    hidden = weights["token_embd.weight"][tokens].astype(np.float64)
    for layer in range(model.layers):
        own = {name.removeprefix(f"blk.{layer}."): value for name, value in weights.items()}
        hidden = hidden + _attention(model, own, _norm(hidden, own["attn_norm.weight"]), weights)
        hidden = hidden + _feed_forward(model, own, _norm(hidden, own["ffn_norm.weight"]))
    head = weights.get("output.weight", weights["token_embd.weight"])
    logits = _norm(hidden, weights["output_norm.weight"]) @ head.T
    shifted = logits - logits.max(-1, keepdims=True)
    found: _Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return found


def _feed_forward(model: TinyModel, own: dict[str, _Array], states: _Array) -> _Array:
    if not model.experts:
        return _gated(states, *(own[f"ffn_{part}.weight"] for part in ("gate", "up", "down")))
    scores = np.exp(states @ own["ffn_gate_inp.weight"].T)
    found = np.zeros_like(states)
    for token, shares in enumerate(scores):
        best = np.argsort(-shares)[: model.used_experts]
        for expert in best:
            parts = (own[f"ffn_{part}_exps.weight"][expert] for part in ("gate", "up", "down"))
            found[token] += shares[expert] / shares[best].sum() * _gated(states[token], *parts)
    return found


def _gated(states: _Array, gate: _Array, up: _Array, down: _Array) -> _Array:
    gates = states @ gate.T
    found: _Array = (gates / (1 + np.exp(-gates)) * (states @ up.T)) @ down.T
    return found


def _norm(states: _Array, weight: _Array) -> _Array:
    normal: _Array = states / np.sqrt((states**2).mean(-1, keepdims=True) + 1e-5) * weight
    return normal


def _attention(model: TinyModel, own: dict[str, _Array], states: _Array, weights: dict[str, _Array]) -> _Array:
    heads = {}
    for part, count in (("q", model.heads), ("k", model.kv_heads), ("v", model.kv_heads)):
        values = states @ own[f"attn_{part}.weight"].T + own.get(f"attn_{part}.bias", 0)
        values = values.reshape(len(states), count, model.head_size)
        if f"attn_{part}_norm.weight" in own:
            values = _norm(values, own[f"attn_{part}_norm.weight"])
        heads[part] = values
    for part in "qk":
        heads[part] = _rotated(model, heads[part], weights.get("rope_freqs.weight"))
    shared = model.heads // model.kv_heads
    keys, values = (np.repeat(heads[part], shared, axis=1) for part in "kv")
    scores = np.einsum("qhd,khd->hqk", heads["q"], keys) / np.sqrt(model.head_size)
    scores += np.triu(np.full(scores.shape[1:], -np.inf), 1)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    found: _Array = np.einsum("hqk,khd->qhd", shares, values).reshape(len(states), -1) @ own["attn_output.weight"].T
    return found


def _rotated(model: TinyModel, values: _Array, factors: _Array | None) -> _Array:
    size = model.head_size
    frequencies = 10000.0 ** (-np.arange(0, size, 2) / size) / (1 if factors is None else factors)
    angles = (np.arange(len(values))[:, None] * frequencies)[:, None]
    # llama: neighbours are a pair. Others: the first half and the second.
    first = slice(0, None, 2) if model.architecture == "llama" else slice(0, size // 2)
    second = slice(1, None, 2) if model.architecture == "llama" else slice(size // 2, None)
    turned = np.empty_like(values)
    turned[..., first] = values[..., first] * np.cos(angles) - values[..., second] * np.sin(angles)
    turned[..., second] = values[..., first] * np.sin(angles) + values[..., second] * np.cos(angles)
    return turned
