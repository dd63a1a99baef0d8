"""The images of a prompt: the places of their tokens, and the states that replace the embeddings of these tokens.

In a request's tokens, each token of an image is a pseudo token (headrace.common.vision.identity), so that equal blocks
have equal images. The model never sees it: a step gives the token's place the image's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
LongArray = npt.NDArray[np.int64]


class ImageStates(NamedTuple):
    """The states that a vision tower computes for an image of n tokens, in the order of the tokens.

    `states` `[n, hidden]` replaces the embeddings of the tokens. `deepstack` `[layers, n, hidden]` is added to the
    states after each of the first layers; None if the model has none.
    """

    states: FloatArray
    deepstack: FloatArray | None = None

    @property
    def num_bytes(self) -> int:
        """The size of the states in bytes."""
        return self.states.nbytes + (0 if self.deepstack is None else self.deepstack.nbytes)

    def fits(self, num_tokens: int, hidden_size: int, num_layers: int) -> bool:
        """Whether a model takes them for an image of so many tokens: `hidden_size` and `num_layers` are those of its
        `ImageInputs`. Check before a request is scheduled, because another shape would end all requests of a step."""
        shape, arrays = (num_tokens, hidden_size), [self.states]
        if (self.deepstack is None) is (num_layers > 0):
            return False
        if self.deepstack is not None:
            if self.deepstack.shape != (num_layers, *shape):
                return False
            arrays.append(self.deepstack)
        return self.states.shape == shape and all(array.dtype == np.float32 for array in arrays)


class Grid(NamedTuple):
    """The rows and columns of an image's tokens, for models whose positions are two-dimensional inside an image.

    Such a model gives each token three positions: time, height and width. A text token has three equal positions. The
    tokens of an image start at the position that a text token would have in the place of the first one. A token's row
    is added to the height, and its column to the width. The next token continues after the largest position:

        tokens    a  b  i  i  i  i  i  i  c      an image of 2 rows and 3 columns
        time      0  1  2  2  2  2  2  2  5
        height    0  1  2  2  2  3  3  3  5
        width     0  1  2  3  4  2  3  4  5

    Source: get_rope_index of Qwen2-VL in transformers.
    """

    rows: int
    columns: int

    @property
    def shift(self) -> int:
        """The amount by which this image changes the difference between the position and the place of each later token;
        at most 0."""
        return max(self.rows, self.columns) - self.rows * self.columns


@dataclass(slots=True, eq=False)
class PlacedImage:
    """An image of a request's prompt.

    `digest` identifies the image with all settings that its states depend on. `places` `[n]` are the indices of its
    tokens in the prompt, rising. `data` is the encoded file. `states` may be None while no step computes the image's
    tokens: before it is encoded, and when all of its tokens are in the KV cache.
    """

    digest: bytes
    places: LongArray
    data: bytes
    detail: str = "auto"
    grid: Grid | None = None
    """None if the model's positions do not count rows and columns of images."""
    is_whole: bool = False
    """Whether its tokens also see those after them, so that one step has to compute all of them."""
    states: ImageStates | None = None

    @property
    def first(self) -> int:
        """The place of its first token."""
        return int(self.places[0])

    @property
    def end(self) -> int:
        """The place after its last token."""
        return int(self.places[-1]) + 1
