"""A small Llama as a GGUF file, with the weights of the exported one, and its converted model."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFWriter

from tests.architectures.families import CONTEXT, VOCABULARY

LAYERS, HEADS, KV_HEADS, HIDDEN, INTERMEDIATE = 2, 4, 2, 128, 192
_CONVERT = (
    "import sys; sys.modules['openvino_telemetry'] = None; import openvino_genai; "
    "openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
)
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def interleaved(weights: npt.NDArray[Any], num_heads: int) -> npt.NDArray[Any]:
    """Rows of query or key as a GGUF file of a Llama has them: the two halves of each head take turns."""
    halves = weights.reshape(num_heads, 2, -1, weights.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def write_converted(directory: Path, weights: Mapping[str, npt.NDArray[np.float32]]) -> Path:
    """Write the file and convert it into the directory, in half precision."""
    path = directory / "small.gguf"
    writer = GGUFWriter(path, "llama")
    writer.add_file_type(1)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{token_id}" for token_id in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    _add(writer, "token_embd.weight", weights["model.embed_tokens.weight"])
    _add(writer, "output.weight", weights["lm_head.weight"])
    _add(writer, "output_norm.weight", weights["model.norm.weight"])
    for layer in range(LAYERS):
        for module, name in NAMES.items():
            values = weights[f"model.layers.{layer}.{module}.weight"]
            if name in ("attn_q", "attn_k"):
                values = interleaved(values, HEADS if name == "attn_q" else KV_HEADS)
            _add(writer, f"blk.{layer}.{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    subprocess.run([sys.executable, "-c", _CONVERT, str(path)], check=False, capture_output=True)
    path.unlink()
    return directory


def _add(writer: GGUFWriter, name: str, values: npt.NDArray[np.float32]) -> None:
    writer.add_tensor(name, values if values.ndim == 1 else values.astype(np.float16))
