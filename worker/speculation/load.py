"""Loads the smaller model of --draft-model."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.worker.config import ConfigurationError
from headrace.worker.model.directory import read_model_dir

if TYPE_CHECKING:
    from headrace.worker.model.runner import OpenVINOModelRunner

log = logging.getLogger(__name__)

# The parts of tokenizer and detokenizer that say which token has which text. The .xml files also name tools' versions.
_VOCABULARY = ("openvino_tokenizer.bin", "openvino_detokenizer.bin")
_FLAG = "--draft-model"


def load_draft(draft_dir: Path, target: OpenVINOModelRunner, target_dir: Path, *, threads: int) -> OpenVINOModelRunner:
    """Compile the smaller model for drafts of the model in `target_dir`. ConfigurationError if it cannot be loaded, or
    if its tokens are not the target's."""
    try:
        read_model_dir(draft_dir)
        _check_tokenizers(draft_dir, target_dir)
        runner = _compile(draft_dir, threads)
    except ConfigurationError as error:
        raise ConfigurationError(f"{_FLAG}: {error}") from error
    if runner.block_size != target.block_size:
        raise ConfigurationError(
            f"{_FLAG}: KV blocks of the model in {draft_dir} have {runner.block_size} tokens, and the target's have "
            f"{target.block_size}; choose another draft model"
        )
    log.info("drafts come from %s, which takes %.1f KiB of each KV block", draft_dir, runner.block_bytes / 1024)
    return runner


def _compile(draft_dir: Path, threads: int) -> OpenVINOModelRunner:
    """The fastest form of the model: its bits decide nothing but how often a draft is right."""
    from headrace.worker.model.runner import OpenVINOModelRunner

    return OpenVINOModelRunner(draft_dir, threads=threads, kv_precision="u8", execution_mode="performance")


def _check_tokenizers(draft_dir: Path, target_dir: Path) -> None:
    if _vocabulary_hash(draft_dir) != _vocabulary_hash(target_dir):
        raise ConfigurationError(
            f"the tokenizer of the model in {draft_dir} is not that of the model in {target_dir}, so its tokens would "
            "mean other text; choose a smaller model of the same family"
        )


def _vocabulary_hash(model_dir: Path) -> str:
    digest = hashlib.sha256()
    for name in _VOCABULARY:
        digest.update(hashlib.sha256((model_dir / name).read_bytes()).digest())
    return digest.hexdigest()
