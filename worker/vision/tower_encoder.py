"""The image encoder of a model: decodes and resizes image files as its family does, and runs its vision tower."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from PIL import Image

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


_USUAL_SIZE = (1024, 768)


class _Read(NamedTuple):
    """An image that was read from its file: its number of tokens, and its pixels."""

    num_tokens: int
    pixels: Pixels


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
        read = [self._read(image) for image in images]
        pixels = [entry.pixels for entry in read if isinstance(entry, _Read)]
        states = iter(self._tower.encode(pixels) if pixels else ())
        return [entry if isinstance(entry, BadImageError) else self._checked(next(states), entry) for entry in read]

    def warm_up(self) -> None:
        """See `ImageEncoder`."""
        family = self._family
        layout = family.layout(*_USUAL_SIZE, Detail.LOW)
        self._tower.encode([family.pixels(Image.new("RGB", _USUAL_SIZE), layout)])

    def _read(self, image: ImageFile) -> _Read | BadImageError:
        family = self._family
        try:
            header = read_header(image.data)
            check_size(header)
            layout = family.layout(header.width, header.height, Detail(image.detail))
            picture = decode(image.data, header, white_under_alpha=family.white_under_alpha)
            return _Read(layout.num_image_tokens, family.pixels(picture, layout))
        except ImageError as error:
            return BadImageError(str(error))

    def _checked(self, states: ImageStates, read: _Read) -> ImageStates:
        """TowerError if the language model does not take these states for such an image."""
        if not states.fits(read.num_tokens, self._setting.hidden_size, self._setting.num_layers):
            shapes = [array.shape for array in states if array is not None]
            raise TowerError(f"its tower's states {shapes} are not those of an image with {read.num_tokens} tokens")
        return states
