"""LLaVA-NeXT: the whole image scaled to a square, and tiles of the image scaled to fit one of several sizes.

The states of the tiles are put together to one grid, what lies outside of the image is cut off, and each row gets one
more state, which the model has learned. At low detail there is only the whole image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.common.vision.families.llava import tower_tokens
from headrace.common.vision.families.one_size import processor_kind
from headrace.common.vision.family import Detail, ImageLayout, UsualFamily
from headrace.common.vision.files import ModelFiles
from headrace.common.vision.normalising import CLIP_MEAN, CLIP_STD, Normalising

_SIZES = ((336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008))


@dataclass(frozen=True)
class LlavaNext(UsualFamily):
    """The images of one LLaVA-NeXT model."""

    image_token_id: int
    tile: int
    """Pixels of a side of a tile."""
    tile_side: int
    """Number of patches on a side of a tile. Each patch is one token."""
    sizes: tuple[tuple[int, int], ...]
    """Heights and widths that images are scaled to fit."""
    resample: Image.Resampling
    normalising: Normalising

    placeholder = "<image>"

    @classmethod
    def read(cls, files: ModelFiles) -> LlavaNext:
        """The images of a model, from its files."""
        config, settings = files.config, files.preprocessor
        if processor_kind(settings, "LlavaNextImageProcessor") != "LlavaNextImageProcessor":
            raise settings.error("image_processor_type", "is not LlavaNextImageProcessor, which is the only one known")
        settings.demand("do_resize", True, True)
        tower = config.part("vision_config")
        tile = tower.whole("image_size", 336)
        size = settings.size("size", {"shortest_edge": 224}, of_whole=("shortest_edge",))
        for name in ("shortest_edge",) if "shortest_edge" in size else ("height", "width"):
            if size.whole(name) != tile:
                raise size.error(name, f"is not {tile}, as in the model's vision_config")
        crop = settings.size("crop_size", {"height": 224, "width": 224}, of_whole=("height", "width"))
        if (crop.side("height"), crop.side("width")) != (tile, tile):
            raise settings.error("crop_size", f"is not {tile}, as in the model's vision_config")
        sizes = settings.pairs("image_grid_pinpoints", _SIZES)
        if config.pairs("image_grid_pinpoints", _SIZES) != sizes:
            raise settings.error("image_grid_pinpoints", "differs from that of config.json")
        if any(height % tile or width % tile for height, width in sizes):
            raise settings.error("image_grid_pinpoints", f"has sizes that are no multiples of {tile}")
        side = tile // tower.whole("patch_size", 14)
        if tower_tokens(config, tile, tile) != side * side:
            raise config.error("vision_feature_select_strategy", "does not fit the tower")
        return cls(
            image_token_id=files.image_token_id(32000),
            tile=tile,
            tile_side=side,
            sizes=sizes,
            resample=settings.resample(Image.Resampling.BICUBIC),
            normalising=Normalising.read(settings, CLIP_MEAN, CLIP_STD),
        )

    @property
    def reserved_token_ids(self) -> frozenset[int]:
        """The image token."""
        return frozenset({self.image_token_id})

    def layout(self, width: int, height: int, detail: Detail) -> ImageLayout:
        """The layout: the whole image and, except at low detail, the grid of the tiles. Each row of the grid has one
        more token; the whole image has one if it is alone."""
        low = detail is Detail.LOW
        tiles = 1
        tokens = self.tile_side**2
        if low:
            fit = self.tile, self.tile
            tokens += 1
        else:
            fit = self._fit(width, height)
            rows, columns = self._unpadded(width, height, fit)
            tokens += rows * (columns + 1)
            tiles += fit[0] * fit[1] // self.tile**2
        return ImageLayout(
            width=width,
            height=height,
            low=low,
            pieces=(tokens,),
            num_pixels=tiles * self.tile**2,
            scale=min(1.0, fit[0] / height, fit[1] / width),
        )

    def pixels(self, image: Image.Image, layout: ImageLayout) -> Mapping[str, npt.NDArray[Any]]:
        """pixel_values: [tiles, 3, side, side], the whole image first, then rows of tiles. With tiles, tile_grid: [2],
        their rows and columns; borders: [2], the rows of patches at the top and at the bottom, and the columns at
        either side, that lie outside of the image."""
        tile = self.tile
        tiles = [image.resize((tile, tile), self.resample)]
        more = {}
        if not layout.low:
            height, width = self._fit(image.width, image.height)
            across, down = width / image.width, height / image.height
            if across < down:
                size = width, min(math.ceil(image.height * across), height)
            else:
                size = min(math.ceil(image.width * down), width), height
            padded = Image.new("RGB", (width, height))
            padded.paste(image.resize(size, self.resample), ((width - size[0]) // 2, (height - size[1]) // 2))
            for top in range(0, height, tile):
                tiles += [padded.crop((left, top, left + tile, top + tile)) for left in range(0, width, tile)]
            fit = height, width
            more["tile_grid"] = np.array([side // tile for side in fit])
            more["borders"] = np.array(self._borders(image.width, image.height, fit))
        return {"pixel_values": np.stack([self.normalising.of(each) for each in tiles]), **more}

    def _fit(self, width: int, height: int) -> tuple[int, int]:
        """The height and width of the supported size in which the image keeps most of its pixels, and which it fills
        best."""

        def worth(size: tuple[int, int]) -> tuple[int, int]:
            scale = min(size[1] / width, size[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - size[0] * size[1]

        return max(self.sizes, key=worth)

    def _unpadded(self, width: int, height: int, fit: tuple[int, int]) -> tuple[int, int]:
        """The rows and columns of the tiles' grid without the part outside of the image."""
        top, left = self._borders(width, height, fit)
        rows, columns = self._grid(fit)
        return rows - 2 * top, columns - 2 * left

    def _grid(self, fit: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches in tiles of this height and width together."""
        height, width = (side // self.tile * self.tile_side for side in fit)
        return height, width

    def _borders(self, width: int, height: int, fit: tuple[int, int]) -> tuple[int, int]:
        """How many rows of patches at the top and at the bottom, and columns at either side, lie outside of the
        image."""
        rows, columns = self._grid(fit)
        if width / height > columns / rows:
            return (rows - int(round(height * (columns / width), 7))) // 2, 0
        return 0, (columns - int(round(width * (rows / height), 7))) // 2
