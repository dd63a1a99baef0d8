"""Towers that give each picture of a fixed size its states alone: LLaVA, Gemma 3, SmolVLM and Idefics 3, LLaVA-NeXT.

An image is one such picture, or several tiles. The tiles of all images of a call are computed together, a few at a
time: more would not be faster, and the intermediate results of a tile take some tens of MB.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.worker.multimodal.towers.network import FloatArray, Network
from headrace.worker.multimodal.towers.tower import Pixels
from headrace.worker.request.images import ImageStates

MOST_TILES = 4
"""That are computed at once."""


class Tiled:
    """Encodes images by tiles, `pixel_values` `[1, 3, height, width]` or `[1, tiles, 3, height, width]`.

    `more` gives further inputs of the network for tiles `[tiles, 3, height, width]`. `packed` makes the states of an
    image of those of its tiles `[tiles, n, hidden]`; else they follow each other.
    """

    def __init__(
        self,
        network: Network,
        *,
        more: Callable[[FloatArray], Mapping[str, npt.NDArray[Any]]] = lambda _: {},
        packed: Callable[[FloatArray, Pixels], FloatArray] = lambda states, _: states,
        most_tiles: int = MOST_TILES,
    ) -> None:
        self._network, self._more, self._packed, self._most_tiles = network, more, packed, most_tiles

    def encode(self, images: Sequence[Pixels]) -> Sequence[ImageStates]:
        """See `Tower`."""
        tiles = [image["pixel_values"].reshape(-1, *image["pixel_values"].shape[-3:]) for image in images]
        states = self._encoded(tiles)
        found = []
        for image, of_image in zip(images, states, strict=True):
            packed = self._packed(of_image, image)
            found.append(ImageStates(packed.reshape(-1, packed.shape[-1])))
        return found

    def _encoded(self, tiles: Sequence[FloatArray]) -> Sequence[FloatArray]:
        """The states of each image's tiles, `[tiles, n, hidden]`."""
        if len({of_image.shape[1:] for of_image in tiles}) > 1:
            return [states for of_image in tiles for states in self._encoded([of_image])]
        together = np.concatenate(tiles)
        parts = []
        for first in range(0, len(together), self._most_tiles):
            part = together[first : first + self._most_tiles]
            parts += self._network(pixel_values=part, **self._more(part))[:1]
        ends = np.cumsum([len(of_image) for of_image in tiles])
        return np.split(np.concatenate(parts), ends[:-1])
