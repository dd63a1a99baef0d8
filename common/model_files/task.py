"""What a model is for, from the files of its directory. Imports nothing slow: `headrace serve` uses it."""

from __future__ import annotations

import json
import mmap
import re
from pathlib import Path
from typing import Any

from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK, TASK_UNSPECIFIED, Task

HIDDEN_OUTPUTS = ("last_hidden_state", "token_embeddings")
"""Names that exporters give to the output with a vector for each token."""
SCORES_OUTPUT = "logits"
_NAMES = re.compile(rb'names="([^"]*)"')


def task_of(model_dir: Path) -> Task:
    """What the network in a directory is for, by the names of its tensors and its state. Directories without a network
    count as generating: who loads them says what is missing."""
    path = model_dir / "openvino_model.xml"
    if not path.is_file() or not path.stat().st_size:
        return TASK_UNSPECIFIED
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content.find(b'type="ReadValue"') >= 0:  # a KV cache
            return TASK_UNSPECIFIED
        names = {name.decode() for found in set(_NAMES.findall(content)) for name in found.split(b",")}
    if names & {"beam_idx", "past_key_values.0.key"}:
        return TASK_UNSPECIFIED
    if names.intersection(HIDDEN_OUTPUTS):
        return TASK_EMBED
    classes = _config(model_dir / "config.json").get("architectures")
    is_classifier = isinstance(classes, list) and any("ForSequenceClassification" in str(name) for name in classes)
    return TASK_RANK if SCORES_OUTPUT in names and is_classifier else TASK_UNSPECIFIED


def _config(path: Path) -> dict[str, Any]:
    """The content of a config.json; empty if it is none."""
    try:
        config = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}
