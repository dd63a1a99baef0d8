"""Loads the smaller model, or the heads, of --draft-model."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.common.model_files.config import config_in
from headrace.common.model_files.heads import HEADS_CONFIG, HeadsKind, heads_kind, heads_weights, unusable_heads
from headrace.common.model_files.networks import weights_in
from headrace.worker.config import ConfigurationError, WorkerConfig
from headrace.worker.kv.exclusions import DRAFT_MODEL, RECURRENT_DRAFTS, impossible
from headrace.worker.model.directory import read_model_dir
from headrace.worker.speculation.draft_model import DraftModel
from headrace.worker.speculation.eagle import EagleModel, MtpModel
from headrace.worker.speculation.eagle_trees import EagleTrees, MtpTrees, num_spare_blocks
from headrace.worker.speculation.medusa import MedusaModel
from headrace.worker.speculation.tree import TreeShape

if TYPE_CHECKING:
    from headrace.worker.draft_heads.eagle_runner import EagleHeads, EagleRunner
    from headrace.worker.draft_heads.medusa_runner import MedusaHeads, MedusaRunner
    from headrace.worker.model.runner import OpenVINOModelRunner

    Heads = EagleHeads | MedusaHeads

log = logging.getLogger(__name__)

# The parts of tokenizer and detokenizer that map tokens to texts. The .xml files also contain versions of tools.
_VOCABULARY = ("openvino_tokenizer.bin", "openvino_detokenizer.bin")
_FLAG = "--draft-model"
# Of trees, unless the flags say otherwise.
DEFAULT_DEPTH, DEFAULT_TOP_K = 5, 4


def speculation_for(config: WorkerConfig, *, with_amx: bool) -> str:
    """How much to speculate: as the flags say, else by the kind of --draft-model, else "auto". The default is "off" in
    two cases. On CPUs with AMX in performance mode, the bits of a decode step depend on its size, and the size depends
    on when drafts are worth verifying. A pipeline computes several steps at a time."""
    if config.speculation is not None:
        return config.speculation
    if config.draft_model is not None:
        kind = heads_kind(config.draft_model)
        return "draft" if kind is None else kind.value
    if config.pipeline > 1:
        return "off"
    return "off" if config.execution_mode == "performance" and with_amx else "auto"


def tree_for(config: WorkerConfig, speculation: str) -> TreeShape | None:
    """The shape of trees of proposals, as in the flags; None for drafts without branches. ConfigurationError if the
    kind of speculation has no such trees."""
    if config.draft_tree_tokens is None:
        if config.draft_tree_depth is not None or config.draft_tree_top_k is not None:
            raise ConfigurationError("--draft-tree-depth and --draft-tree-top-k need --draft-tree-tokens")
        return None
    if speculation not in (HeadsKind.EAGLE3.value, HeadsKind.MTP.value):
        raise ConfigurationError(
            "--draft-tree-tokens is for heads in the format of EAGLE-3 and for layers that predict more tokens; name "
            "them with --draft-model, or leave it out"
        )
    return TreeShape(
        config.draft_tree_tokens, config.draft_tree_depth or DEFAULT_DEPTH, config.draft_tree_top_k or DEFAULT_TOP_K
    )


def read_heads(draft_dir: Path | None, speculation: str, tree: TreeShape | None = None) -> Heads | None:
    """The heads in a directory, for this kind of speculation; None if it needs none. They are read before the target is
    compiled, because its graph computes their inputs. `tree` is the shape of trees that they propose.
    ConfigurationError."""
    if draft_dir is None or speculation not in {kind.value for kind in HeadsKind}:
        return None
    from headrace.worker.draft_heads.eagle_runner import EagleHeads
    from headrace.worker.draft_heads.medusa_runner import MedusaHeads

    try:
        if speculation == HeadsKind.MEDUSA.value:
            return MedusaHeads.read(draft_dir)
        read = EagleHeads.read_mtp if speculation == HeadsKind.MTP.value else EagleHeads.read
        return read(draft_dir, None if tree is None else partial(num_spare_blocks, tree))
    except ConfigurationError as error:
        raise ConfigurationError(f"{_FLAG}: {error}") from error


def kind_of_drafts(heads: Heads | None, tree: TreeShape | None = None) -> Callable[..., DraftModel]:
    """The function that makes the drafting object for the loaded runner, with trees of a shape or without branches."""
    if heads is None:
        return DraftModel
    from headrace.worker.draft_heads.eagle_runner import EagleHeads

    if not isinstance(heads, EagleHeads):
        return MedusaModel
    if heads.kind is HeadsKind.MTP:
        return MtpModel if tree is None else partial(MtpTrees, shape=tree)
    return EagleModel if tree is None else partial(EagleTrees, shape=tree)


def weights_of_draft(draft_dir: Path) -> list[Path]:
    """The files with the weights of a smaller model or of heads."""
    return heads_weights(draft_dir) or weights_in(draft_dir)


def load_draft(
    draft_dir: Path | None,
    target: OpenVINOModelRunner,
    target_dir: Path,
    heads: Heads | None = None,
    *,
    threads: int,
) -> OpenVINOModelRunner | EagleRunner | MedusaRunner | None:
    """Compile the smaller model, or the heads, for drafts of the model in `target_dir`; None without a
    directory. ConfigurationError if it cannot be loaded, or if its tokens differ."""
    if draft_dir is None:
        return None
    try:
        runner: OpenVINOModelRunner | EagleRunner | MedusaRunner
        runner = _load(draft_dir, target_dir, threads) if heads is None else heads.compile(target_dir, threads, target)
    except ConfigurationError as error:
        raise ConfigurationError(f"{_FLAG}: {error}") from error
    if runner.block_size != target.block_size:
        raise ConfigurationError(
            f"{_FLAG}: KV blocks of the model in {draft_dir} have {runner.block_size} tokens, and the target's have "
            f"{target.block_size}; choose another draft model"
        )
    log.info("drafts come from %s, which takes %.1f KiB of each KV block", draft_dir, runner.block_bytes / 1024)
    return runner


def _load(draft_dir: Path, target_dir: Path, threads: int) -> OpenVINOModelRunner:
    kind = heads_kind(draft_dir)
    if kind is not None:
        raise ConfigurationError(f"{draft_dir} has heads, not a model; say --speculation {kind.value}")
    if (found := unusable_heads(config_in(draft_dir / HEADS_CONFIG))) is not None:
        raise ConfigurationError(f"{draft_dir} has {found}")
    read_model_dir(draft_dir)
    _check_tokenizers(draft_dir, target_dir)
    return _compile(draft_dir, threads)


def _compile(draft_dir: Path, threads: int) -> OpenVINOModelRunner:
    """Compile the fastest form of the model: its bits affect only how often a draft is right."""
    from headrace.worker.model.runner import OpenVINOModelRunner

    runner = OpenVINOModelRunner(draft_dir, threads=threads, kv_precision="u8", execution_mode="performance")
    if runner.state_tables is not None:
        raise impossible(DRAFT_MODEL, RECURRENT_DRAFTS)
    return runner


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
