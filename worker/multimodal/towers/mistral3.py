"""Mistral 3: one state for each patch of an image of any size, then one for each square of four.

    pixel_values [1, 3, height, width] --vision_embeddings--> [patches, size]
                                       --squares of 2 x 2-->  [tokens, 4 * size], the patches' numbers interleaved
                                       --multi_modal_projector--> [tokens, hidden]

One image is computed at a time: its patches attend to each other, so memory grows with its size alone.
Source: Mistral3PatchMerger in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.worker.multimodal.towers.network import FloatArray, Network
from headrace.worker.multimodal.towers.tower import Pixels
from headrace.worker.request.images import ImageStates


class Mistral3:
    """Encodes images with the tower of Mistral 3. `patch` is the side of a patch in pixels, `merged` the side of a
    square in patches."""

    def __init__(self, embeddings: Network, projector: Network, patch: int, merged: int) -> None:
        self._embeddings, self._projector, self._patch, self._merged = embeddings, projector, patch, merged

    def encode(self, images: Sequence[Pixels]) -> Sequence[ImageStates]:
        """See `Tower`."""
        return [ImageStates(self._encoded(image["pixel_values"])) for image in images]

    def _encoded(self, pixels: FloatArray) -> FloatArray:
        (patches,) = self._embeddings(pixel_values=pixels)
        height, width = (length // self._patch for length in pixels.shape[-2:])
        (states,) = self._projector(image_features=merged(patches, height, width, self._merged))
        return states


def merged(patches: FloatArray, height: int, width: int, side: int) -> FloatArray:
    """The states of squares of `side` patches, from those of `height` times `width` patches `[patches, size]`. Each
    number of a state is followed by the same one of the square's other patches."""
    size = patches.shape[-1]
    squares = patches.reshape(height // side, side, width // side, side, size).transpose(0, 2, 4, 1, 3)
    return squares.reshape(-1, size * side * side)
