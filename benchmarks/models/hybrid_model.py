"""Make a model with random weights in the shape of LFM2-350M, with 8-bit weights, for the benchmarks of engines.

    .make/architectures/bin/python -m benchmarks.models.hybrid_model DIRECTORY

Its answers are noise, but its cost is that of the real model: ten layers with short convolutions and six with
attention. `python -m benchmarks.engine.throughput DIRECTORY` compares engines on it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import nncf
import openvino as ov
import torch
from optimum.exporters.openvino import export_from_model
from transformers import Lfm2Config, Lfm2ForCausalLM

from tests.architectures.export import tokenizer

_CONV, _ATTENTION = "conv", "full_attention"
_ATTENTION_LAYERS = {2, 5, 8, 10, 12, 14}


def main() -> None:
    """Write the model to the directory."""
    directory = Path(sys.argv[1])
    config = Lfm2Config(
        vocab_size=65_536,
        hidden_size=1024,
        intermediate_size=6656,
        num_hidden_layers=16,
        num_attention_heads=16,
        num_key_value_heads=8,
        layer_types=[_ATTENTION if layer in _ATTENTION_LAYERS else _CONV for layer in range(16)],
        max_position_embeddings=128_000,
    )
    torch.manual_seed(0)
    model = Lfm2ForCausalLM(config).eval()
    export_from_model(model, output=directory, task="text-generation-with-past", stateful=True)
    graph = ov.Core().read_model(directory / "openvino_model.xml")
    graph = nncf.compress_weights(graph, mode=nncf.CompressWeightsMode.INT8_ASYM)
    whole = directory / "compressed.xml"
    ov.save_model(graph, whole, compress_to_fp16=False)
    del graph
    for path in (whole, whole.with_suffix(".bin")):
        path.replace(directory / f"openvino_model{path.suffix}")
    for name, made in zip(("tokenizer", "detokenizer"), _converted(), strict=True):
        ov.save_model(made, directory / f"openvino_{name}.xml")


def _converted() -> tuple[ov.Model, ov.Model]:
    from openvino_tokenizers import convert_tokenizer

    both: tuple[ov.Model, ov.Model] = convert_tokenizer(tokenizer(), with_detokenizer=True)
    return both


if __name__ == "__main__":
    main()
