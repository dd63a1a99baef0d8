"""LLaVA-NeXT: the states of an image's tiles, put together to one picture, without the tiles' borders.

    tile 0         the whole image, reduced                     states in reading order
    tiles 1, 2, .. the image, scaled into a grid of tiles       states of the grid in reading order, without the rows
                   and centred                                  or columns that only padding fills, and with one more
                                                                state, `image_newline`, at the end of each row

Source: pack_image_features of LLaVA-NeXT in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.worker.multimodal.towers.network import FloatArray
from headrace.worker.multimodal.towers.tower import Pixels, TowerError


class Packing:
    """Puts the states of tiles together, by the `config` of the model. TowerError if that lacks something."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        newline, pinpoints = config.get("image_newline"), config.get("image_grid_pinpoints")
        vision = config.get("vision_config")
        side = vision.get("image_size") if isinstance(vision, dict) else None
        if not isinstance(newline, list) or not isinstance(pinpoints, list) or not isinstance(side, int):
            raise TowerError(
                "its config.json has no image_newline, image_grid_pinpoints or vision_config.image_size; export it "
                "again with the current optimum-intel"
            )
        self._newline = np.array(newline, np.float32)
        self._pinpoints = [(int(height), int(width)) for height, width in pinpoints]
        self._tile = side

    def __call__(self, tiles: FloatArray, pixels: Pixels) -> FloatArray:
        """The states `[n, hidden]` of an image, from those of its tiles `[tiles, patches, hidden]`."""
        whole, grid = tiles[0], tiles[1:]
        if not len(grid):
            return np.concatenate([whole, self._newline[None]])
        size = height, width = tuple(pixels["image_sizes"].reshape(2).tolist())
        rows, columns = (length // self._tile for length in best_size(size, self._pinpoints))
        side = math.isqrt(grid.shape[1])
        states = grid.reshape(rows, columns, side, side, -1).transpose(0, 2, 1, 3, 4)
        states = states.reshape(rows * side, columns * side, -1)
        top, left = borders((height, width), states.shape[:2])
        states = states[top : len(states) - top, left : states.shape[1] - left]
        newlines = np.broadcast_to(self._newline, (len(states), 1, states.shape[-1]))
        picture = np.concatenate([states, newlines], 1)
        return np.concatenate([whole, picture.reshape(-1, picture.shape[-1])])


def best_size(size: tuple[int, int], sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """The one of `sizes` that keeps most pixels of an image of `size`, and of these the one with the least padding.
    All are heights and widths."""

    def quality(other: tuple[int, int]) -> tuple[int, int]:
        scale = min(other[1] / size[1], other[0] / size[0])
        kept = min(int(size[1] * scale) * int(size[0] * scale), size[0] * size[1])
        return kept, kept - other[0] * other[1]

    return max(sizes, key=quality)


def borders(size: tuple[int, int], scaled: tuple[int, int]) -> tuple[int, int]:
    """How many rows at the top and bottom, and columns at the left and right, are padding if an image of `size` is
    centred in a grid of `scaled` rows and columns."""
    height, width = size
    rows, columns = scaled
    if width / height > columns / rows:
        return (rows - int(round(height * (columns / width), 7))) // 2, 0
    return 0, (columns - int(round(width * (rows / height), 7))) // 2
