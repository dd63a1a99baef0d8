"""LLaVA 1.5: every image has the same number of image tokens, one for each patch of a CLIP or SigLIP tower."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from PIL import Image

from headrace.common.vision.families.one_size import OneSize
from headrace.common.vision.family import Detail, FamilyError, ImageLayout, UsualFamily, canonical
from headrace.common.vision.files import Fields, ModelFiles


@dataclass(frozen=True)
class Llava(UsualFamily):
    """The images of one LLaVA model."""

    image_token_id: int
    num_image_tokens: int
    """Of each image."""
    size: OneSize

    placeholder = "<image>"

    @classmethod
    def read(cls, files: ModelFiles) -> Llava:
        """The family of a model with these files. Raises `FamilyError` if they say what is not supported."""
        size = OneSize.read(files.preprocessor, "CLIPImageProcessor")
        return cls(
            image_token_id=files.image_token_id(32000),
            num_image_tokens=tower_tokens(files.config, size.height, size.width),
            size=size,
        )

    @property
    def reserved_token_ids(self) -> frozenset[int]:
        """The image token."""
        return frozenset({self.image_token_id})

    def settings(self, detail: Detail) -> bytes:
        """The settings: all fields. Images are read in one way only."""
        return canonical(self)

    def layout(self, width: int, height: int, detail: Detail) -> ImageLayout:
        """See `ImageFamily`. Images of all sizes have the same number of tokens."""
        return ImageLayout(
            width=width,
            height=height,
            low=False,
            pieces=(self.num_image_tokens,),
            num_pixels=self.size.width * self.size.height,
            scale=self.size.scale(width, height),
        )

    def pixels(self, image: Image.Image, layout: ImageLayout) -> Mapping[str, npt.NDArray[Any]]:
        """pixel_values: [1, 3, height, width]."""
        return {"pixel_values": self.size.of(image)[None]}


def tower_tokens(config: Fields, height: int, width: int) -> int:
    """Number of vectors that a CLIP or SigLIP tower gives for an image of this size, as the projector takes them."""
    tower = config.part("vision_config")
    patch = tower.whole("patch_size", 14)
    strategy = config.text("vision_feature_select_strategy", "default")
    if strategy not in ("default", "full"):
        raise config.error("vision_feature_select_strategy", f"is {strategy}, which is not supported")
    # CLIP has a vector of the class in front of the patches'; "default" drops the first vector of either.
    num_class = int(tower.text("model_type", "clip_vision_model") == "clip_vision_model")
    found = (height // patch) * (width // patch) + num_class - (strategy == "default")
    if found < 1:
        raise FamilyError("an image of the model has no image token")
    return found
