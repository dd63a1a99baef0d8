"""Finds the task of a checkpoint from the files of its repository: text, vectors or scores. It is found before the
weights are downloaded, with the reason if an encoder cannot be served."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any

from headrace.cli.export.exporter import SCORES, TEXT, VECTORS
from headrace.cli.models.model_cache import ENCODER_FILES
from headrace.common.commands import CommandError
from headrace.common.model_files.task import MODULES

LOGIT_SCORE_FILE = "1_LogitScore/config.json"
CHECKPOINT_ENCODER_FILES = (*ENCODER_FILES, LOGIT_SCORE_FILE, "config_sentence_transformers.json")
"""Files with which checkpoints say how texts become vectors and scores."""
_CLASSIFIER = "ForSequenceClassification"
_GENERATOR = "ForCausalLM"
_STAGES_OF_VECTORS = {"Transformer", "Pooling", "Normalize"}
_STAGES_OF_SCORES = {"Transformer", "LogitScore"}
# Rerankers whose repositories do not say that they are.
_RERANKERS = ("qwen3-reranker",)


def task_of_checkpoint(repository: str, config: Mapping[str, Any], files: Mapping[str, bytes]) -> str:
    """The task of a checkpoint with this config.json and these of `CHECKPOINT_ENCODER_FILES`. Raises CommandError if it
    is an encoder that cannot be served."""
    stages = _stages(repository, files)
    if stages is not None:
        return _task_of_stages(repository, stages)
    classes = [str(name) for name in config.get("architectures") or []]
    if any(name.endswith(_CLASSIFIER) for name in classes):
        labels = config.get("id2label") or {}
        number = len(labels) if isinstance(labels, Mapping) and labels else int(config.get("num_labels") or 2)
        if number != 1:
            raise CommandError(
                f"{repository} sorts texts into {number} classes, and a reranker gives one score; choose a reranker"
            )
        return SCORES
    is_named = any(name in repository.lower() for name in _RERANKERS)
    return SCORES if is_named and any(name.endswith(_GENERATOR) for name in classes) else TEXT


def _stages(repository: str, files: Mapping[str, bytes]) -> list[str] | None:
    """The kinds of stages in modules.json; None without that file."""
    if MODULES not in files:
        return None
    try:
        modules = json.loads(files[MODULES])
        return [str(module["type"]).rpartition(".")[2] for module in modules]
    except (ValueError, TypeError, KeyError):
        raise CommandError(f"{MODULES} of {repository} has no list of stages; choose another model") from None


def _task_of_stages(repository: str, stages: Collection[str]) -> str:
    known = _STAGES_OF_SCORES if "LogitScore" in stages else _STAGES_OF_VECTORS
    if other := [stage for stage in stages if stage not in known]:
        raise CommandError(
            f"{repository} cannot be served: {MODULES} has a stage {other[0]}, and only {', '.join(sorted(known))} are "
            "supported beside each other; choose another model"
        )
    return SCORES if known is _STAGES_OF_SCORES else VECTORS
