"""The image tokens of a step: their rows, and the inputs that replace their embeddings. Pure.

A step may have a part of an image's tokens, and tokens of several images. Text beside them keeps its inputs, but the
positions of text after an image may differ from its places (see `Grid`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.worker.multimodal.image_inputs import (
    DEEPSTACK,
    NUM_POSITIONS,
    POSITIONS,
    ROWS,
    STATES,
    ImageInputs,
)
from headrace.worker.request.images import FloatArray, Grid, ImageStates, LongArray, PlacedImage
from headrace.worker.request.request import Request

# Stands for the tokens of images. Their embeddings are replaced, but tables have no rows for pseudo tokens.
PLACEHOLDER = 0


class StepImages(NamedTuple):
    """Inputs for the k tokens of images of a step, in the order of the step's tokens.

    rows       [k]                    their rows among the step's tokens
    states     [k, hidden]            replace their embeddings
    positions  [3, k]                 time, height and width; None if the model does not count them
    deepstack  [layers, k, hidden]    added to the states of the first layers; None if the model has none
    """

    rows: LongArray
    states: FloatArray
    positions: LongArray | None
    deepstack: FloatArray | None


def arrays_of(images: StepImages | None, inputs: ImageInputs) -> Mapping[str, npt.NDArray[np.generic]]:
    """The values of a graph's inputs for the images of a step, or for a step without any."""
    if images is None:
        size = inputs.hidden_size
        images = StepImages(
            np.zeros(0, np.int64),
            np.zeros((0, size), np.float32),
            np.zeros((NUM_POSITIONS, 0), np.int64),
            np.zeros((inputs.num_layers, 0, size), np.float32),
        )
    arrays: dict[str, npt.NDArray[np.generic]] = {ROWS: images.rows, STATES: images.states}
    if inputs.has_positions:
        assert images.positions is not None, "an image has no grid"
        arrays[POSITIONS] = images.positions
    if inputs.num_layers:
        assert images.deepstack is not None, "an image has no states for layers"
        arrays[DEEPSTACK] = images.deepstack
    return arrays


class _Part(NamedTuple):
    """The tokens of one image in a step: those from `low` to `high`. Their rows are their places in the prompt plus
    `offset`. `shift` is the shift of the text before the image."""

    image: PlacedImage
    low: int
    high: int
    offset: int
    shift: int

    @property
    def rows(self) -> LongArray:
        return self.image.places[self.low : self.high] + self.offset

    @property
    def states(self) -> ImageStates:
        states = self.image.states
        if states is None:
            raise ValueError("a step has tokens of an image that is not encoded")
        return states

    def positions(self, grid: Grid) -> LongArray:
        """Time, height and width of each token, `[3, tokens]`."""
        row, column = np.divmod(np.arange(self.low, self.high), grid.columns)
        found: LongArray = np.stack([np.zeros_like(row), row, column]) + (self.image.first + self.shift)
        return found


class ImageRows:
    """Collects the images of a step, sequence by sequence."""

    def __init__(self) -> None:
        self._parts: list[_Part] = []
        # Sequences that begin after images, and what their positions differ by; then the same of parts of sequences.
        self._shifts: dict[int, int] = {}
        self._later_shifts: list[tuple[int, int, int]] = []

    def add(self, request: Request, number: int, row: int, past: int, num_tokens: int) -> None:
        """Add a sequence: its number and first row in the step, and its tokens after `past` others."""
        if past >= request.images_end:
            if request.position_shift:
                self._shifts[number] = request.position_shift
            return
        end, shift = past + num_tokens, 0
        for image in request.images:
            if image.first >= end:
                break
            if image.end > past:
                low, high = np.searchsorted(image.places, (past, end)).tolist()
                if low < high:
                    self._parts.append(_Part(image, low, high, row - past, shift))
            if image.grid is not None:
                shift += image.grid.shift
                first = max(image.end, past)
                if first < end:
                    self._later_shifts.append((row + first - past, row + num_tokens, image.grid.shift))

    def shifted(self, past_lens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The number of tokens before each sequence, i32 `[sequences]`, with the shifts of sequences that begin after
        images. The given array does not change."""
        if not self._shifts:
            return past_lens
        past_lens = past_lens.copy()
        past_lens[list(self._shifts)] += np.fromiter(self._shifts.values(), np.int32)
        return past_lens

    def taken(self, input_ids: LongArray, positions: LongArray) -> StepImages | None:
        """The inputs for the images; None if the step has none. Also puts a placeholder into the `input_ids` of images,
        and shifts the `positions` `[tokens]` of text after them."""
        for first, end, shift in self._later_shifts:
            positions[first:end] += shift
        parts = self._parts
        if not parts:
            return None
        rows = np.concatenate([part.rows for part in parts])
        input_ids[rows] = PLACEHOLDER
        states = [part.states.states[part.low : part.high] for part in parts]
        grids = [part.positions(part.image.grid) for part in parts if part.image.grid is not None]
        layers = [part.states.deepstack for part in parts]
        deepstack = [
            of_image[:, part.low : part.high]
            for part, of_image in zip(parts, layers, strict=True)
            if of_image is not None
        ]
        return StepImages(
            rows,
            np.concatenate(states),
            np.concatenate(grids, 1) if grids else None,
            np.concatenate(deepstack, 1) if deepstack else None,
        )
