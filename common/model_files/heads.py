"""Directories with heads: additions to a model that propose tokens."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from pathlib import Path

from headrace.common.model_files.config import config_in

HEADS_CONFIG = "config.json"
MTP_TENSORS = ("model.mtp_layers.0.", "lm_head.", "model.embed_tokens.")
"""What the names of tensors of a checkpoint begin with that a layer that predicts more tokens may read."""


class HeadsKind(enum.Enum):
    """The published formats of heads. A checkpoint of MiMo is one, because its model cannot be exported."""

    EAGLE3 = "eagle3"
    MEDUSA = "medusa"
    MTP = "mtp"
    """A layer of a checkpoint that predicts more tokens than the next."""


_DFLASH = (
    "a DFlash drafter, whose tokens see one another in both directions, which the attention of workers does not "
    "compute; use EAGLE-3 heads or a smaller model"
)


def unusable_heads(config: Mapping[str, object]) -> str | None:
    """For heads in a known format that cannot be used: what the config.json describes, and what to use instead. None
    for anything else."""
    names = config.get("architectures")
    is_dflash = any("dflash" in str(name).lower() for name in (names if isinstance(names, list) else ()))
    return _DFLASH if is_dflash or "dflash_config" in config else None


def heads_kind(directory: Path) -> HeadsKind | None:
    """The format of the heads in a directory, by its config.json; None if it has none."""
    return heads_kind_of(config_in(directory / HEADS_CONFIG))


def heads_kind_of(config: Mapping[str, object]) -> HeadsKind | None:
    """The format of the heads that a config.json describes; None if it describes none."""
    names = config.get("architectures")
    texts = [str(name).lower() for name in (*(names if isinstance(names, list) else ()), config.get("model_type"))]
    if "medusa_num_heads" in config:
        return HeadsKind.MEDUSA
    if config.get("model_type") == "mimo" and config.get("num_nextn_predict_layers"):
        return HeadsKind.MTP
    return next((kind for kind in HeadsKind if any(kind.value in text for text in texts)), None)


def heads_weights(directory: Path) -> list[Path]:
    """The files in a directory with the weights of heads; empty if it has none."""
    return sorted(directory.glob("*.safetensors"))
