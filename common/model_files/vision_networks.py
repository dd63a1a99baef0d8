"""The networks in a model directory that images need, by the model's type, as optimum-intel names them.

openvino_vision_embeddings_model.xml           pixels or patches -> states of patches, or of tokens
openvino_vision_embeddings_merger_model.xml    states of patches -> states of tokens
openvino_vision_embeddings_pos_model.xml       places in a table -> embeddings of places
openvino_multi_modal_projector_model.xml       states of patches -> states of tokens

Imports nothing slow: `headrace pull` uses it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from headrace.common.model_files.config import config_in
from headrace.common.model_files.networks import LANGUAGE_NETWORK, names_in, weight_names

VISION_NETWORK = "openvino_vision_embeddings_model.xml"
MERGER_NETWORK = "openvino_vision_embeddings_merger_model.xml"
PLACES_NETWORK = "openvino_vision_embeddings_pos_model.xml"
PROJECTOR_NETWORK = "openvino_multi_modal_projector_model.xml"
_OF_TYPE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("llava", "llava_next", "gemma3", "gemma4", "idefics3", "smolvlm"), (VISION_NETWORK,)),
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl"), (VISION_NETWORK, MERGER_NETWORK)),
    **dict.fromkeys(("qwen3_vl", "qwen3_5", "qwen3_5_moe"), (VISION_NETWORK, MERGER_NETWORK, PLACES_NETWORK)),
    "mistral3": (VISION_NETWORK, PROJECTOR_NETWORK),
}


def vision_networks_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The networks that images need of a model with this config.json; none if its images are not served."""
    kind = config.get("model_type")
    return _OF_TYPE.get(kind, ()) if isinstance(kind, str) else ()


def missing_vision_networks(config: Mapping[str, Any], names: Collection[str]) -> list[str]:
    """The files that images need and a model with these files lacks."""
    return [name for name in files_of_networks(vision_networks_of(config)) if name not in names]


def files_of_networks(networks: Collection[str]) -> list[str]:
    """The names of the files of networks: each, and its weights."""
    return [name for pair in zip(networks, weight_names(networks), strict=True) for name in pair]


def vision_weights_in(directory: Path) -> list[Path]:
    """The files with the weights of a directory's networks for images."""
    return [network.with_suffix(".bin") for network in vision_networks_in(directory)]


def vision_networks_in(directory: Path) -> tuple[Path, ...]:
    """The networks of a directory for images; none if one of their files is missing, or if its images are not
    served."""
    config, names = config_in(directory / "config.json"), names_in(directory)
    if LANGUAGE_NETWORK not in names or missing_vision_networks(config, names):
        return ()
    return tuple(directory / name for name in vision_networks_of(config))
