"""Creates models with random weights in the shapes of real ones, quantised and converted like pulled models.

    python -m benchmarks.random_model SHAPE DIRECTORY [--layers N] [--kind Q4_0] [--group 128] [--keep-file]

Their output is noise, but their cost is that of the real models: a 7B model has 4 GB of 4-bit weights and a vocabulary
of 152k. With a smaller number of layers, the cost of the layers is proportional, and the head costs the same.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import openvino as ov
import openvino.opset13 as ops
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFWriter, bytes_to_unicode

from headrace.cli.models.convert import config_of
from headrace.common.model_files.gguf_files import metadata_of, open_gguf


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen2 model."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_size: int
    intermediate: int
    vocabulary: int


SHAPES = {
    "qwen2.5-0.5b": Shape(24, 896, 14, 2, 64, 4864, 151_936),
    "qwen2.5-1.5b": Shape(28, 1536, 12, 2, 128, 8960, 151_936),
    "qwen2.5-7b": Shape(28, 3584, 28, 4, 128, 18_944, 152_064),
}
_CONVERT = (
    "import sys; sys.modules['openvino_telemetry'] = None; import openvino_genai; "
    "openvino_genai.LLMPipeline(sys.argv[1], 'CPU', enable_save_ov_model=True)"
)


class _Block(NamedTuple):
    """A block of a kind of weights: how many, in how many bytes, and the float16 numbers at its begin, in steps of a
    4-bit weight. They are near those of real files, and centre the weights."""

    weights: int
    num_bytes: int
    halves: tuple[float, ...]


# Scales of Q4_K are multiplied by integers of 6 bits, 32 on average.
_BLOCKS = {
    Kind.Q4_0: _Block(32, 18, (1.0,)),
    Kind.Q4_1: _Block(32, 20, (1.0, -7.7)),
    Kind.Q4_K: _Block(256, 144, (1 / 32, 7.7 / 32)),
    Kind.Q8_0: _Block(32, 34, (1 / 16,)),
}
# One step of a 4-bit weight. Wider models have finer steps, so that their products spread alike.
_STEP, _STEP_HIDDEN = 0.0045, 896
# Makes the logits spread by about 3, as those of trained models do.
_LAST_NORM = 4.0


def write_random_model(
    directory: Path, shape: Shape = SHAPES["qwen2.5-0.5b"], kind: Kind = Kind.Q4_0, *, keeps_file: bool = False
) -> Path:
    """Create a model in a directory, by way of a GGUF file, random.gguf, which is deleted unless `keeps_file`. `kind`
    is the quantisation of the layers' weights. The smallest model takes about 20 s."""
    path = directory / "random.gguf"
    writer = GGUFWriter(path, "qwen2")
    _write_metadata(writer, shape)
    _write_tokenizer(writer, shape.vocabulary)
    _write_tensors(writer, shape, kind, np.random.default_rng(0))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # The pipeline writes the model before it compiles it, which for these weights it may refuse: we need the file only.
    subprocess.run([sys.executable, "-c", _CONVERT, str(path)], check=False, capture_output=True)
    config = config_of(metadata_of(open_gguf(path)))
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    if not keeps_file:
        path.unlink()
    if not (directory / "openvino_model.xml").is_file():
        raise RuntimeError("openvino-genai wrote no model")
    return directory


