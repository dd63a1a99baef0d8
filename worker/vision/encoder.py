"""The interface between the process that encodes images and a model's encoder, which turns image files into states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import msgspec

from headrace.worker.request.images import ImageStates

NOT_ENCODED = "the image could not be encoded; the worker's log has the reason"
"""What callers are told of a failure that is not their image's fault."""


class Setting(msgspec.Struct, frozen=True):
    """What to serve: the model's directory, the largest number of pixels that a tower reads, threads, precision, the
    bytes that encoding may take in addition to the tower, and the states that the engine expects: their size, and the
    number of layers with additional states. `warms_up`: encode an image before the first request."""

    model_dir: str
    max_view_pixels: int
    threads: int
    execution_mode: str
    memory_bytes: int
    hidden_size: int
    num_layers: int
    warms_up: bool = False


class UnsupportedModelError(Exception):
    """The images of a model cannot be encoded. Its text says why, as the end of a sentence that begins with the
    model."""


class BadImageError(Exception):
    """A file is not an image that can be encoded. The text of the error may be sent to the client."""


class ImageFile(NamedTuple):
    """An image: its file, and how closely to look at it."""

    data: bytes
    detail: str


class ImageEncoder(Protocol):
    """Turns image files into states; see `headrace.worker.vision.tower_encoder.TowerEncoder`."""

    def encode(self, images: Sequence[ImageFile]) -> Sequence[ImageStates | BadImageError]:
        """The states of each image, or what is wrong with its file."""
        ...

    def warm_up(self) -> None:
        """Encode an image of a usual shape and of the fewest tokens: the first image of a process also pays for kernels
        and for the order of weights in memory."""
        ...
