"""Writes GGUF files of transformers' weights, with the names, the order of rows and the numbers of llama.cpp's
converter."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from tests.architectures.families import CONTEXT, VOCABULARY
from tests.architectures.gguf_families import GgufFamily
from tests.architectures.gguf_model import interleaved

_Array = npt.NDArray[Any]
_TABLE = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
_MODULES = {
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in ("q", "k", "v", "qkv")},
    **{f"self_attn.{part}_norm": f"attn_{part}_norm" for part in "qk"},
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "self_attn.o_proj": "attn_output",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "block_sparse_moe.router.layer": "ffn_gate_inp",
    "block_sparse_moe.output_linear": "ffn_down_exps",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "post_self_attn_layernorm": "post_attention_norm",
    "post_mlp_layernorm": "post_ffw_norm",
}
_OF_GPT_OSS = re.compile(r"model\.layers\.(\d+)\.(?:self_attn\.(sinks)|mlp\.experts\.(gate_up|down)_proj(_bias)?)")
_OF_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT = re.compile(r"(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)")
_OF_EXPERTS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_PERMUTED = ("llama", "granite", "granitemoe", "smollm3")


def write_gguf_of(made: GgufFamily, config: Mapping[str, Any], weights: Mapping[str, _Array], path: Path) -> Path:
    """Write the file, with all weights in float32. `config` and `weights` are transformers'."""
    writer = GGUFWriter(path, made.architecture)
    _add_shape(writer, config)
    for key, value in made.metadata.items():
        name = f"{made.architecture}.{key}"
        if isinstance(value, list):
            writer.add_array(name, value)
        elif isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        else:
            writer.add_uint32(name, value)
    _add_tokenizer(writer)
    for name, values in _tensors(made, config, weights):
        writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    for kind in ("short", "long"):
        if factors := (config.get("rope_scaling") or {}).get(f"{kind}_factor"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _head_size(config: Mapping[str, Any]) -> int:
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _add_shape(writer: GGUFWriter, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(_head_size(config))
    writer.add_value_length(_head_size(config))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_vocab_size(VOCABULARY)


def _add_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*(f"t{token_id}" for token_id in range(VOCABULARY - 2)), "t", "0"])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 0"])
    writer.add_eos_token_id(2)


def _tensors(
    made: GgufFamily, config: Mapping[str, Any], weights: Mapping[str, _Array]
) -> Iterator[tuple[str, _Array]]:
    is_gemma = made.architecture.startswith("gemma")
    of_experts: dict[str, dict[int, _Array]] = {}
    for key, values in weights.items():
        if key in _TABLE:
            if key == "lm_head.weight" and np.array_equal(values, weights["model.embed_tokens.weight"]):
                continue
            yield _TABLE[key], values + 1 if is_gemma and "norm" in key else values
            continue
        if of_gpt_oss := _OF_GPT_OSS.fullmatch(key):
            yield from _of_gpt_oss(*of_gpt_oss.groups(), values)
            continue
        of_layer = _OF_LAYER.fullmatch(key)
        assert of_layer is not None, key
        layer, module, end = of_layer.groups()
        if found := _EXPERT.fullmatch(module):
            name = f"blk.{layer}.ffn_{_OF_EXPERTS[found[2]]}_exps.weight"
            of_experts.setdefault(name, {})[int(found[1])] = values
            continue
        if module == "block_sparse_moe.input_linear":
            for part, half in zip(("gate", "up"), np.split(values, 2, axis=1), strict=True):
                yield f"blk.{layer}.ffn_{part}_exps.weight", half
            continue
        name = _MODULES[module]
        if module == "post_attention_layernorm" and made.architecture in ("gemma2", "gemma3", "gpt-oss"):
            name = "post_attention_norm"
        if name in ("attn_q", "attn_k") and made.architecture in _PERMUTED:
            heads = config["num_attention_heads" if name == "attn_q" else "num_key_value_heads"]
            values = interleaved(values, heads)
        yield f"blk.{layer}.{name}.{end}", values + 1 if is_gemma and name.endswith("_norm") else values
    for name, found_experts in of_experts.items():
        yield name, np.stack([found_experts[expert] for expert in sorted(found_experts)])


def _of_gpt_oss(
    layer: str, sinks: str | None, part: str, bias: str | None, values: _Array
) -> Iterator[tuple[str, _Array]]:
    """Parameters that are no modules' weights. Rows of gates and others take turns."""
    if sinks:
        yield f"blk.{layer}.attn_sinks.weight", values
        return
    end = "bias" if bias else "weight"
    rows = values if bias else values.swapaxes(1, 2)
    parts = {"gate": rows[:, ::2], "up": rows[:, 1::2]} if part == "gate_up" else {"down": rows}
    for name, of_part in parts.items():
        yield f"blk.{layer}.ffn_{name}_exps.{end}", of_part
