"""The interface of vision towers, which encode images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy.typing as npt

from headrace.worker.request.images import ImageStates

Pixels = Mapping[str, npt.NDArray[Any]]
"""An image's inputs by name, as `ImageFamily.pixels` gives them."""


class TowerError(Exception):
    """The images of a model cannot be encoded. The text says why, as the end of a sentence that begins with the
    model."""


class Tower(Protocol):
    """Encodes images. One thread at a time may call it."""

    def encode(self, images: Sequence[Pixels]) -> Sequence[ImageStates]:
        """The states of each image, which do not depend on the other images."""
        ...
