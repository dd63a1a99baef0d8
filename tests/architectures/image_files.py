"""Images of odd sizes and kinds, and chats about them. Drawing is seeded; Pillow writes the files."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

_ORIENTATION, _TURNED = 0x0112, 6


def image_files() -> Mapping[str, bytes]:
    """The files by name."""
    return {
        "plain.png": _written(_picture(40, 30, 0), "PNG"),
        "point.png": _written(_picture(1, 1, 1), "PNG"),
        "tiny.png": _written(_picture(3, 5, 2), "PNG"),
        "wide.png": _written(_picture(2000, 30, 3), "PNG"),
        "turned.jpg": _turned(_picture(90, 50, 4)),
        "alpha.png": _written(_with_alpha(_picture(45, 70, 5)), "PNG"),
        "grey.png": _written(_picture(33, 64, 6).convert("L"), "PNG"),
        "frames.gif": _frames([_picture(60, 44, seed) for seed in (7, 8)]),
    }


PROMPTS: Sequence[tuple[str | tuple[str, ...], ...]] = (
    (("plain.png",), "what turns the mill?"),
    (("point.png",), "and ", ("turned.jpg",), "which one is older?"),
    (
        "first ",
        ("tiny.png", "wide.png", "alpha.png"),
        "then ",
        ("frames.gif",),
        "and the grey one",
        ("grey.png",),
    ),
)
"""The parts of each prompt: texts, and names of files."""


def content_of(prompt: Sequence[str | tuple[str, ...]]) -> list[dict[str, Any]]:
    """The content of the message that a prompt is, in parts."""
    parts: list[dict[str, Any]] = []
    for part in prompt:
        if isinstance(part, str):
            parts.append({"type": "text", "text": part})
        else:
            parts += [{"type": "image"} for _ in part]
    return parts


def names_in(prompt: Sequence[str | tuple[str, ...]]) -> list[str]:
    """The names of the files of a prompt, in order."""
    return [name for part in prompt if not isinstance(part, str) for name in part]


def _picture(width: int, height: int, seed: int) -> Image.Image:
    """Blobs of colour in a gradient, with some noise: every pixel differs, and the file stays small."""
    random = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    planes = []
    for _ in range(3):
        across, along, phase = (*random.uniform(0.02, 0.3, 2), random.uniform(0, 6))
        planes.append(127.5 + 100 * np.sin(across * x + along * y + phase) + random.uniform(-20, 20, x.shape))
    return Image.fromarray(np.stack(planes, -1).clip(0, 255).astype(np.uint8))


def _with_alpha(image: Image.Image) -> Image.Image:
    """The image, transparent on its left, half transparent in its middle."""
    alpha = np.linspace(0, 255, image.width).astype(np.uint8)
    image.putalpha(Image.fromarray(np.tile(alpha, (image.height, 1))))
    return image


def _turned(image: Image.Image) -> bytes:
    """A JPEG that is to be shown turned by a quarter."""
    exif = Image.Exif()
    exif[_ORIENTATION] = _TURNED
    return _written(image, "JPEG", exif=exif, quality=90)


def _frames(images: Sequence[Image.Image]) -> bytes:
    """An animation, of which the first image counts."""
    first, *others = [image.quantize(64) for image in images]
    return _written(first, "GIF", save_all=True, append_images=others, duration=100)


def _written(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()
