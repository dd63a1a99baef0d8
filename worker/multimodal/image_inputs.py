"""The inputs of a joined graph for the tokens of images in a step.

    image_rows       i64 [k]                    their rows among the step's tokens
    image_states     f32 [k, hidden]            take the place of their embeddings
    image_positions  i64 [3, k]                 time, height and width, if the model takes them of each token
    image_deepstack  f32 [layers, k, hidden]    added to the states of the first layers, if the model takes them

All else follows from the rows: a mask of the tokens of images, and their types. With k = 0 every value is that of a
graph without these inputs, bit for bit.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS, STATES, POSITIONS, DEEPSTACK = "image_rows", "image_states", "image_positions", "image_deepstack"
NAMES = (ROWS, STATES, POSITIONS, DEEPSTACK)
NUM_POSITIONS = 3


class ImageInputs(NamedTuple):
    """The inputs for images that a graph has: states of `hidden_size` numbers, positions if `has_positions`, and
    further states for the first `num_layers` layers. With `keeps_whole`, the tokens of an image also see later tokens
    of the image, so a step needs all of an image's tokens or none."""

    hidden_size: int
    has_positions: bool
    num_layers: int
    keeps_whole: bool