def regroup(directory: Path, group: int) -> None:
    """Give every `group` 4-bit weights one scale and one zero point, the first of those that they had: those of Q4_0
    are for 32 weights, those that `headrace pull --weights int4` makes for 128."""
    path, new = directory / "openvino_model.xml", directory / "regrouped.xml"
    model = ov.Core().read_model(path)
    for multiply in model.get_ops():
        if multiply.get_type_name() != "Multiply":
            continue
        subtract, scales = (value.get_node() for value in multiply.input_values())
        if subtract.get_type_name() != "Subtract":
            continue
        weights, zeros = (value.get_node() for value in subtract.input_values())
        inner = weights.input_value(0).get_node()
        if inner.get_output_element_type(0) != ov.Type.u4:
            continue
        rows, groups, size = inner.get_output_shape(0)
        factor = group // size
        longer = ops.constant(ov.Tensor(inner.data, [rows, groups // factor, group], ov.Type.u4))
        weights.input(0).replace_source_output(longer.output(0))
        packed = zeros.input_value(0).get_node().data.reshape(-1)
        fewer = np.stack((packed & 15, packed >> 4), axis=1).reshape(rows, groups)[:, ::factor]
        zeros.input(0).replace_source_output(_packed(fewer[:, :, None]).output(0))
        multiply.input(1).replace_source_output(ops.constant(scales.data[:, ::factor].copy()).output(0))
    model.validate_nodes_and_infer_types()
    ov.save_model(model, new, compress_to_fp16=False)
    del model
    for suffix in (".bin", ".xml"):
        new.with_suffix(suffix).replace(path.with_suffix(suffix))


def _packed(numbers: npt.NDArray[np.uint8]) -> ov.Node:
    """A constant of 4-bit numbers, two in a byte, the first in its lower half."""
    pairs = numbers.reshape(-1, 2)
    return ops.constant(ov.Tensor(pairs[:, 0] | pairs[:, 1] << 4, list(numbers.shape), ov.Type.u4))


def _write_metadata(writer: GGUFWriter, shape: Shape) -> None:
    writer.add_name("random weights")
    writer.add_file_type(2)
    writer.add_block_count(shape.layers)
    writer.add_context_length(32_768)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.intermediate)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_rope_freq_base(1e6)
    writer.add_layer_norm_rms_eps(1e-6)


def _write_tokenizer(writer: GGUFWriter, vocabulary: int) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    characters = list(bytes_to_unicode().values())
    words = [f"t{number}" for number in range(vocabulary - len(characters) - 1)]
    writer.add_token_list([*characters, *words, "<|end|>"])
    # openvino-genai reads no tokenizer without a special token.
    writer.add_token_types([1] * (vocabulary - 1) + [3])
    writer.add_token_merges(["t 0"])
    writer.add_bos_token_id(vocabulary - 1)
    writer.add_eos_token_id(vocabulary - 1)
    writer.add_pad_token_id(vocabulary - 1)


def _write_tensors(writer: GGUFWriter, shape: Shape, kind: Kind, rng: np.random.Generator) -> None:
    hidden, intermediate, kv_size = shape.hidden, shape.intermediate, shape.kv_heads * shape.head_size
    step = _STEP * math.sqrt(_STEP_HIDDEN / hidden)
    ones = np.ones(hidden, np.float32)
    _add_quantised(writer, rng, "token_embd.weight", (shape.vocabulary, hidden), step, Kind.Q8_0)
    writer.add_tensor("output_norm.weight", _LAST_NORM * ones)
    for layer in range(shape.layers):
        prefix = f"blk.{layer}"
        for name, rows, columns in (
            ("attn_q", hidden, hidden),
            ("attn_k", kv_size, hidden),
            ("attn_v", kv_size, hidden),
            ("attn_output", hidden, hidden),
            ("ffn_gate", intermediate, hidden),
            ("ffn_up", intermediate, hidden),
            ("ffn_down", hidden, intermediate),
        ):
            _add_quantised(writer, rng, f"{prefix}.{name}.weight", (rows, columns), step, kind)
        for name, size in (("attn_q", hidden), ("attn_k", kv_size), ("attn_v", kv_size)):
            writer.add_tensor(f"{prefix}.{name}.bias", np.zeros(size, np.float32))
        writer.add_tensor(f"{prefix}.attn_norm.weight", ones)
        writer.add_tensor(f"{prefix}.ffn_norm.weight", ones)


def _add_quantised(
    writer: GGUFWriter,
    rng: np.random.Generator,
    name: str,
    size: tuple[int, int],
    step: float,
    kind: Kind,
) -> None:
    """Random weights in blocks of scales that differ, as those of real files do. A file holds equal constants once."""
    rows, columns = size
    block = _BLOCKS[kind]
    blocks: npt.NDArray[np.uint8] = rng.integers(0, 256, (rows, columns // block.weights, block.num_bytes), np.uint8)
    factors = rng.uniform(0.8, 1.2, (*blocks.shape[:2], 1))
    halves = (factors * [half * step for half in block.halves]).astype(np.float16).view(np.uint8)
    blocks[:, :, : halves.shape[2]] = halves
    writer.add_tensor(name, blocks.reshape(rows, -1), raw_dtype=kind)


def main() -> None:
    """Make the model that the arguments ask for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--layers", type=int, help="by default as many as the real model has")
    parser.add_argument(
        "--kind", choices=[kind.name for kind in _BLOCKS], default="Q4_0", help="of the layers' weights"
    )
    parser.add_argument("--group", type=int, help="4-bit weights that share a scale; by default as many as in the kind")
    parser.add_argument("--keep-file", action="store_true", help="leave the GGUF file, random.gguf, there")
    args = parser.parse_args()
    shape = SHAPES[args.shape]
    args.directory.mkdir(parents=True, exist_ok=True)
    shape = replace(shape, layers=args.layers or shape.layers)
    print(write_random_model(args.directory, shape, Kind[args.kind], keeps_file=args.keep_file))
    if args.group:
        regroup(args.directory, args.group)


if __name__ == "__main__":
    main()
