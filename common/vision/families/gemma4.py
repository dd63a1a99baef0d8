"""Gemma 4: images keep their ratio; all are scaled to nearly the same number of pixels, up to 280 tokens of 3 x 3
patches.

In the larger models, the tokens of an image see each other in both directions.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from headrace.common.vision.bounds import check_ratio
from headrace.common.vision.family import Detail, ImageLayout, canonical
from headrace.common.vision.files import Fields, ModelFiles
from headrace.common.vision.normalising import Normalising

# What the processor of transformers can be asked for, of one image. Low detail is the fewest.
_NUM_TOKENS = (70, 140, 280, 560, 1120)
# Other tokens of media in config.json: begin and end of an image, video, audio.
_IDS = {"boi_token_id": 255999, "eoi_token_id": 258882, "video_token_id": 258884, "audio_token_id": 258881}


@dataclass(frozen=True)
class Gemma4:
    """The images of one Gemma 4 model."""

    image_token_id: int
    reserved_token_ids: frozenset[int]
    patch: int
    """Pixels of a side of a patch."""
    pool: int
    """Patches of a side of what becomes one token."""
    max_tokens: int
    """Of an image."""
    keeps_images_whole: bool
    resample: Image.Resampling
    normalising: Normalising

    placeholder = "<|image|>"
    text_around = ""
    white_under_alpha = False

    @classmethod
    def read(cls, files: ModelFiles) -> Gemma4:
        """The images of a model, from its files."""
        config, settings = files.config, files.preprocessor
        settings.demand("do_resize", True, True)
        tower = config.part("vision_config")
        patch, pool = tower.whole("patch_size", 16), tower.whole("pooling_kernel_size", 3)
        for name, of_model in (("patch_size", patch), ("pooling_kernel_size", pool)):
            if settings.whole(name, of_model) != of_model:
                raise settings.error(name, f"is not {of_model}, as in the model's vision_config")
        max_tokens = settings.whole("max_soft_tokens", 280)
        if max_tokens not in _NUM_TOKENS:
            raise settings.error("max_soft_tokens", f"is {max_tokens}, and is one of {_NUM_TOKENS} in transformers")
        image_token_id = files.image_token_id(258880)
        others = [config.whole(name, usual, least=0) for name, usual in _IDS.items()]
        return cls(
            image_token_id=image_token_id,
            reserved_token_ids=frozenset({image_token_id, *others}),
            patch=patch,
            pool=pool,
            max_tokens=max_tokens,
            keeps_images_whole=_sees_both_directions(config.part("text_config"), max_tokens),
            resample=settings.resample(Image.Resampling.BICUBIC),
            normalising=Normalising.read(settings, (0.0,) * 3, (1.0,) * 3, usual=False),
        )

    @property
    def placeholder_token_id(self) -> int:
        """The image token, of which the template writes one."""
        return self.image_token_id

    def settings(self, detail: Detail) -> bytes:
        """The settings: all fields. At low detail, they include its own bound."""
        return canonical(self, self._num_tokens(low=detail is Detail.LOW))

    def layout(self, width: int, height: int, detail: Detail) -> ImageLayout:
        """The layout of an image. At low detail, it has at most 70 tokens."""
        check_ratio(width, height)
        low = detail is Detail.LOW
        rows, columns = self._grid(width, height, low=low)
        return ImageLayout(
            width=width,
            height=height,
            low=low,
            pieces=("<|image>", rows * columns, "<image|>"),
            num_pixels=rows * columns * (self.patch * self.pool) ** 2,
            scale=min(1.0, self._scale(width, height, low=low)),
        )

    def pixels(self, image: Image.Image, layout: ImageLayout) -> Mapping[str, npt.NDArray[Any]]:
        """pixel_values: [1, patches, patch * patch * 3], in reading order. image_position_ids: [1, patches, 2], the
        column and the row of each. The reference adds patches that nothing sees, up to the number of the longest
        image."""
        rows, columns = (side * self.pool for side in self._grid(layout.width, layout.height, low=layout.low))
        pixels = self.normalising.of(image.resize((columns * self.patch, rows * self.patch), self.resample))
        patches = pixels.reshape(3, rows, self.patch, columns, self.patch).transpose(1, 3, 2, 4, 0)
        row, column = np.indices((rows, columns), np.int64).reshape(2, -1)
        return {
            "pixel_values": patches.reshape(1, rows * columns, -1),
            "image_position_ids": np.stack([column, row], -1)[None],
        }

    def _num_tokens(self, *, low: bool) -> int:
        return _NUM_TOKENS[0] if low else self.max_tokens

    def _scale(self, width: int, height: int, *, low: bool) -> float:
        """The factor from the image's sides to those with the most pixels that its tokens can have."""
        return math.sqrt(self._num_tokens(low=low) * (self.patch * self.pool) ** 2 / (height * width))

    def _grid(self, width: int, height: int, *, low: bool) -> tuple[int, int]:
        """The rows and columns of tokens: as many as fit, but at least one of each."""
        most, side = self._num_tokens(low=low), self.patch * self.pool
        scale = self._scale(width, height, low=low)
        rows, columns = math.floor(scale * height / side), math.floor(scale * width / side)
        if not rows:
            return 1, min(width // height, most)
        if not columns:
            return min(height // width, most), 1
        return rows, columns


def _sees_both_directions(text: Fields, max_tokens: int) -> bool:
    """Whether an image's tokens attend to each other in both directions, by the configuration of the language model.
    Raises FamilyError if that attention cannot be computed."""
    # Workers put token 0 in the place of an image's, and layers may have embeddings of tokens of their own.
    if text.whole("pad_token_id", 0, least=0):
        raise text.error("pad_token_id", "is not 0, which is not supported")
    attention = text.text("use_bidirectional_attention", "")
    if attention not in ("", "vision"):
        raise text.error("use_bidirectional_attention", f"is {attention}, which is not supported")
    if attention and text.whole("sliding_window", 512) < max_tokens:
        raise text.error("sliding_window", f"is less than the {max_tokens} tokens of an image, which is not supported")
    return bool(attention)
