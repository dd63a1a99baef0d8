"""What towers compute around their networks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.worker.multimodal.towers.llava_next import Packing
from headrace.worker.multimodal.towers.mistral3 import merged
from headrace.worker.multimodal.towers.patches import Patches
from headrace.worker.multimodal.towers.tiled import PlacesInTile
from headrace.worker.multimodal.towers.tower import TowerError

CONFIG: dict[str, Any] = {"image_newline": [-1.0, -2.0]}


def test_patches_of_a_token_follow_each_other() -> None:
    rows, columns = Patches(2, 4, 2).places
    assert (rows * 4 + columns).tolist() == [0, 1, 4, 5, 2, 3, 6, 7]


def test_half_of_the_angles_grow_with_the_row_and_half_with_the_column() -> None:
    angles = Patches(2, 4, 2).angles(4)
    rows, columns = Patches(2, 4, 2).places
    assert angles.dtype == "float32"
    np.testing.assert_allclose(angles[:, :2], rows[:, None] * np.array([1, 0.01]), rtol=1e-6)
    np.testing.assert_allclose(angles[:, 2:], columns[:, None] * np.array([1, 0.01]), rtol=1e-6)


def test_windows_take_tokens_in_reading_order_and_end_at_the_borders() -> None:
    order, sizes = Patches(6, 10, 2).windows(2)  # 3 rows of 5 tokens
    assert order.tolist() == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9, 10, 11, 12, 13, 14]
    assert sizes.tolist() == [16, 16, 8, 8, 8, 4]


def test_places_are_interpolated_between_four_of_the_table() -> None:
    """A table that is a plane gives each patch the plane's value at its own place."""
    side = 5
    table = (10 * np.arange(side)[:, None] + np.arange(side)).reshape(-1).astype(np.float32)
    patches = Patches(6, 8, 2)
    places, weights = patches.neighbours(side)
    rows, columns = patches.places
    np.testing.assert_allclose(weights.sum(0), 1, rtol=1e-6)
    found = (table[places] * weights).sum(0)
    np.testing.assert_allclose(found, 10 * rows * 4 / 5 + columns * 4 / 7, rtol=1e-5, atol=1e-5)


def test_one_row_lies_at_the_beginning_of_the_table() -> None:
    places, weights = Patches(2, 2, 2).neighbours(3)
    assert places[0].tolist() == [0, 2, 6, 8]
    np.testing.assert_array_equal(weights, [[1] * 4, [0] * 4, [0] * 4, [0] * 4])


def test_tiles_become_a_picture_without_padding_and_with_an_end_of_each_row() -> None:
    pack = Packing(CONFIG)
    # Two tiles of 2 x 2 patches beside each other; the number of a patch is its place in the picture.
    tiles = np.array([[[90], [91], [92], [93]], [[0], [1], [4], [5]], [[2], [3], [6], [7]]], np.float32)
    tiles = np.concatenate([tiles, tiles], 2)
    grid = {"tile_grid": np.array([1, 2])}
    packed = pack(tiles, {**grid, "borders": np.array([0, 0])})
    assert packed[:, 0].tolist() == [90, 91, 92, 93, 0, 1, 2, 3, -1, 4, 5, 6, 7, -1]
    assert packed[[8, 13], 1].tolist() == [-2, -2]
    narrow = pack(tiles, {**grid, "borders": np.array([0, 1])})
    assert narrow[:, 0].tolist() == [90, 91, 92, 93, 1, 2, -1, 5, 6, -1]
    # As in transformers, nothing remains of an image that is thinner than a patch.
    thin = pack(tiles, {**grid, "borders": np.array([1, 0])})
    assert thin[:, 0].tolist() == [90, 91, 92, 93]
    one = pack(tiles[:1], {})
    assert one[:, 0].tolist() == [90, 91, 92, 93, -1]


def test_a_configuration_without_what_packing_needs_is_refused() -> None:
    with pytest.raises(TowerError, match="no image_newline; export it again"):
        Packing({})


def test_squares_of_patches_have_their_numbers_side_by_side() -> None:
    patches = np.arange(2 * 4 * 3, dtype=np.float32).reshape(8, 3)
    found = merged(patches, 2, 4, 2)
    assert found[0].tolist() == [0, 3, 12, 15, 1, 4, 13, 16, 2, 5, 14, 17]
    assert found[1].tolist() == [6, 9, 18, 21, 7, 10, 19, 22, 8, 11, 20, 23]


def test_every_patch_of_a_tile_has_its_own_place() -> None:
    more = PlacesInTile(14)(np.zeros((2, 3, 28, 42), np.float32))
    assert more["patch_attention_mask"].shape == (2, 2, 3)
    assert more["patch_attention_mask"].all()
    assert more["patch_position_ids"].tolist() == [[0, 1, 2, 3, 4, 5]] * 2
