"""Towers that encode pictures of a fixed size, each by itself: LLaVA, Gemma 3, SmolVLM and Idefics 3, LLaVA-NeXT.

An image is one such picture, or several tiles. They are computed one after the other: together they take as long, and
80 MB more for each tile (docs/decisions/images.md). So the states of an image do not depend on those beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.worker.multimodal.towers.network import FloatArray, Network
from headrace.worker.multimodal.towers.tower import Pixels
from headrace.worker.request.images import ImageStates


class Tiled:
    """Encodes images by tiles, `pixel_values` `[tiles, 3, height, width]`.

    `more` gives further inputs of the network for a tile `[1, 3, height, width]`. `packed` computes the states of an
    image from the states of its tiles `[tiles, n, hidden]`; without it, they are concatenated.
    """

    def __init__(
        self,
        network: Network,
        *,
        more: Callable[[FloatArray], Mapping[str, npt.NDArray[Any]]] = lambda _: {},
        packed: Callable[[FloatArray, Pixels], FloatArray] = lambda states, _: states,
    ) -> None:
        self._network, self._more, self._packed = network, more, packed

    def encode(self, images: Sequence[Pixels]) -> Sequence[ImageStates]:
        """See `Tower`."""
        return [self._encoded(image) for image in images]

    def _encoded(self, image: Pixels) -> ImageStates:
        pixels = image["pixel_values"]
        tiles = pixels.reshape(-1, 1, *pixels.shape[-3:])
        states = np.concatenate([self._network(pixel_values=tile, **self._more(tile))[0] for tile in tiles])
        packed = self._packed(states, image)
        return ImageStates(packed.reshape(-1, packed.shape[-1]))


class PlacesInTile:
    """Gives the patches of tiles `[tiles, 3, height, width]` their places, a further input of SmolVLM and Idefics 3.
    Every tile is full, so every patch counts and has its own place in reading order. `patch` is the side of a patch in
    pixels."""

    def __init__(self, patch: int) -> None:
        self._patch = patch

    def __call__(self, tiles: FloatArray) -> Mapping[str, npt.NDArray[Any]]:
        """`patch_attention_mask` `[tiles, rows, columns]` and `patch_position_ids` `[tiles, patches]`."""
        rows, columns = (length // self._patch for length in tiles.shape[-2:])
        places = np.arange(rows * columns, dtype=np.int64)
        return {
            "patch_attention_mask": np.ones((len(tiles), rows, columns), bool),
            "patch_position_ids": np.broadcast_to(places, (len(tiles), len(places))),
        }
