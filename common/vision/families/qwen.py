"""Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images keep their ratio, and larger images have more tokens.

The image is scaled so that both sides are multiples of a merged patch (28 or 32 pixels) and its pixels are within
bounds. One image token stands for each merged patch; their positions have rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.common.vision.bounds import check_ratio
from headrace.common.vision.family import Detail, ImageLayout, UsualFamily
from headrace.common.vision.files import ModelFiles
from headrace.common.vision.normalising import CLIP_MEAN, CLIP_STD, Normalising

_LOW_TOKENS = 256
# Token ids that stand in the class of a config.json: image, video, start and end of either.
_IDS = {"qwen3_5": (248056, 248057, 248053, 248054), "qwen3_5_moe": (248056, 248057, 248053, 248054)}
_OLDER_IDS = (151655, 151656, 151652, 151653)
_PATCHES = {"qwen2_vl": 14, "qwen2_5_vl": 14}


@dataclass(frozen=True)
class Qwen(UsualFamily):
    """The images of one Qwen model."""

    image_token_id: int
    reserved_token_ids: frozenset[int]
    patch: int
    """Pixels of a side of a patch."""
    merge: int
    """Patches of a side of a merged patch, which is one token."""
    frames: int
    """A patch has this many frames; an image is repeated."""
    min_pixels: int
    max_pixels: int
    resample: Image.Resampling
    normalising: Normalising

    placeholder = "<|image_pad|>"

    @classmethod
    def read(cls, files: ModelFiles, max_image_pixels: int) -> Qwen:
        """The images of a model, from its files. A smaller bound on pixels replaces the model's own."""
        config, settings = files.config, files.preprocessor
        kind = config.text("model_type", "")
        tower = config.part("vision_config")
        settings.demand("do_resize", True, True)
        patch = tower.whole("patch_size", _PATCHES.get(kind, 16))
        merge = tower.whole("spatial_merge_size", 2)
        frames = tower.whole("temporal_patch_size", 2)
        for name, of_model in (("patch_size", patch), ("merge_size", merge), ("temporal_patch_size", frames)):
            if settings.whole(name, of_model) != of_model:
                raise settings.error(name, f"is not {of_model}, as in the model's vision_config")
        size = settings.size("size", {}, of_whole=())
        least = settings.whole("min_pixels", size.whole("shortest_edge", 56 * 56))
        most = settings.whole("max_pixels", size.whole("longest_edge", 28 * 28 * 1280))
        most = max((patch * merge) ** 2, min(most, max_image_pixels))
        names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
        ids = [
            config.whole(name, default, least=0)
            for name, default in zip(names, _IDS.get(kind, _OLDER_IDS), strict=True)
        ]
        return cls(
            image_token_id=ids[0],
            reserved_token_ids=frozenset(ids),
            patch=patch,
            merge=merge,
            frames=frames,
            min_pixels=min(least, most),
            max_pixels=most,
            resample=settings.resample(Image.Resampling.BICUBIC),
            normalising=Normalising.read(settings, CLIP_MEAN, CLIP_STD),
        )

    def layout(self, width: int, height: int, detail: Detail) -> ImageLayout:
        """The layout of an image. At low detail, it has at most 256 tokens."""
        check_ratio(width, height)
        low = detail is Detail.LOW
        columns, rows = self._size(width, height, low=low)
        side = self.patch * self.merge
        return ImageLayout(
            width=width,
            height=height,
            low=low,
            pieces=(rows * columns,),
            grid=(rows, columns),
            num_pixels=rows * columns * side * side,
            scale=min(1.0, math.sqrt(self._most(low=low) / (width * height))),
        )

    def pixels(self, image: Image.Image, layout: ImageLayout) -> Mapping[str, npt.NDArray[Any]]:
        """pixel_values: [patches, 3 * frames * patch * patch], the patches of one token after each other.
        image_grid_thw: [1, 3], the number of patches in time, of rows and of columns."""
        assert layout.grid is not None
        rows, columns = layout.grid
        merge, patch = self.merge, self.patch
        size = (columns * merge * patch, rows * merge * patch)
        pixels = self.normalising.of(image.resize(size, self.resample))
        patches = pixels.reshape(3, rows, merge, patch, columns, merge, patch).transpose(1, 4, 2, 5, 0, 3, 6)
        frames = np.repeat(patches[:, :, :, :, :, None], self.frames, axis=5)
        grid = np.array([[1, rows * merge, columns * merge]], np.int64)
        return {"pixel_values": frames.reshape(rows * columns * merge**2, -1), "image_grid_thw": grid}

    def _most(self, *, low: bool) -> int:
        """The largest number of pixels."""
        return min(self.max_pixels, _LOW_TOKENS * (self.patch * self.merge) ** 2) if low else self.max_pixels

    def _size(self, width: int, height: int, *, low: bool) -> tuple[int, int]:
        """The columns and rows of tokens."""
        side, most = self.patch * self.merge, self._most(low=low)
        columns, rows = round(width / side), round(height / side)
        if columns * rows * side * side > most:
            shrink = math.sqrt(width * height / most)
            columns = max(1, math.floor(width / shrink / side))
            rows = max(1, math.floor(height / shrink / side))
        elif columns * rows * side * side < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (width * height))
            columns, rows = math.ceil(width * grow / side), math.ceil(height * grow / side)
        return columns, rows
