"""Converts pixels of 8 bits to the numbers that vision towers read, bit for bit as transformers' image processors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.common.vision.files import Fields

CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)

Pixels = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Normalising:
    """A scale, and a mean and deviation for each channel."""

    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @classmethod
    def read(
        cls, fields: Fields, mean: tuple[float, ...], std: tuple[float, ...], *, usual: bool = True
    ) -> Normalising:
        """The settings of an image processor. `mean`, `std` and `usual`, whether it normalises at all, are the defaults
        of its class."""
        scale = fields.number("rescale_factor", 1 / 255) if fields.flag("do_rescale", True) else 1.0
        if not fields.flag("do_normalize", usual):
            return cls(scale, (0.0,) * 3, (1.0,) * 3)
        found = cls(scale, fields.numbers("image_mean", mean), fields.numbers("image_std", std))
        if not all(found.std):
            raise fields.error("image_std", "contains 0")
        return found

    @cached_property
    def table(self) -> Pixels:
        """[3, 256]: the number for each channel and each value of its pixels. Scaled in double precision, the rest in
        single, as the reference does."""
        scaled = (np.arange(256, dtype=np.uint8).astype(np.float64) * self.scale).astype(np.float32)
        mean, std = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
        found: Pixels = (scaled[None] - mean) / std
        return found

    def of(self, image: Image.Image | npt.NDArray[np.uint8]) -> Pixels:
        """The normalised pixels [3, height, width] of an image in mode RGB, or of an array [height, width, 3]."""
        raw: npt.NDArray[Any] = np.asarray(image)
        return np.stack([self.table[channel][raw[:, :, channel]] for channel in range(3)])
