"""Heads with random weights, of the sizes that published ones have, for benchmarks of drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import openvino as ov

from headrace.worker.draft_heads.hidden_states import embeddings_of, width_of
from headrace.worker.model.paging import read_paged
from headrace.worker.model.window_tables import attentions

NUM_MEDUSA_HEADS = 5
_HEAD_SIZE = 128
_MTP_LAYER = "model.mtp_layers.0"


def write_eagle_heads(model_dir: Path, directory: Path) -> None:
    """Heads in the format of EAGLE-3 for a model, with random weights of the usual sizes."""
    graph = read_paged(ov.Core(), model_dir).graph
    size = width_of(embeddings_of(graph))
    vocab_size = _vocabulary_of(graph)
    num_draft = min(32_000, vocab_size)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **_layer_config(size, vocab_size),
        "eagle_aux_hidden_state_layer_ids": [1, len(attentions(graph)) // 2, len(attentions(graph)) - 1],
    }
    shapes = {
        "fc": (size, 3 * size),
        **{f"midlayer.{name}": shape for name, shape in _layer_shapes(config, inputs=2 * size).items()},
        "lm_head": (num_draft, size),
    }
    rng = np.random.default_rng(0)
    tensors: dict[str, npt.NDArray[Any]] = {}
    for name, (rows, columns) in shapes.items():
        tensors[f"{name}.weight"] = _random(rng, rows, columns)
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = np.ones(size, np.float16)
    tensors["norm.weight"] = np.ones(size, np.float16)
    tensors["d2t"] = np.zeros(num_draft, np.int64)
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", tensors)


def write_mtp_layer(model_dir: Path, directory: Path) -> None:
    """A layer that predicts more tokens, as MiMo's checkpoints have it, with a vocabulary of its own."""
    graph = read_paged(ov.Core(), model_dir).graph
    size, vocab_size = width_of(embeddings_of(graph)), _vocabulary_of(graph)
    config = {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "num_nextn_predict_layers": 1,
        **_layer_config(size, vocab_size),
    }
    rng = np.random.default_rng(0)
    layer = {"input_proj": (size, 2 * size), **_layer_shapes(config, inputs=size)}
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm")
    tensors = {f"{_MTP_LAYER}.{name}.weight": _random(rng, *shape) for name, shape in layer.items()}
    tensors |= {f"{_MTP_LAYER}.{name}.weight": np.ones(size, np.float16) for name in norms}
    tensors["lm_head.weight"] = _random(rng, vocab_size, size)
    (directory / "config.json").write_text(json.dumps(config))
    write_safetensors(directory / "model.safetensors", tensors)


def write_medusa_heads(model_dir: Path, directory: Path) -> None:
    """Heads in the format of Medusa for a model, one layer each."""
    graph = read_paged(ov.Core(), model_dir).graph
    size = width_of(embeddings_of(graph))
    vocab_size = _vocabulary_of(graph)
    rng = np.random.default_rng(0)
    tensors = {}
    for head in range(NUM_MEDUSA_HEADS):
        tensors[f"{head}.0.linear.weight"] = _random(rng, size, size)
        tensors[f"{head}.0.linear.bias"] = np.zeros(size, np.float16)
        tensors[f"{head}.1.weight"] = _random(rng, vocab_size, size)
    (directory / "config.json").write_text(json.dumps({"medusa_num_heads": NUM_MEDUSA_HEADS, "medusa_num_layers": 1}))
    write_safetensors(directory / "medusa_lm_head.safetensors", tensors)


def _layer_config(size: int, vocab_size: int) -> dict[str, Any]:
    num_heads = size // _HEAD_SIZE
    return {
        "hidden_size": size,
        "num_attention_heads": num_heads,
        "num_key_value_heads": max(count for count in (1, 2, 4, 8) if num_heads % count == 0),
        "head_dim": _HEAD_SIZE,
        "vocab_size": vocab_size,
    }


def _layer_shapes(config: Mapping[str, Any], *, inputs: int) -> dict[str, tuple[int, int]]:
    """The matrices of a layer whose attention projects states of the size `inputs`."""
    size, inner = config["hidden_size"], config["hidden_size"] * 11 // 4
    of_heads, of_kv_heads = (config[f"num_{kind}_heads"] * _HEAD_SIZE for kind in ("attention", "key_value"))
    return {
        "self_attn.q_proj": (of_heads, inputs),
        "self_attn.k_proj": (of_kv_heads, inputs),
        "self_attn.v_proj": (of_kv_heads, inputs),
        "self_attn.o_proj": (size, of_heads),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }


def _vocabulary_of(graph: ov.Model) -> int:
    return int(graph.get_results()[0].get_output_partial_shape(0)[-1].get_length())


def _random(rng: np.random.Generator, rows: int, columns: int) -> npt.NDArray[np.float16]:
    integers = rng.integers(-127, 128, (rows, columns), np.int8)
    return (integers / np.float32(73 * columns**0.5)).astype(np.float16)


def write_safetensors(path: Path, tensors: Mapping[str, npt.NDArray[Any]]) -> None:
    """Write arrays of float16 and int64."""
    header, place = {}, 0
    for name, values in tensors.items():
        kind = "F16" if values.dtype == np.float16 else "I64"
        header[name] = {"dtype": kind, "shape": values.shape, "data_offsets": [place, place + values.nbytes]}
        place += values.nbytes
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for values in tensors.values():
            file.write(values.tobytes())
