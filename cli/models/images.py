"""Decides whether a model's images can be served before its weights are downloaded, from its configuration and from the
files that its repository lists."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.common.model_files.vision_networks import missing_vision_networks, vision_networks_of


@dataclass(frozen=True, slots=True)
class ImageParts:
    """The networks that images need; none of a text model. `problem` says, as the end of a sentence, why the images of
    a model that takes some cannot be served."""

    networks: tuple[str, ...] = ()
    problem: str = ""


def image_parts(files: Mapping[str, bytes], names: Collection[str], *, exports: bool) -> ImageParts:
    """The parts for images of a repository with these names. `files` has the content of those in
    `headrace.common.vision.files.FILES`, as far as they exist. An export makes the networks, which must be there
    otherwise."""
    from headrace.common.vision.families.known import family_of
    from headrace.common.vision.family import FamilyError

    config = _config_in(files)
    if "vision_config" not in config:
        return ImageParts()
    networks = vision_networks_of(config)
    if not networks:
        return ImageParts(problem=f"those of its architecture ({config.get('model_type')}) are not supported")
    if not exports and (missing := missing_vision_networks(config, names)):
        return ImageParts(problem=f"it lacks {', '.join(missing)}")
    try:
        family_of(files)
    except FamilyError as error:
        return ImageParts(problem=str(error))
    return ImageParts(networks)


def _config_in(files: Mapping[str, bytes]) -> dict[str, Any]:
    try:
        config = json.loads(files.get("config.json", b"{}"))
    except (ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
