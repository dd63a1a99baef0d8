"""Pictures that are the same on every machine: their pixels are computed from places alone."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

# Widths and heights.
SIZES = (
    (1, 1),
    (3, 5),
    (5, 3),
    (9, 2),
    (2, 9),
    (1, 150),
    (400, 3),
    (2000, 30),
    (30, 2000),
    (224, 224),
    (333, 337),
    (640, 480),
    (1201, 1600),
)


def picture(width: int, height: int, channels: int = 3) -> npt.NDArray[np.uint8]:
    """[height, width, channels]: slopes and noise, different in each channel."""
    x, y, c = np.meshgrid(np.arange(width), np.arange(height), np.arange(channels), indexing="xy")
    slope = 97 * x // width + 61 * y // height + 31 * c
    noise = (x * 7919 + y * 104729 + c * 1299709 + x * y * (c + 3)) % 251 // 3
    return (slope + noise).astype(np.uint8)
