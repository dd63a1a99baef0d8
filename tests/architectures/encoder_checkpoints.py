"""Write embedders and rerankers with random weights as hubs have them, and what transformers computes of them:
`encoder_checkpoints.py OUTDIR NAME...`. Runs in the environment of `export.py`.

OUTDIR/NAME/checkpoint/    weights in bfloat16, a small tokenizer, and the files that say what the model is for
OUTDIR/NAME/reference.npz
    vectors  f32 [texts, dimensions]         of `TEXTS`, by an embedder
    scores   f32 [documents]                 of the first of `TEXTS` as the query and the others as documents
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from tests.architectures.export import tokenizer
from tests.architectures.random_weights import random_encoder
from tests.architectures.texts import made_up_texts

TEXTS = tuple(made_up_texts(12))
_CHAT_TOKENS = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
_VOCABULARY = 576
_COMMON = {
    "vocab_size": _VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
}
_QWEN3 = {"num_key_value_heads": 2, "head_dim": 32, "tie_word_embeddings": True}
_TEMPLATE = (
    "{%- set query = (messages | selectattr('role', 'eq', 'query') | first).content -%}"
    "{%- set document = (messages | selectattr('role', 'eq', 'document') | first).content -%}"
    "<|im_start|>system\nFind: {{ query }} .<|im_end|>\n<|im_start|>user\n{{ document }}<|im_end|>\n"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Checkpoint(NamedTuple):
    """A model type, its class and configuration, and how its results are computed. `files` say what it is for."""

    model_type: str
    kind: Any
    config: Mapping[str, Any]
    compute: Callable[[Any, PreTrainedTokenizerFast], dict[str, np.ndarray]]
    files: Mapping[str, Any]
    special: tuple[str, str] = ("", "")
    template: str = ""


def stages(*kinds: str) -> list[dict[str, Any]]:
    """The content of modules.json."""
    return [
        {"idx": number, "path": f"{number}_{kind}" if number else "", "type": f"sentence_transformers.models.{kind}"}
        for number, kind in enumerate(kinds)
    ]


def _embedder(pooling: str) -> dict[str, Any]:
    return {
        "modules.json": stages("Transformer", "Pooling", "Normalize"),
        "1_Pooling/config.json": {"word_embedding_dimension": 128, f"pooling_mode_{pooling}": True},
    }


def _vectors(pooling: str) -> Callable[[Any, PreTrainedTokenizerFast], dict[str, np.ndarray]]:
    def compute(model: Any, text_to_ids: PreTrainedTokenizerFast) -> dict[str, np.ndarray]:
        rows = []
        for text in TEXTS:
            hidden = model(text_to_ids(text, return_tensors="pt")["input_ids"]).last_hidden_state[0]
            pooled = {"mean_tokens": hidden.mean(0), "cls_token": hidden[0], "lasttoken": hidden[-1]}[pooling]
            rows.append((pooled / pooled.norm()).numpy())
        return {"vectors": np.stack(rows)}

    return compute


def _scores_of_pairs(model: Any, text_to_ids: PreTrainedTokenizerFast) -> dict[str, np.ndarray]:
    query, *documents = TEXTS
    encoded = [text_to_ids(query, document, return_tensors="pt") for document in documents]
    kinds = [torch.tensor([_types(one["input_ids"][0].tolist())]) for one in encoded]
    found = [model(one["input_ids"], token_type_ids=kind) for one, kind in zip(encoded, kinds, strict=True)]
    return {"scores": np.array([torch.sigmoid(one.logits[0, 0]).item() for one in found], np.float32)}


def _types(token_ids: list[int]) -> list[int]:
    first = token_ids.index(2) + 1
    return [0] * first + [1] * (len(token_ids) - first)


def _qwen3_reranker(model: Any, text_to_ids: PreTrainedTokenizerFast) -> dict[str, np.ndarray]:
    """As the documents of Qwen3-Reranker compute it: the probability of "yes" beside that of "no"."""
    query, *documents = TEXTS
    instruction = "Given a web search query, retrieve relevant passages that answer the query"
    system = (
        "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
        'Note that the answer can only be "yes" or "no".'
    )
    yes, no = (text_to_ids.convert_tokens_to_ids(word) for word in ("yes", "no"))
    scores = []
    for document in documents:
        asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
        prompt = f"<|im_start|>system\n{system}<|im_end|>\n<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"
        prompt += "<think>\n\n</think>\n\n"
        logits = model(text_to_ids(prompt, return_tensors="pt", add_special_tokens=False)["input_ids"]).logits[0, -1]
        scores.append(torch.softmax(logits[[no, yes]], 0)[1].item())
    return {"scores": np.array(scores, np.float32)}


def _logit_score(model: Any, text_to_ids: PreTrainedTokenizerFast) -> dict[str, np.ndarray]:
    """The logit of the token that 1_LogitScore names."""
    query, *documents = TEXTS
    scores = []
    for document in documents:
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        token_ids = text_to_ids.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
        scores.append(model(token_ids).logits[0, -1, 300].item())
    return {"scores": np.array(scores, np.float32)}


CHECKPOINTS = {
    "bert": Checkpoint("bert", AutoModel, {}, _vectors("cls_token"), _embedder("cls_token"), ("<s>", "</s>")),
    "qwen3-embedding": Checkpoint(
        "qwen3", AutoModelForCausalLM, _QWEN3, _vectors("lasttoken"), _embedder("lasttoken"), ("", "</s>")
    ),
    "bert-reranker": Checkpoint(
        "bert", AutoModelForSequenceClassification, {"num_labels": 1}, _scores_of_pairs, {}, ("<s>", "</s>")
    ),
    "qwen3-reranker": Checkpoint("qwen3", AutoModelForCausalLM, _QWEN3, _qwen3_reranker, {}),
    "logit-score": Checkpoint(
        "qwen3",
        AutoModelForCausalLM,
        {**_QWEN3, "tie_word_embeddings": False},
        _logit_score,
        {
            "modules.json": stages("Transformer", "LogitScore"),
            "1_LogitScore/config.json": {"true_token_id": 300, "false_token_id": None},
            "config_sentence_transformers.json": {"activation_fn": "torch.nn.modules.linear.Identity"},
        },
        template=_TEMPLATE,
    ),
}


def model_of(checkpoint: Checkpoint) -> Any:
    """The model with random weights in float32, which bfloat16 can hold."""
    model = random_encoder(checkpoint.kind, checkpoint.model_type, **{**_COMMON, **checkpoint.config})
    with torch.no_grad():
        for weights in model.parameters():
            weights.copy_(weights.bfloat16())
    return model


def tokenizer_of(checkpoint: Checkpoint) -> PreTrainedTokenizerFast:
    """A tokenizer that puts the checkpoint's special tokens around texts, and between two."""
    made = tokenizer(_CHAT_TOKENS, merges=(("n", "o"), ("y", "e"), ("ye", "s")))
    before, behind = checkpoint.special
    if behind:
        one, two = (f"{before} {middle} {behind}".strip() for middle in ("$A", f"$A {behind} $B"))
        tokens = [(token, made.convert_tokens_to_ids(token)) for token in ("<s>", "</s>")]
        made.backend_tokenizer.post_processor = TemplateProcessing(single=one, pair=two, special_tokens=tokens)
    if checkpoint.template:
        made.chat_template = checkpoint.template
    return made


def write(name: str, directory: Path) -> None:
    """Write one checkpoint and its reference."""
    checkpoint = CHECKPOINTS[name]
    part = directory.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    model, text_to_ids = model_of(checkpoint), tokenizer_of(checkpoint)
    files = part / "checkpoint"
    files.mkdir(parents=True)
    with torch.no_grad():
        computed = model if name != "qwen3-embedding" else model.model
        np.savez(part / "reference.npz", **checkpoint.compute(computed, text_to_ids))
    model.to(torch.bfloat16).save_pretrained(files)
    text_to_ids.save_pretrained(files)
    for path, content in checkpoint.files.items():
        (files / path).parent.mkdir(exist_ok=True)
        (files / path).write_text(json.dumps(content))
    part.rename(directory)


if __name__ == "__main__":
    for encoder in sys.argv[2:]:
        write(encoder, Path(sys.argv[1]) / encoder)
