"""Finds the family that a model's images belong to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from headrace.common.vision.bounds import DEFAULT_MAX_IMAGE_PIXELS
from headrace.common.vision.families.gemma3 import Gemma3
from headrace.common.vision.families.gemma4 import Gemma4
from headrace.common.vision.families.idefics3 import Idefics3
from headrace.common.vision.families.llava import Llava
from headrace.common.vision.families.llava_next import LlavaNext
from headrace.common.vision.families.pixtral import Pixtral
from headrace.common.vision.families.qwen import Qwen
from headrace.common.vision.family import FamilyError, ImageFamily
from headrace.common.vision.files import FILES, ModelFiles

_Read = Callable[[ModelFiles, int], ImageFamily]


def _llava(files: ModelFiles, max_image_pixels: int) -> ImageFamily:
    """The family of a model of type LLaVA. Pixtral's first release is a LLaVA with another tower."""
    if files.config.part("vision_config").text("model_type", "clip_vision_model") == "pixtral":
        return Pixtral.read(files, max_image_pixels)
    return Llava.read(files)


# By model_type. They read the files of a model, with the greatest number of pixels that its tower may read.
_FAMILIES: Mapping[str, _Read] = {
    "gemma3": lambda files, _: Gemma3.read(files),
    "gemma4": lambda files, _: Gemma4.read(files),
    "idefics3": lambda files, _: Idefics3.read(files),
    "llava": _llava,
    "llava_next": lambda files, _: LlavaNext.read(files),
    "mistral3": Pixtral.read,
    "qwen2_5_vl": Qwen.read,
    "qwen2_vl": Qwen.read,
    "qwen3_5": Qwen.read,
    "qwen3_5_moe": Qwen.read,
    "qwen3_vl": Qwen.read,
    "smolvlm": lambda files, _: Idefics3.read(files),
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


def family_in(model_dir: Path, max_image_pixels: int) -> ImageFamily | None:
    """The family of the model in a directory; see `family_of`."""
    files = {name: (model_dir / name).read_bytes() for name in FILES if (model_dir / name).is_file()}
    return family_of(files, max_image_pixels)
