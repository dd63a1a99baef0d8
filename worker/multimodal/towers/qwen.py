"""Qwen's towers: a state for each patch of an image of any size, then one for each square of four.

    pixel_values [patches, numbers] --vision_embeddings-->        [patches, size]
    Qwen3: + table of places, interpolated between four of them (vision_embeddings_pos)
    Qwen2.5: in the order of windows                  --merger--> [tokens, hidden], in reading order
    Qwen3: the merger also gives states for the first layers      [layers, tokens, hidden]

One image is computed at a time, without masks (see `attention`), so memory grows with its patches: by 150 KB for each,
in a tower with states of 1280 numbers.
Sources: Qwen2VisionTransformer, Qwen2_5_VisionTransformer and Qwen3VLVisionModel in transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.worker.multimodal.towers.attention import window_inputs
from headrace.worker.multimodal.towers.network import FloatArray, Network
from headrace.worker.multimodal.towers.patches import Patches
from headrace.worker.multimodal.towers.tower import Pixels
from headrace.worker.request.images import ImageStates


class Places:
    """Position embeddings: a table of `side` times `side`, which is interpolated to the size of each image."""

    def __init__(self, table: Network, side: int) -> None:
        self._table, self._side = table, side

    def of(self, patches: Patches) -> FloatArray:
        """The embedding of each patch's place, `[patches, size]`."""
        places, weights = patches.neighbours(self._side)
        (embeddings,) = self._table(input=places)
        found: FloatArray = np.einsum("np,nps->ps", weights, embeddings)
        return found


class Qwen:
    """Encodes images with Qwen's towers. `side` is the side of a token in patches. Qwen2.5 has windows of `window`
    times `window` tokens, and Qwen3 has embeddings of `places`."""

    def __init__(
        self,
        embeddings: Network,
        merger: Network,
        *,
        side: int,
        window: int = 0,
        places: Places | None = None,
    ) -> None:
        self._embeddings, self._merger = embeddings, merger
        self._side, self._window, self._places = side, window, places

    def encode(self, images: Sequence[Pixels]) -> Sequence[ImageStates]:
        """See `Tower`."""
        return [self._encoded(image) for image in images]

    def _encoded(self, image: Pixels) -> ImageStates:
        _, rows, columns = image["image_grid_thw"].reshape(3).tolist()
        patches = Patches(rows, columns, self._side)
        (states,) = self._embeddings(hidden_states=image["pixel_values"])
        if self._places is not None:
            states += self._places.of(patches)
        angles = patches.angles(self._merger.width_of("rotary_pos_emb"))
        more: dict[str, npt.NDArray[Any]] = {}
        if self._window:
            order, sizes = patches.windows(self._window)
            more = {"window_index": order, **window_inputs(sizes)}
        return ImageStates(*self._merger(hidden_states=states, rotary_pos_emb=angles, **more))
