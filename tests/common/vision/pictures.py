"""Pictures that are the same on every machine: their pixels are computed from places alone."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt

PROMPT = "user\n{}\nwhat"

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


@cache
def picture(width: int, height: int, channels: int = 3) -> npt.NDArray[np.uint8]:
    """[height, width, channels]: slopes and noise, different in each channel."""
    x, y, c = np.meshgrid(np.arange(width), np.arange(height), np.arange(channels), indexing="xy")
    slope = 97 * x // width + 61 * y // height + 31 * c
    noise = (x * 7919 + y * 104729 + c * 1299709 + x * y * (c + 3)) % 251 // 3
    found = (slope + noise).astype(np.uint8)
    found.flags.writeable = False
    return found


LAYOUT_SIZES = (
    *SIZES[:-1],
    *((width, height) for width in (17, 100, 337, 801) for height in (15, 99, 336, 1000)),
    *((int(1.21**i) + 1, 700 - 20 * i) for i in range(8, 34, 2)),
)
