"""Export encoders with random weights, and what transformers computes of them: `small_encoders.py OUTDIR NAME...`.

Runs in the environment of `export.py`; nothing is downloaded.

OUTDIR/NAME/               the model in float32, as optimum-intel writes it or OpenVINO converts it, with the files of
                           sentence-transformers
OUTDIR/NAME/reference.npz
    tokens   i64 [all lengths]           the texts, one after the other
    lengths  i64 [NUM_TEXTS]
    vectors  f32 [NUM_TEXTS, HIDDEN]     pooled and normalised, of each text alone
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openvino
import torch
import transformers
from optimum.exporters.openvino import export_from_model
from transformers import AutoModel

from tests.architectures.random_weights import random_encoder

VOCABULARY, HIDDEN = 512, 128
LENGTHS = (60, 3, 128, 17, 1, 200, 40, 96)
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 192,
    "num_attention_heads": 4,
    "max_position_embeddings": 514,
    "pad_token_id": 0,
}


class Encoder(NamedTuple):
    """A model type of transformers, values of its configuration, and its pooling in sentence-transformers. Without
    `is_known`, optimum-intel cannot export it, and OpenVINO converts it."""

    model_type: str
    pooling: str
    config: dict[str, Any]
    is_known: bool = True


ENCODERS = {
    "bert": Encoder("bert", "mean_tokens", {"num_hidden_layers": 2}),
    "xlm-roberta": Encoder(
        "xlm-roberta", "cls_token", {"num_hidden_layers": 2, "pad_token_id": 1, "type_vocab_size": 1}
    ),
    "qwen3": Encoder("qwen3", "lasttoken", {"num_hidden_layers": 2, "num_key_value_heads": 2, "head_dim": 32}),
    # Every third layer attends to all tokens, the others to 16 on each side.
    "modernbert": Encoder(
        "modernbert",
        "cls_token",
        {"num_hidden_layers": 4, "local_attention": 32, "reference_compile": False},
        is_known=False,
    ),
}


def vector_of(model: Any, tokens: np.ndarray, pooling: str) -> np.ndarray:
    """The vector of a text, of length 1."""
    with torch.no_grad():
        hidden = model(torch.from_numpy(tokens)[None]).last_hidden_state[0]
    pooled = {"mean_tokens": hidden.mean(0), "cls_token": hidden[0], "lasttoken": hidden[-1]}[pooling]
    return (pooled / pooled.norm()).numpy()


def convert(model: Any, directory: Path) -> None:
    """Convert a model with OpenVINO, as docs/how-to/embeddings.md does."""
    inputs = {name: torch.ones(1, 4, dtype=torch.int64) for name in ("input_ids", "attention_mask")}
    converted = openvino.convert_model(model, example_input=inputs)
    openvino.save_model(converted, directory / "openvino_model.xml", compress_to_fp16=False)
    model.config.save_pretrained(directory)


def export(name: str, directory: Path) -> None:
    """Write one model and its reference."""
    encoder = ENCODERS[name]
    model = random_encoder(AutoModel, encoder.model_type, **{**_COMMON, **encoder.config})
    part = directory.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    if encoder.is_known:
        export_from_model(model, output=part, task="feature-extraction", stateful=False)
    else:
        convert(model, part)
    stages = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": number, "path": f"{number}_{kind}" if number else "", "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(stages)
    ]
    (part / "modules.json").write_text(json.dumps(modules))
    (part / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": HIDDEN, f"pooling_mode_{encoder.pooling}": True}
    (part / "1_Pooling/config.json").write_text(json.dumps(pooling))
    rng = np.random.default_rng(9)
    texts = [rng.integers(4, VOCABULARY, length) for length in LENGTHS]
    vectors = np.stack([vector_of(model, text, encoder.pooling) for text in texts])
    np.savez(part / "reference.npz", tokens=np.concatenate(texts), lengths=np.array(LENGTHS), vectors=vectors)
    part.rename(directory)


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    transformers.utils.logging.set_verbosity_error()
    for family in sys.argv[2:]:
        export(family, Path(sys.argv[1]) / family)
