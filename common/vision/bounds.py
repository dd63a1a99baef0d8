"""Bounds on images, checked with what their headers say, before anything is decoded."""

from __future__ import annotations

from headrace.common.vision.header import ImageError, ImageHeader

MAX_PIXELS = 50_000_000
"""Greatest number of pixels of an image. While it is decoded it takes 5 to 21 bytes a pixel, by format."""
MAX_RATIO = 200
"""Greatest ratio of an image's sides. Families that scale the shorter side to a fixed length would make much more of a
longer image; Qwen's refuse it, too."""
DEFAULT_MAX_IMAGE_PIXELS = 1_003_520
"""Greatest number of pixels that a tower reads of an image, in families that read as many as the image has: 1,280
tokens of Qwen2-VL. The maximum in the files of such models is up to 16 times this, and the time of a tower grows
faster than its pixels."""


def check_size(header: ImageHeader, max_pixels: int = MAX_PIXELS) -> None:
    """Raises `ImageError` if an image of this size is too large to be decoded."""
    width, height = header.width, header.height
    if width * height > max_pixels:
        raise ImageError(
            f"the image has {width} x {height} pixels; at most {max_pixels:,} are accepted. Make it smaller"
        )
    check_ratio(width, height)


def check_ratio(width: int, height: int) -> None:
    """Raises `ImageError` if one side is too long in proportion to the other."""
    if max(width, height) > MAX_RATIO * min(width, height):
        raise ImageError(
            f"the image has {width} x {height} pixels; one side may be at most {MAX_RATIO} times the other. Crop it"
        )
