"""Idefics3 and SmolVLM: an image is scaled to one length and cut into square tiles; the whole image is one more tile.

Each tile has the same number of tokens, after marks that name its row and column. At low detail there is only the tile
of the whole image.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.common.vision.family import Detail, ImageLayout, UsualFamily, canonical
from headrace.common.vision.files import ModelFiles
from headrace.common.vision.normalising import HALF, Normalising

_MARK = "<fake_token_around_image>"
_LONGEST = 4096


@dataclass(frozen=True)
class Idefics3(UsualFamily):
    """The images of one Idefics3 or SmolVLM model."""

    image_token_id: int
    num_tile_tokens: int
    """Of each tile."""
    tile: int
    """Pixels of a side of a tile."""
    longest_edge: int
    """Each image's longer side is scaled to it; a smaller image is enlarged."""
    splits: bool
    """Whether images are cut into tiles at high detail."""
    resample: Image.Resampling
    normalising: Normalising

    placeholder = "<image>"
    white_under_alpha = True

    @classmethod
    def read(cls, files: ModelFiles) -> Idefics3:
        """The images of a model, from its files."""
        config, settings = files.config, files.preprocessor
        settings.demand("do_resize", True, True)
        tower = config.part("vision_config")
        tile = settings.size("max_image_size", {"longest_edge": 364}, of_whole=()).side("longest_edge")
        side, rest = divmod(tile // tower.whole("patch_size", 32), config.whole("scale_factor", 2))
        if not side or rest:
            raise settings.error("max_image_size", "does not fit the model's patch_size and scale_factor")
        return cls(
            image_token_id=files.image_token_id(128257),
            num_tile_tokens=side * side,
            tile=tile,
            longest_edge=settings.size("size", {"longest_edge": 4 * 364}, of_whole=()).side("longest_edge"),
            splits=settings.flag("do_image_splitting", True),
            resample=settings.resample(Image.Resampling.LANCZOS),
            normalising=Normalising.read(settings, HALF, HALF),
        )

    @property
    def reserved_token_ids(self) -> frozenset[int]:
        """The image token; config.json does not name the marks."""
        return frozenset({self.image_token_id})

    def settings(self, detail: Detail) -> bytes:
        """The settings: all fields, and whether images are cut into tiles."""
        return canonical(self, self._cuts(detail))

    def layout(self, width: int, height: int, detail: Detail) -> ImageLayout:
        """The layout: rows of tiles, then the whole image."""
        rows, columns = self._tiles(width, height) if self._cuts(detail) else (0, 0)
        pieces: list[str | int] = []
        before = ""
        for row in range(1, rows + 1):
            for column in range(1, columns + 1):
                pieces += [f"{before}{_MARK}<row_{row}_col_{column}>", self.num_tile_tokens]
                before = ""
            before = "\n"
        before += "\n" if rows else ""
        longest = min(self.longest_edge, _LONGEST) if self._cuts(detail) else self.tile
        pieces += [f"{before}{_MARK}<global-img>", self.num_tile_tokens, _MARK]
        return ImageLayout(
            width=width,
            height=height,
            low=not self._cuts(detail),
            pieces=tuple(pieces),
            num_pixels=(rows * columns + 1) * self.tile**2,
            scale=min(1.0, longest / max(width, height)),
        )

    def pixels(self, image: Image.Image, layout: ImageLayout) -> Mapping[str, npt.NDArray[Any]]:
        """pixel_values: [tiles, 3, side, side], the whole image last. No tile is padded."""
        tile = self.tile
        image = image.resize(self._first_size(*image.size), self.resample)
        tiles = []
        if not layout.low:
            rows, columns = self._tiles(layout.width, layout.height)
            image = image.resize((max(columns, 1) * tile, max(rows, 1) * tile), self.resample)
            for top in range(0, rows * tile, tile):
                tiles += [image.crop((left, top, left + tile, top + tile)) for left in range(0, columns * tile, tile)]
        tiles.append(image.resize((tile, tile), self.resample))
        return {"pixel_values": np.stack([self.normalising.of(each) for each in tiles])}

    def _cuts(self, detail: Detail) -> bool:
        return self.splits and detail is not Detail.LOW

    def _first_size(self, width: int, height: int) -> tuple[int, int]:
        """The width and height of the image after scaling its longer side to the longest edge. The shorter side is
        even."""
        ratio = width / height
        if width >= height:
            width, height = self.longest_edge, int(self.longest_edge / ratio)
            height += height % 2
        else:
            width, height = int(self.longest_edge * ratio), self.longest_edge
            width += width % 2
        width, height = max(width, 1), max(height, 1)
        ratio = width / height
        if width >= height and width > _LONGEST:
            width, height = _LONGEST, int(_LONGEST / ratio)
        elif height > width and height > _LONGEST:
            width, height = int(_LONGEST * ratio), _LONGEST
        return max(width, 1), max(height, 1)

    def _tiles(self, width: int, height: int) -> tuple[int, int]:
        """Rows and columns of tiles; none if the scaled image fits into one."""
        width, height = self._first_size(width, height)
        ratio = width / height
        if width >= height:
            columns = math.ceil(width / self.tile)
            rows = math.ceil(int(columns * self.tile / ratio) / self.tile)
        else:
            rows = math.ceil(height / self.tile)
            columns = math.ceil(int(rows * self.tile * ratio) / self.tile)
        return (rows, columns) if rows > 1 or columns > 1 else (0, 0)
