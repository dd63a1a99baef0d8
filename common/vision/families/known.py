"""Which family a model's images belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from headrace.common.vision.bounds import DEFAULT_MAX_IMAGE_PIXELS
from headrace.common.vision.families.llava import Llava
from headrace.common.vision.family import FamilyError, ImageFamily
from headrace.common.vision.files import ModelFiles

# Reads the files of a model, with the greatest number of pixels that its tower may read of an image.
_FAMILIES: Mapping[str, Callable[[ModelFiles, int], ImageFamily]] = {
    "llava": lambda files, bound: Llava.read(files),
}
FAMILIES = frozenset(_FAMILIES)
"""`model_type` of the models whose images are supported."""


def family_of(files: Mapping[str, bytes], max_image_pixels: int = DEFAULT_MAX_IMAGE_PIXELS) -> ImageFamily | None:
    """The images of a model, from those of its files that `files.FILES` names; None if it is a text model.

    Raises `FamilyError`, whose text says why, if the model takes images in a way that is not supported.
    """
    parsed = ModelFiles(files)
    if "vision_config" not in parsed.config:
        return None
    kind = parsed.config.text("model_type", "")
    if kind not in _FAMILIES:
        raise FamilyError(
            f"images of models of the type {kind!r} are not supported; those of {', '.join(sorted(FAMILIES))} are"
        )
    return _FAMILIES[kind](parsed, max_image_pixels)
