"""The tokens of images in the arrays of a step, however a prompt is divided into steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headrace.worker.model.batch import Batch, build_batch, padded
from headrace.worker.model.step_images import arrays_of
from headrace.worker.multimodal.image_inputs import ImageInputs
from headrace.worker.request.images import Grid, ImageStates, PlacedImage
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.request.step import Scheduled

PSEUDO = 1 << 31
SIZE, LAYERS = 4, 2
INPUTS = ImageInputs(SIZE, has_positions=True, num_layers=LAYERS, keeps_whole=False)


def image(places: Sequence[int], grid: Grid | None = None, seed: int = 0) -> PlacedImage:
    rng = np.random.default_rng(seed)
    states = rng.normal(size=(len(places), SIZE)).astype(np.float32)
    deepstack = None if grid is None else rng.normal(size=(LAYERS, len(places), SIZE)).astype(np.float32)
    return PlacedImage(b"digest", np.array(places), b"data", grid=grid, states=ImageStates(states, deepstack))


def request(num_tokens: int, images: Sequence[PlacedImage], name: str = "r") -> Request:
    tokens = list(range(100, 100 + num_tokens))
    for place in (place for entry in images for place in entry.places.tolist()):
        tokens[place] = PSEUDO + place
    made = Request(name, tokens, SamplingParams(max_tokens=8, seed=0), 0, images=images)
    made.block_table.extend(range(num_tokens))
    return made


def positions_of(num_tokens: int, images: Sequence[PlacedImage]) -> list[tuple[int, int, int]]:
    """Time, height and width of each token, one after the other, as transformers defines them."""
    found: list[tuple[int, int, int]] = []
    starts = {int(entry.places[0]): entry.grid for entry in images if entry.grid is not None}
    while len(found) < num_tokens:
        following = max((max(place) for place in found), default=-1) + 1
        grid = starts.get(len(found))
        if grid is None:
            found.append((following, following, following))
            continue
        for row in range(grid.rows):
            found += [(following, following + row, following + column) for column in range(grid.columns)]
    return found


def three_rows(batch: Batch) -> list[tuple[int, int, int]]:
    """The positions that the graph makes of a step's inputs."""
    rows = np.stack([batch.position_ids] * 3)
    if batch.images is not None:
        assert batch.images.positions is not None
        rows[:, batch.images.rows] = batch.images.positions
    return [(time, height, width) for time, height, width in rows.T.tolist()]


GRIDS = [image(range(2, 8), Grid(2, 3)), image(range(8, 12), Grid(1, 4), 1), image(range(15, 24), Grid(3, 3), 2)]


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 7, 11, 40])
def test_chunks_of_every_size_have_the_inputs_of_the_whole(budget: int) -> None:
    """Beside a text, whose inputs they do not change."""
    seen, expected = request(30, GRIDS), positions_of(30, GRIDS)
    positions, rows, states, deepstack = [], [], [], []
    while seen.num_computed_tokens < 30:
        past, text = seen.num_computed_tokens, request(9, [], "text")
        text.num_computed_tokens = 6
        num_tokens = min(budget, 30 - past)
        batch = build_batch([Scheduled(text, 3), Scheduled(seen, num_tokens)], 1)
        assert batch.input_ids[:3].tolist() == [106, 107, 108]
        positions += three_rows(batch)[3:]
        assert three_rows(batch)[:3] == [(6, 6, 6), (7, 7, 7), (8, 8, 8)]
        is_of_image = np.zeros(num_tokens, bool)
        if batch.images is not None:
            assert batch.images.deepstack is not None
            is_of_image[batch.images.rows - 3] = True
            rows += (batch.images.rows - 3 + past).tolist()
            states.append(batch.images.states)
            deepstack.append(batch.images.deepstack)
        of_text = batch.input_ids[3:][~is_of_image].tolist()
        assert of_text == [100 + place for place in range(past, past + num_tokens) if not is_of_image[place - past]]
        assert not batch.input_ids[3:][is_of_image].any()
        seen.num_computed_tokens += num_tokens
    assert positions == expected
    assert rows == [place for entry in GRIDS for place in entry.places.tolist()]
    of_images = [entry.states for entry in GRIDS if entry.states is not None]
    np.testing.assert_array_equal(np.concatenate(states), np.concatenate([entry.states for entry in of_images]))
    layers = [entry.deepstack for entry in of_images if entry.deepstack is not None]
    np.testing.assert_array_equal(np.concatenate(deepstack, 1), np.concatenate(layers, 1))


def test_answers_and_drafts_continue_behind_the_largest_position() -> None:
    seen = request(30, GRIDS)
    last = max(positions_of(30, GRIDS)[-1])
    seen.token_ids.append(7)
    seen.num_computed_tokens, seen.draft = 30, (8, 9)
    text = request(5, [], "text")
    text.num_computed_tokens = 4
    batch = build_batch([Scheduled(text, 1), Scheduled(seen, 3)], 1)
    assert batch.images is None
    assert batch.position_ids.tolist() == [4, last + 1, last + 2, last + 3]
    # Keys and values are counted by tokens.
    assert batch.past_lens.tolist() == [4, 30, 31, 32]


def test_tokens_of_an_image_may_lie_apart_and_have_the_positions_of_their_places() -> None:
    seen = request(12, [image([1, 2, 5, 6, 9])])
    seen.num_computed_tokens = 2
    batch = build_batch([Scheduled(seen, 8)], 1)
    assert batch.images is not None
    assert seen.images[0].states is not None
    assert batch.images.rows.tolist() == [0, 3, 4, 7]
    assert batch.position_ids.tolist() == list(range(2, 10))
    assert batch.images.positions is batch.images.deepstack is None
    np.testing.assert_array_equal(batch.images.states, seen.images[0].states.states[1:])
    assert padded(batch, 2, 5).images is batch.images


def test_a_step_between_images_and_a_step_of_text_have_none() -> None:
    seen = request(12, [image([1, 2]), image([9])])
    seen.num_computed_tokens = 3
    assert build_batch([Scheduled(seen, 6)], 1).images is None
    assert build_batch([Scheduled(request(12, []), 12)], 1).images is None


def test_an_image_that_is_not_encoded_is_needed_only_by_steps_with_its_tokens() -> None:
    seen = request(12, [replace(image([1, 2]), states=None)])
    with pytest.raises(ValueError, match="an image that is not encoded"):
        build_batch([Scheduled(seen, 2)], 1)
    seen.num_computed_tokens = 3
    assert build_batch([Scheduled(seen, 2)], 1).images is None


def test_a_step_without_images_empties_the_inputs_of_the_graph() -> None:
    shapes = {name: (values.shape, values.dtype.name) for name, values in arrays_of(None, INPUTS).items()}
    assert shapes == {
        "image_rows": ((0,), "int64"),
        "image_states": ((0, SIZE), "float32"),
        "image_positions": ((3, 0), "int64"),
        "image_deepstack": ((LAYERS, 0, SIZE), "float32"),
    }
    plain = INPUTS._replace(has_positions=False, num_layers=0)
    assert list(arrays_of(None, plain)) == ["image_rows", "image_states"]
    batch = build_batch([Scheduled(request(30, GRIDS), 10)], 1)
    assert {name: values.shape for name, values in arrays_of(batch.images, INPUTS).items()} == {
        "image_rows": (8,),
        "image_states": (8, SIZE),
        "image_positions": (3, 8),
        "image_deepstack": (LAYERS, 8, SIZE),
    }
