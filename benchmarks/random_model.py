"""A model of the shape of Qwen2.5-0.5B with random weights, quantised and converted as a pulled one: the smallest on
the market that has a vocabulary of 152k. What it computes is noise; what it costs is what the real one costs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
from gguf import GGMLQuantizationType, GGUFWriter

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, INTERMEDIATE, VOCABULARY = 24, 896, 14, 2, 64, 4864, 151_936
_CONVERT = (
    "import sys; sys.modules['openvino_telemetry'] = None; import openvino_genai; "
    "openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
)
# Weights of a block and the type of its one scale, see gguf's constants.
_BLOCK = 32
_STEP = 0.0045
# Makes the logits spread by about 3, as those of trained models do.
_LAST_NORM = 4.0


def write_random_model(directory: Path) -> Path:
    """Make the model in a directory, through a GGUF file that is deleted. Takes some 20 s."""
    path = directory / "random.gguf"
    writer = GGUFWriter(path, "qwen2")
    _write_metadata(writer)
    _write_tokenizer(writer)
    _write_tensors(writer, np.random.default_rng(0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # The pipeline writes the model before it compiles it, which for these weights it may refuse: we need the file only.
    subprocess.run([sys.executable, "-c", _CONVERT, str(path)], check=False, capture_output=True)
    path.unlink()
    if not (directory / "openvino_model.xml").is_file():
        raise RuntimeError("openvino-genai wrote no model; the benchmark needs headrace[convert]")
    return directory


def _write_metadata(writer: GGUFWriter) -> None:
    writer.add_name("random weights")
    writer.add_file_type(2)
    writer.add_block_count(LAYERS)
    writer.add_context_length(32_768)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INTERMEDIATE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)


def _write_tokenizer(writer: GGUFWriter) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([f"t{token_id}" for token_id in range(VOCABULARY)])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(VOCABULARY - 1)
    writer.add_eos_token_id(VOCABULARY - 1)
    writer.add_pad_token_id(VOCABULARY - 1)


def _write_tensors(writer: GGUFWriter, rng: np.random.Generator) -> None:
    ones = np.ones(HIDDEN, np.float32)
    kv_size = KV_HEADS * HEAD_SIZE
    _add_quantised(writer, rng, "token_embd.weight", VOCABULARY, HIDDEN, GGMLQuantizationType.Q8_0)
    writer.add_tensor("output_norm.weight", _LAST_NORM * ones)
    for layer in range(LAYERS):
        prefix = f"blk.{layer}"
        for name, rows, columns in (
            ("attn_q", HIDDEN, HIDDEN),
            ("attn_k", kv_size, HIDDEN),
            ("attn_v", kv_size, HIDDEN),
            ("attn_output", HIDDEN, HIDDEN),
            ("ffn_gate", INTERMEDIATE, HIDDEN),
            ("ffn_up", INTERMEDIATE, HIDDEN),
            ("ffn_down", HIDDEN, INTERMEDIATE),
        ):
            _add_quantised(writer, rng, f"{prefix}.{name}.weight", rows, columns, GGMLQuantizationType.Q4_0)
        for name, size in (("attn_q", HIDDEN), ("attn_k", kv_size), ("attn_v", kv_size)):
            writer.add_tensor(f"{prefix}.{name}.bias", np.zeros(size, np.float32))
        writer.add_tensor(f"{prefix}.attn_norm.weight", ones)
        writer.add_tensor(f"{prefix}.ffn_norm.weight", ones)


def _add_quantised(
    writer: GGUFWriter, rng: np.random.Generator, name: str, rows: int, columns: int, kind: GGMLQuantizationType
) -> None:
    """Blocks of 32 weights: a float16 scale, then 4 or 8 bits a weight, all random."""
    is_wide = kind == GGMLQuantizationType.Q8_0
    num_bytes = _BLOCK if is_wide else _BLOCK // 2
    blocks: npt.NDArray[np.uint8] = rng.integers(0, 256, (rows, columns // _BLOCK, 2 + num_bytes), np.uint8)
    # Steps of 8 bits are 16 times finer.
    blocks[:, :, :2] = np.array([_STEP / 16 if is_wide else _STEP], np.float16).view(np.uint8)
    writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=kind)
