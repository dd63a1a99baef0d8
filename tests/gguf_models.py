"""Small GGUF files with random weights, as llama.cpp's converter would write them, in any of its quantisations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize

CONTEXT = 512
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)


@dataclass(frozen=True)
class TinyModel:
    """A small model. `types` maps parts of tensor names to quantisations; `default` is the quantisation of all other
    matrices. `rope_factors` divide the rotary frequencies, as in Llama 3.1."""

    architecture: str = "llama"
    default: GGMLQuantizationType = GGMLQuantizationType.Q8_0
    types: Mapping[str, GGMLQuantizationType] = field(default_factory=dict)
    layers: int = 2
    hidden: int = 256
    feed_forward: int = 512
    heads: int = 4
    kv_heads: int = 2
    head_size: int = 64
    rope_factors: bool = False
    tied: bool = False
    pieces: int = 1
    spare_tokens: int = 0
    """Tokens that no text has."""
    experts: int = 0
    used_experts: int = 0
    templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates besides the default one, by name."""


def byte_tokens() -> list[str]:
    """A character for each byte, as byte-level BPE has them."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(rest))]


def tensors_of(model: TinyModel) -> dict[str, np.ndarray]:
    """The weights in f32, [out, in], by their names in a GGUF file."""
    random = np.random.default_rng(5)

    def experts(rows: int, columns: int) -> np.ndarray:
        return np.stack([matrix(rows, columns) for _ in range(model.experts)])

    def matrix(rows: int, columns: int, scale: float = 1.0) -> np.ndarray:
        drawn = random.standard_normal((rows, columns)) * scale / np.sqrt(columns)
        # Not centred: a zero point that is rounded shows.
        return (drawn + random.uniform(-1, 1, (rows, 1)) * scale / np.sqrt(columns) / 3).astype(np.float32)

    def vector(size: int) -> np.ndarray:
        return (1 + random.standard_normal(size) * 0.1).astype(np.float32)

    num_tokens = len(_tokens(model))
    found = {
        "token_embd.weight": matrix(num_tokens, model.hidden, np.sqrt(model.hidden)),
        "output_norm.weight": vector(model.hidden),
    }
    if not model.tied:
        found["output.weight"] = matrix(num_tokens, model.hidden, 2.0)
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    for layer in range(model.layers):
        block = {
            "attn_norm": vector(model.hidden),
            "attn_q": matrix(queries, model.hidden),
            "attn_k": matrix(keys, model.hidden),
            "attn_v": matrix(keys, model.hidden),
            "attn_output": matrix(model.hidden, queries),
            "ffn_norm": vector(model.hidden),
        }
        if model.experts:
            block |= {
                "ffn_gate_inp": matrix(model.experts, model.hidden),
                "ffn_gate_exps": experts(model.feed_forward, model.hidden),
                "ffn_up_exps": experts(model.feed_forward, model.hidden),
                "ffn_down_exps": experts(model.hidden, model.feed_forward),
            }
        else:
            block |= {
                "ffn_gate": matrix(model.feed_forward, model.hidden),
                "ffn_up": matrix(model.feed_forward, model.hidden),
                "ffn_down": matrix(model.hidden, model.feed_forward),
            }
        if model.architecture in ("qwen3", "qwen3moe"):
            block |= {"attn_q_norm": vector(model.head_size), "attn_k_norm": vector(model.head_size)}
        found |= {f"blk.{layer}.{name}.weight": value for name, value in block.items()}
        if model.architecture == "qwen2":
            biases = {"attn_q": queries, "attn_k": keys, "attn_v": keys}
            found |= {f"blk.{layer}.{name}.bias": vector(size) - 1 for name, size in biases.items()}
    if model.rope_factors:
        found["rope_freqs.weight"] = np.linspace(1, 8, model.head_size // 2).astype(np.float32)
    return found


def _tokens(model: TinyModel) -> list[str]:
    spare = [f"<|spare-{number}|>" for number in range(model.spare_tokens)]
    return [*byte_tokens(), "<|endoftext|>", "<|im_start|>", "<|im_end|>", "th", "he", "Ġt", "Ġthe", *spare]


def write_gguf(model: TinyModel, path: Path) -> Path:
    """Write the model; in pieces, PATH is the first one's name without -00001-of-0000N.gguf."""
    split = {"split_max_tensors": -(-len(tensors_of(model)) // model.pieces)} if model.pieces > 1 else {}
    writer = GGUFWriter(path, model.architecture, **split)
    _add_shape(writer, model)
    _add_tokenizer(writer, model)
    for name, values in tensors_of(model).items():
        kind = next((kind for part, kind in model.types.items() if part in name), model.default)
        if values.ndim < 2:
            kind = GGMLQuantizationType.F32
        writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return min(path.parent.glob(f"{path.stem}*.gguf"))


def _add_shape(writer: GGUFWriter, model: TinyModel) -> None:
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(model.hidden)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.feed_forward)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_size)
    writer.add_value_length(model.head_size)
    writer.add_rope_dimension_count(model.head_size)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(_tokens(model)))
    if model.experts:
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(model.used_experts)
    writer.add_file_type(7)


def _add_tokenizer(writer: GGUFWriter, model: TinyModel) -> None:
    tokens = _tokens(model)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token.startswith("<|") else 1 for token in tokens])
    writer.add_token_merges(["t h", "h e", "Ġ t", "Ġt he"])
    writer.add_bos_token_id(tokens.index("<|im_start|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_add_bos_token(False)
    templates = {"default": _TEMPLATE, **model.templates}
    writer.add_chat_template([{"name": name, "template": template} for name, template in templates.items()])
