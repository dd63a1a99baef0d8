"""LLaVA-NeXT: the states of an image's tiles, put together to one picture, without the tiles' borders.

    tile 0         the whole image, reduced                     states in reading order
    tiles 1, 2, .. the image, scaled into a grid of tiles       states of the grid in reading order, without the rows
                   and centred                                  or columns that only padding fills, and with one more
                                                                state, `image_newline`, at the end of each row

Source: pack_image_features of LLaVA-NeXT in transformers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.worker.multimodal.towers.network import FloatArray
from headrace.worker.multimodal.towers.tower import Pixels, TowerError


class Packing:
    """Puts the states of tiles together, by the `config` of the model. TowerError if that lacks something."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        newline = config.get("image_newline")
        if not isinstance(newline, list):
            raise TowerError("its config.json has no image_newline; export it again with the current optimum-intel")
        self._newline = np.array(newline, np.float32)

    def __call__(self, tiles: FloatArray, pixels: Pixels) -> FloatArray:
        """The states `[n, hidden]` of an image, from those of its tiles `[tiles, patches, hidden]`."""
        whole, grid = tiles[0], tiles[1:]
        if not len(grid):
            return np.concatenate([whole, self._newline[None]])
        rows, columns = pixels["tile_grid"].tolist()
        side = math.isqrt(grid.shape[1])
        states = grid.reshape(rows, columns, side, side, -1).transpose(0, 2, 1, 3, 4)
        states = states.reshape(rows * side, columns * side, -1)
        top, left = pixels["borders"].tolist()
        states = states[top : len(states) - top, left : states.shape[1] - left]
        newlines = np.broadcast_to(self._newline, (len(states), 1, states.shape[-1]))
        picture = np.concatenate([states, newlines], 1)
        return np.concatenate([whole, picture.reshape(-1, picture.shape[-1])])
