"""The networks in a model directory that text needs: one, or several of a multimodal model.

openvino_model.xml                              tokens -> logits
openvino_language_model.xml                     embeddings -> logits, of a multimodal model
openvino_text_embeddings_model.xml              tokens -> embeddings, beside it
openvino_text_embeddings_per_layer_model.xml    tokens -> embeddings of each layer, beside it in some models

Weights are in a .bin beside each. Multimodal models have more networks, for images and audio, which are not read.
Imports nothing slow: `headrace serve` uses it.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

TEXT_NETWORK = "openvino_model.xml"
LANGUAGE_NETWORK = "openvino_language_model.xml"
EMBEDDINGS_NETWORK = "openvino_text_embeddings_model.xml"
_LAYER_EMBEDDINGS_NETWORK = "openvino_text_embeddings_per_layer_model.xml"
DETOKENIZER_FILES = ("openvino_detokenizer.xml", "openvino_detokenizer.bin")
_TOKENIZER_FILES = ("openvino_tokenizer.xml", "openvino_tokenizer.bin", *DETOKENIZER_FILES)


def networks_among(names: Collection[str]) -> tuple[str, ...]:
    """The networks that a model with these files has, or should have, for text. The first one gives logits."""
    if TEXT_NETWORK in names or LANGUAGE_NETWORK not in names:
        return (TEXT_NETWORK,)
    more = (_LAYER_EMBEDDINGS_NETWORK,) if _LAYER_EMBEDDINGS_NETWORK in names else ()
    return (LANGUAGE_NETWORK, EMBEDDINGS_NETWORK, *more)


def networks_in(directory: Path) -> tuple[Path, ...]:
    """The files of the networks in a directory."""
    return tuple(directory / name for name in networks_among(names_in(directory)))


def weights_in(directory: Path) -> list[Path]:
    """The paths of the files with the weights of the networks in a directory."""
    return [path.with_suffix(".bin") for path in networks_in(directory)]


def weight_names(networks: Collection[str]) -> tuple[str, ...]:
    """The names of the files with the weights of networks."""
    return tuple(name.replace(".xml", ".bin") for name in networks)


def required_files(names: Collection[str]) -> tuple[str, ...]:
    """The files that a model with these files must have."""
    networks = networks_among(names)
    return (*(name for pair in zip(networks, weight_names(networks), strict=True) for name in pair), *_TOKENIZER_FILES)


def missing_files(directory: Path) -> list[str]:
    """The required files that a directory lacks."""
    return [name for name in required_files(names_in(directory)) if not (directory / name).is_file()]


def empty_files(directory: Path) -> list[str]:
    """The required files of a directory that are empty."""
    present = [name for name in required_files(names_in(directory)) if (directory / name).is_file()]
    return [name for name in present if not (directory / name).stat().st_size]


def has_network(directory: Path) -> bool:
    """Whether a directory has a model that generates text, or an encoder."""
    return networks_in(directory)[0].is_file()


def names_in(directory: Path) -> set[str]:
    """The names of the files in a directory; none if there is no such directory."""
    return {path.name for path in directory.iterdir()} if directory.is_dir() else set()
