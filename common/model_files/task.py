"""Finds the task of a model from the files of its directory. Imports nothing slow: `headrace serve` uses it."""

from __future__ import annotations

import mmap
import re
from pathlib import Path
from typing import NamedTuple

from headrace.common.model_files.config import config_in
from headrace.common.model_files.networks import DETOKENIZER_FILES, missing_files, networks_in
from headrace.protos.inference_pb2 import TASK_EMBED, TASK_RANK, TASK_UNSPECIFIED, Task

HIDDEN_OUTPUTS = ("last_hidden_state", "token_embeddings")
"""Names that exporters give to the output with a vector for each token."""
SCORES_OUTPUT = "logits"
MODULES = "modules.json"
"""The stages of an embedder, in a file of sentence-transformers."""
_NAMES = re.compile(rb'names="([^"]*)"')


def task_of(model_dir: Path) -> Task:
    """The task of the network in a directory, by the names of its tensors and its state. If the network cannot be read,
    the task is generation, because loading the model then reports the problem."""
    network = _network(model_dir)
    if network is None or network.has_kv_cache:
        return TASK_UNSPECIFIED
    names = network.names
    if names.intersection(HIDDEN_OUTPUTS):
        return TASK_EMBED
    classes = config_in(model_dir / "config.json").get("architectures")
    is_classifier = isinstance(classes, list) and any("ForSequenceClassification" in str(name) for name in classes)
    return TASK_RANK if SCORES_OUTPUT in names and is_classifier else TASK_UNSPECIFIED


def missing_of_model(model_dir: Path) -> list[str]:
    """The files that a directory lacks for the task of its model. Texts come only from models that generate them, so
    others need no detokenizer."""
    missing = missing_files(model_dir)
    return [name for name in missing if name not in DETOKENIZER_FILES] if missing and task_of(model_dir) else missing


def is_embedder_with_cache(model_dir: Path) -> bool:
    """Whether a directory has an embedder that was exported with a KV cache: its network has a KV cache and gives no
    logits, or the directory has the files of sentence-transformers."""
    network = _network(model_dir)
    if network is None or not network.has_kv_cache:
        return False
    gives_hidden = bool(network.names.intersection(HIDDEN_OUTPUTS)) and SCORES_OUTPUT not in network.names
    return gives_hidden or (model_dir / MODULES).is_file()


class _Network(NamedTuple):
    """Names of a network's tensors, and whether it keeps keys and values."""

    names: set[str]
    has_kv_cache: bool


def _network(model_dir: Path) -> _Network | None:
    path = networks_in(model_dir)[0]
    try:
        if not path.is_file() or not path.stat().st_size:
            return None
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            has_state = content.find(b'type="ReadValue"') >= 0
            found = {name for names in set(_NAMES.findall(content)) for name in names.split(b",")}
    except OSError:
        return None
    names = {name.decode(errors="replace") for name in found}
    return _Network(names, has_state or bool(names & {"beam_idx", "past_key_values.0.key"}))
