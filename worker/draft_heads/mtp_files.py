"""Reads the layer that predicts more tokens of a checkpoint: config.json and *.safetensors in a directory, as MiMo is
published.

    model.mtp_layers.0.token_layernorm.weight    [size]             normalises the embedding of the next token
    model.mtp_layers.0.hidden_layernorm.weight   [size]             normalises the model's last hidden state
    model.mtp_layers.0.input_proj.weight         [size, 2 x size]   mixes hidden state and embedding, in this order
    model.mtp_layers.0.self_attn, .mlp, .input_layernorm, .post_attention_layernorm      a layer as in the model
    model.mtp_layers.0.final_layernorm.weight    [size]
    lm_head.weight                               [vocabulary, size]     the model's, which the layer shares
    model.embed_tokens.weight                    [vocabulary, size]     of these only where lm_head.weight is the same

The other tensors of the checkpoint are not read. A layer is named as EAGLE-3 heads are here, whose shape it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.common.model_files.safetensors import FLOATS
from headrace.worker.config import ConfigurationError
from headrace.worker.draft_heads.eagle_files import (
    EagleFiles,
    EagleShape,
    check_weights,
    layer_shapes,
    read_config,
    read_weights,
    shape_of,
)

_Array = npt.NDArray[Any]
_LAYER = "model.mtp_layers.0."
_HEAD, _EMBEDDINGS = "lm_head.weight", "model.embed_tokens.weight"
_WHAT = "a layer that predicts more tokens"


def read_mtp(path: Path) -> EagleFiles:
    """Read the first such layer. ConfigurationError if it is incomplete, damaged or of another kind."""
    config = read_config(path)
    head = _EMBEDDINGS if config.get("tie_word_embeddings") else _HEAD
    wanted = (head, _LAYER)
    found = read_weights(path, "model.safetensors", ".bin", FLOATS, lambda name: name.startswith(wanted))
    weights = {name.removeprefix(_LAYER): values for name, values in found.items() if name != head}
    if not weights:
        raise ConfigurationError(
            f"the checkpoint in {path} has no {_LAYER}input_proj.weight; layers that predict more tokens are read as "
            "MiMo has them, and other models' are not supported"
        )
    if head in found:
        weights[_HEAD] = found[head]
    shape = shape_of({**config, "num_hidden_layers": 1}, weights, path)
    check_weights(weights, _shapes(shape, weights), path, _WHAT)
    return EagleFiles(path, shape, weights, np.arange(shape.vocab_size))


def _shapes(shape: EagleShape, weights: Mapping[str, _Array]) -> dict[str, tuple[int, ...]]:
    size = shape.size
    norms = ("token_layernorm", "hidden_layernorm", "input_layernorm", "post_attention_layernorm", "final_layernorm")
    of_heads, of_kv_heads = shape.num_heads * shape.head_size, shape.num_kv_heads * shape.head_size
    biases = {"q": of_heads, "k": of_kv_heads, "v": of_kv_heads}
    return {
        "input_proj.weight": (size, 2 * size),
        **layer_shapes(shape, weights, inputs=size),
        **{f"{name}.weight": (size,) for name in norms},
        **{name: (count,) for part, count in biases.items() if (name := f"self_attn.{part}_proj.bias") in weights},
        _HEAD: (shape.vocab_size, size),
    }
