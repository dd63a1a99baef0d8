"""The image encoder of a model: what its family and its vision tower make of the files of images."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from headrace.common.vision.bounds import check_size
from headrace.common.vision.decode import decode
from headrace.common.vision.families.known import family_in
from headrace.common.vision.family import Detail, ImageFamily
from headrace.common.vision.header import ImageError, read_header
from headrace.worker.multimodal.towers.load import tower_of
from headrace.worker.multimodal.towers.tower import Pixels, Tower, TowerError
from headrace.worker.request.images import ImageStates
from headrace.worker.vision.encoder import BadImageError, ImageFile, Setting, UnsupportedModelError

log = logging.getLogger("headrace.worker.vision")


class TowerEncoder:
    """Decodes, resizes and encodes. One thread uses it."""

    def __init__(self, setting: Setting) -> None:
        """Reads and compiles the tower. UnsupportedModelError if it is of an unknown form."""
        model_dir = Path(setting.model_dir)
        start = time.monotonic()
        family = family_in(model_dir, setting.max_view_pixels)
        try:
            tower = tower_of(model_dir, threads=setting.threads, execution_mode=setting.execution_mode)
        except TowerError as error:
            raise UnsupportedModelError(str(error)) from None
        if family is None or tower is None:
            raise UnsupportedModelError("has no vision tower")
        self._setting = setting
        self._family: ImageFamily = family
        self._tower: Tower = tower
        log.info("the vision tower is loaded in %.1f s, for %d threads", time.monotonic() - start, setting.threads)

    def encode(self, images: Sequence[ImageFile]) -> Sequence[ImageStates | BadImageError]:
        """See `ImageEncoder`."""
        found: list[ImageStates | BadImageError | Pixels] = [self._pixels(image) for image in images]
        pixels = [entry for entry in found if isinstance(entry, dict)]
        states = iter(self._tower.encode(pixels) if pixels else ())
        return [
            entry if isinstance(entry, BadImageError) else self._checked(next(states), self._num_tokens(image))
            for entry, image in zip(found, images, strict=True)
        ]

    def _pixels(self, image: ImageFile) -> Pixels | BadImageError:
        family = self._family
        try:
            header = read_header(image.data)
            check_size(header)
            layout = family.layout(header.width, header.height, Detail(image.detail))
            picture = decode(image.data, header, white_under_alpha=family.white_under_alpha)
            return dict(family.pixels(picture, layout))
        except ImageError as error:
            return BadImageError(str(error))

    def _num_tokens(self, image: ImageFile) -> int:
        header = read_header(image.data)
        return self._family.layout(header.width, header.height, Detail(image.detail)).num_image_tokens

    def _checked(self, states: ImageStates, num_tokens: int) -> ImageStates:
        """TowerError if the language model does not take these states for an image of so many tokens."""
        if not states.fits(num_tokens, self._setting.hidden_size, self._setting.num_layers):
            shapes = [array.shape for array in states if array is not None]
            raise TowerError(f"its tower's states {shapes} are not those of an image with {num_tokens} tokens")
        return states
