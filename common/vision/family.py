"""The interface of families of vision-language models: how an image lengthens a prompt, and its pixels.

A chat template writes one placeholder for an image. In its place the model expects marks, which are ordinary tokens,
and image tokens, whose embeddings are replaced with the states that the vision tower computes. How many there are
depends on the image's size alone.
"""

from __future__ import annotations

import enum
import json
import math
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy.typing as npt

from headrace.common.vision.header import ImageError

if TYPE_CHECKING:
    from PIL import Image


class FamilyError(ValueError):
    """The files of a model describe images in a way that is not supported. Its text says which."""


class Detail(enum.StrEnum):
    """How finely an image is read. HIGH and AUTO are the model's normal way, LOW its coarsest."""

    LOW = "low"
    HIGH = "high"
    AUTO = "auto"


@dataclass(frozen=True, kw_only=True)
class ImageLayout:
    """The tokens in a prompt for an image of one size."""

    width: int
    """Pixels a row of the image, after its orientation is applied."""
    height: int
    low: bool
    """Whether the image is read at low detail."""
    pieces: tuple[str | int, ...]
    """What replaces the placeholder, in order: texts of marks, which are tokenized with their special tokens
    recognised, and numbers of consecutive image tokens."""
    grid: tuple[int, int] | None = None
    """Rows and columns of the image tokens, where their positions have three parts."""
    num_pixels: int
    """Number of pixels that the tower reads, which its time depends on: of all tiles, after resizing."""
    scale: float
    """How much the image is reduced, by the side that is reduced more; 1 if it is not. Rounding to whole patches does
    not count."""

    @property
    def runs(self) -> tuple[int, ...]:
        """Numbers of consecutive image tokens, in order."""
        return tuple(piece for piece in self.pieces if isinstance(piece, int))

    @property
    def num_image_tokens(self) -> int:
        """Number of tokens that get a state of the image."""
        return sum(self.runs)

    def token_ids(self, image_token_id: int, tokenize: Callable[[str], Sequence[int]]) -> array[int]:
        """The tokens that replace the placeholder. `tokenize` recognises special tokens and adds none around a text."""
        found = array("I")
        for piece in self.pieces:
            found.extend([image_token_id] * piece if isinstance(piece, int) else tokenize(piece))
        return found


class ImageFamily(Protocol):
    """The images of one model. Immutable; any thread may call it."""

    @property
    def image_token_id(self) -> int:
        """The token that the model has in place of each vector of an image."""

    @property
    def placeholder(self) -> str:
        """The text that the chat template writes for an image: that of one special token."""

    @property
    def placeholder_token_id(self) -> int:
        """The token of the placeholder, which the layout's pieces replace."""

    @property
    def text_around(self) -> str:
        """The texts that the gateway writes before and after a placeholder in the rendered text, before it is
        tokenized."""

    @property
    def reserved_token_ids(self) -> frozenset[int]:
        """Tokens that text of callers must never become, as far as config.json names them."""

    @property
    def keeps_images_whole(self) -> bool:
        """Whether an image's tokens attend to each other in both directions, so that one step must compute them all."""

    @property
    def white_under_alpha(self) -> bool:
        """Whether white, not black, is under transparent pixels."""

    def settings(self, detail: Detail) -> bytes:
        """Everything except the image that layouts and pixels depend on: part of the image's identity. Equal for all
        details if the model reads images in one way only."""

    def layout(self, width: int, height: int, detail: Detail) -> ImageLayout:
        """The layout of an image of this size in pixels, after its orientation is applied. Raises `ImageError` if the
        model cannot read images of this shape."""

    def pixels(self, image: Image.Image, layout: ImageLayout) -> Mapping[str, npt.NDArray[Any]]:
        """The inputs for the vision tower, by name, bit for bit those of transformers. `image` is in mode RGB and has
        the size of the layout."""


class UsualFamily:
    """The common part of families whose templates write an image as one image token."""

    text_around = ""
    keeps_images_whole = False
    white_under_alpha = False

    @property
    def placeholder_token_id(self: ImageFamily) -> int:
        """The image token itself."""
        return self.image_token_id

    def settings(self, detail: Detail) -> bytes:
        """The settings: all fields, and whether the detail is low."""
        return canonical(self, detail is Detail.LOW)


def check_not_reduced(family: ImageFamily, width: int, height: int, detail: Detail) -> None:
    """Raises `ImageError`, with the largest size of about this shape, if the model would read the image reduced."""
    scale = family.layout(width, height, detail).scale
    if scale >= 1:
        return
    fitting = _scaled(width, height, scale)
    while fitting != (1, 1) and not _is_read_whole(family, *fitting, detail):  # rounding has changed the shape
        scale *= 0.99
        fitting = _scaled(width, height, scale)
    raise ImageError(
        f"the image has {width} x {height} pixels, and the model reads at most {fitting[0]} x {fitting[1]} of an image "
        "of this shape. Scale it down"
    )


def _scaled(width: int, height: int, scale: float) -> tuple[int, int]:
    return max(1, math.floor(width * scale)), max(1, math.floor(height * scale))


def _is_read_whole(family: ImageFamily, width: int, height: int, detail: Detail) -> bool:
    try:
        return family.layout(width, height, detail).scale >= 1
    except ImageError:
        return False


def canonical(family: Any, *more: object) -> bytes:
    """Canonical bytes of a family's class, its fields and more settings."""
    return json.dumps([type(family).__name__, asdict(family), more], sort_keys=True, default=sorted).encode()
