"""Writes a checkpoint in safetensors form from a GGUF file of a Llama, for peers that read nothing else:

    python -m benchmarks.models.checkpoint FILE.gguf DIRECTORY

Weights become bfloat16, so answers are those of the quantised file. It needs PyTorch, transformers and gguf, and
nothing of headrace: run it with the Python of the peer's environment, `PYTHON benchmarks/models/checkpoint.py ...`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, LlamaConfig

_OF_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def name_of(tensor: str) -> str:
    """A tensor's name in the checkpoint. Raises KeyError for one that no Llama has."""
    stem = tensor.removesuffix(".weight")
    if not stem.startswith("blk."):
        return f"{_OF_MODEL[stem]}.weight"
    _, number, part = stem.split(".")
    return f"model.layers.{number}.{_OF_LAYER[part]}.weight"


def in_halves(weight: Any, heads: int) -> Any:
    """Rows of queries or keys in the order of checkpoints: GGUF has the two halves of a rotation next to each other."""
    return weight.reshape(heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def main() -> None:
    """Write it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("directory", type=Path)
    args = parser.parse_args()
    reader = gguf.GGUFReader(args.file)

    def number(key: str) -> Any:
        return reader.fields[f"llama.{key}"].contents()

    heads, kv_heads = number("attention.head_count"), number("attention.head_count_kv")
    weights = {}
    for tensor in reader.tensors:
        weight = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if ".attn_q." in tensor.name or ".attn_k." in tensor.name:
            weight = in_halves(weight, heads if ".attn_q." in tensor.name else kv_heads)
        weights[name_of(tensor.name)] = torch.from_numpy(np.ascontiguousarray(weight)).to(torch.bfloat16)
    args.directory.mkdir(parents=True, exist_ok=True)
    save_file(weights, args.directory / "model.safetensors", metadata={"format": "pt"})
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=weights["model.embed_tokens.weight"].shape[0],
        hidden_size=number("embedding_length"),
        intermediate_size=number("feed_forward_length"),
        num_hidden_layers=number("block_count"),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=number("context_length"),
        rms_norm_eps=number("attention.layer_norm_rms_epsilon"),
        rope_theta=number("rope.freq_base"),
        tie_word_embeddings="lm_head.weight" not in weights,
        bos_token_id=reader.fields["tokenizer.ggml.bos_token_id"].contents(),
        eos_token_id=reader.fields["tokenizer.ggml.eos_token_id"].contents(),
        dtype="bfloat16",
    ).save_pretrained(args.directory)
    AutoTokenizer.from_pretrained(args.file.parent, gguf_file=args.file.name).save_pretrained(args.directory)


if __name__ == "__main__":
    main()
