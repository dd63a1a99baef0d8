"""Gemma 3: every image is scaled to one size, whatever its ratio, and has 256 tokens, which see each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from PIL import Image

from headrace.common.vision.families.one_size import OneSize
from headrace.common.vision.family import Detail, ImageLayout, canonical
from headrace.common.vision.files import ModelFiles
from headrace.common.vision.normalising import HALF, Normalising


@dataclass(frozen=True)
class Gemma3:
    """The images of one Gemma 3 model."""

    image_token_id: int
    placeholder_token_id: int
    end_token_id: int
    num_image_tokens: int
    """Of each image."""
    size: OneSize

    placeholder = "<start_of_image>"
    text_around = "\n\n"
    keeps_images_whole = True
    white_under_alpha = False

    @classmethod
    def read(cls, files: ModelFiles) -> Gemma3:
        """The images of a model, from its files. Crops of long images are refused: they lengthen the text itself, and
        are off by default."""
        config, settings = files.config, files.preprocessor
        settings.demand("do_resize", True, True)
        settings.demand("do_pan_and_scan", False, False)
        size = settings.size("size", {"height": 224, "width": 224}, of_whole=("height", "width"))
        return cls(
            image_token_id=files.image_token_id(262144),
            placeholder_token_id=config.whole("boi_token_index", 255999, least=0),
            end_token_id=config.whole("eoi_token_index", 256000, least=0),
            num_image_tokens=config.whole("mm_tokens_per_image", 256),
            size=OneSize(
                height=size.side("height"),
                width=size.side("width"),
                shortest_edge=None,
                resample=settings.resample(Image.Resampling.BILINEAR),
                normalising=Normalising.read(settings, HALF, HALF),
            ),
        )

    @property
    def reserved_token_ids(self) -> frozenset[int]:
        """The image token, and the tokens that begin and end an image."""
        return frozenset({self.image_token_id, self.placeholder_token_id, self.end_token_id})

    def settings(self, detail: Detail) -> bytes:
        """The settings: all fields."""
        return canonical(self)

    def layout(self, width: int, height: int, detail: Detail) -> ImageLayout:
        """The layout, which is the same for all images."""
        return ImageLayout(
            width=width,
            height=height,
            low=False,
            pieces=(self.placeholder, self.num_image_tokens, "<end_of_image>"),
            num_pixels=self.size.width * self.size.height,
            scale=self.size.scale(width, height),
        )

    def pixels(self, image: Image.Image, layout: ImageLayout) -> Mapping[str, npt.NDArray[Any]]:
        """pixel_values: [1, 3, height, width]."""
        return {"pixel_values": self.size.of(image)[None]}
