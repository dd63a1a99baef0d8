"""Mistral 3 and Pixtral: images keep their ratio; their tokens are in rows, with a mark after each row."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from PIL import Image

from headrace.common.vision.family import Detail, ImageLayout, UsualFamily
from headrace.common.vision.files import ModelFiles
from headrace.common.vision.normalising import CLIP_MEAN, CLIP_STD, Normalising

_LOW_TOKENS = 256


@dataclass(frozen=True)
class Pixtral(UsualFamily):
    """The images of one model with a Pixtral tower."""

    image_token_id: int
    placeholder: str
    break_mark: str
    end_mark: str
    patch: int
    """Pixels of a side of what becomes one token."""
    max_width: int
    max_height: int
    max_pixels: int
    resample: Image.Resampling
    normalising: Normalising

    white_under_alpha = True

    @classmethod
    def read(cls, files: ModelFiles, max_image_pixels: int) -> Pixtral:
        """The images of a model, from its files."""
        config, settings, processor = files.config, files.preprocessor, files.processor
        settings.demand("do_resize", True, True)
        is_mistral3 = config.text("model_type", "") == "mistral3"
        patch = config.part("vision_config").whole("patch_size", 14 if is_mistral3 else 16)
        patch *= config.whole("spatial_merge_size", 2) if is_mistral3 else 1
        size = settings.size("size", {"longest_edge": 1024}, of_whole=("longest_edge",))
        if "longest_edge" in size:
            width = height = size.side("longest_edge")
        else:
            width, height = size.side("width"), size.side("height")
        return cls(
            image_token_id=files.image_token_id(10),
            placeholder=processor.text("image_token", "[IMG]"),
            break_mark=processor.text("image_break_token", "[IMG_BREAK]"),
            end_mark=processor.text("image_end_token", "[IMG_END]"),
            patch=patch,
            max_width=width,
            max_height=height,
            max_pixels=max_image_pixels,
            resample=settings.resample(Image.Resampling.BICUBIC),
            normalising=Normalising.read(settings, CLIP_MEAN, CLIP_STD),
        )

    @property
    def reserved_token_ids(self) -> frozenset[int]:
        """The image token; config.json does not name the marks."""
        return frozenset({self.image_token_id})

    def layout(self, width: int, height: int, detail: Detail) -> ImageLayout:
        """The layout of an image. At low detail, it has about 256 tokens at most."""
        low = detail is Detail.LOW
        rows, columns = self._grid(width, height, low=low)
        pieces = [piece for _ in range(rows) for piece in (columns, self.break_mark)]
        return ImageLayout(
            width=width,
            height=height,
            low=low,
            pieces=(*pieces[:-1], self.end_mark),
            num_pixels=rows * columns * self.patch**2,
            scale=min(1.0, 1 / self._shrink(width, height, low=low)),
        )

    def pixels(self, image: Image.Image, layout: ImageLayout) -> Mapping[str, npt.NDArray[Any]]:
        """pixel_values: [1, 3, height, width]."""
        rows, columns = self._grid(layout.width, layout.height, low=layout.low)
        size = (columns * self.patch, rows * self.patch)
        return {"pixel_values": self.normalising.of(image.resize(size, self.resample))[None]}

    def _shrink(self, width: int, height: int, *, low: bool) -> float:
        """The factor by which an image has to be reduced so that both sides are within their bounds. At most 1 if it
        fits."""
        # The reference has no bound on pixels: ours shortens the longest edges that the image may have.
        pixels = min(self.max_pixels, _LOW_TOKENS * self.patch**2) if low else self.max_pixels
        longest = max(1, math.isqrt(pixels * max(width, height) // min(width, height)))
        return max(height / min(self.max_height, longest), width / min(self.max_width, longest))

    def _grid(self, width: int, height: int, *, low: bool) -> tuple[int, int]:
        """The rows and columns of tokens."""
        shrink = self._shrink(width, height, low=low)
        if shrink > 1:
            width, height = max(1, math.floor(width / shrink)), max(1, math.floor(height / shrink))
        return (height - 1) // self.patch + 1, (width - 1) // self.patch + 1
