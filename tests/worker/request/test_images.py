"""Images of a prompt."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.worker.request.images import Grid, ImageStates, PlacedImage

STATES = np.zeros((6, 4), np.float32)
LAYERS = np.zeros((2, 6, 4), np.float32)


@pytest.mark.parametrize(
    ("states", "num_layers", "fits"),
    [
        (ImageStates(STATES), 0, True),
        (ImageStates(STATES, LAYERS), 2, True),
        (ImageStates(STATES[:5]), 0, False),
        (ImageStates(STATES[:, :3]), 0, False),
        (ImageStates(STATES.reshape(-1)), 0, False),
        (ImageStates(STATES.astype(np.float64)), 0, False),
        (ImageStates(STATES), 2, False),
        (ImageStates(STATES, LAYERS), 0, False),
        (ImageStates(STATES, LAYERS[:1]), 2, False),
        (ImageStates(STATES, LAYERS.astype(np.float16)), 2, False),
    ],
)
def test_states_of_another_shape_or_type_do_not_fit(states: ImageStates, num_layers: int, fits: bool) -> None:
    assert states.fits(6, 4, num_layers) is fits


def test_what_states_and_places_say() -> None:
    assert ImageStates(STATES).num_bytes == 96
    assert ImageStates(STATES, LAYERS).num_bytes == 288
    image = PlacedImage(b"digest", np.array([3, 4, 7]), b"data")
    assert (image.first, image.end) == (3, 8)
    assert [Grid(2, 3).shift, Grid(1, 1).shift, Grid(5, 1).shift] == [-3, 0, 0]
