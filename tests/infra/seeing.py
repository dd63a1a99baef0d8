"""Prompts with images for an engine, made of a model directory: its family's pixels and its own tower.

    seeing = Seeing(directory)
    request = seeing.request("r", token_ids, [png, ..], SamplingParams(..))

`token_ids` has the family's image token once for each token of an image, as transformers' processors write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace.common.vision.decode import decode
from headrace.common.vision.families.known import family_of
from headrace.common.vision.family import Detail
from headrace.common.vision.files import FILES
from headrace.common.vision.header import read_header
from headrace.common.vision.identity import digest, pseudo_tokens
from headrace.worker.multimodal.towers.load import tower_of
from headrace.worker.request.images import Grid, ImageStates, PlacedImage
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request


class Seeing:
    """Encodes images for requests. Equal images are encoded once."""

    def __init__(self, directory: Path) -> None:
        family = family_of({name: (directory / name).read_bytes() for name in FILES if (directory / name).is_file()})
        tower = tower_of(directory, threads=1, execution_mode="accuracy")
        assert family is not None, "the model is one of text"
        assert tower is not None, "the model has no tower"
        self.family, self.tower = family, tower
        self._states: dict[bytes, ImageStates] = {}

    def request(
        self,
        name: str,
        token_ids: Sequence[int],
        images: Sequence[bytes],
        sampling: SamplingParams,
        **fields: Any,
    ) -> Request:
        """A request for a prompt with images, which are encoded."""
        tokens = np.array(token_ids, np.uint32)
        places = np.flatnonzero(tokens == self.family.image_token_id)
        placed = []
        for data in images:
            image = self._placed(data, places)
            places = places[len(image.places) :]
            tokens[image.places] = pseudo_tokens(image.digest, len(image.places))
            placed.append(image)
        assert not len(places), "the prompt has more image tokens than its images"
        return Request(name, tokens.tolist(), sampling, 1, images=placed, **fields)

    def _placed(self, data: bytes, places: np.ndarray[Any, Any]) -> PlacedImage:
        header = read_header(data)
        layout = self.family.layout(header.width, header.height, Detail.AUTO)
        name = digest(data, self.family, Detail.AUTO)
        if name not in self._states:
            picture = decode(data, header, white_under_alpha=self.family.white_under_alpha)
            (self._states[name],) = self.tower.encode([self.family.pixels(picture, layout)])
        grid = None if layout.grid is None else Grid(*layout.grid)
        of_image = places[: layout.num_image_tokens]
        is_whole = self.family.keeps_images_whole
        return PlacedImage(name, of_image, data, grid=grid, is_whole=is_whole, states=self._states[name])
