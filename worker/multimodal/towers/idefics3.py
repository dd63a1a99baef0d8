"""SmolVLM and Idefics 3: what their networks take besides the tiles.

Every tile is full, so every patch counts and has its own place in reading order.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.worker.multimodal.towers.network import FloatArray


class Places:
    """Gives the patches of tiles `[tiles, 3, height, width]` their places. `patch` is the side of a patch in pixels."""

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
