"""Identity of images: near-equal ones share no pseudo token at one place, equal ones share all."""

from __future__ import annotations

from array import array

import numpy as np
import pytest

from headrace.common.vision.families.known import family_of
from headrace.common.vision.family import Detail, ImageFamily
from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN, digest, pseudo_tokens


@pytest.fixture(scope="module")
def family() -> ImageFamily:
    found = family_of({"config.json": b'{"model_type": "llava", "vision_config": {"patch_size": 14}}'})
    assert found is not None
    return found


def test_pseudo_tokens_are_beyond_every_vocabulary_and_differ_from_place_to_place(family: ImageFamily) -> None:
    found = pseudo_tokens(digest(b"file", family, Detail.AUTO), 16_384)
    assert found.itemsize == 4
    assert len(set(found)) > 16_380
    assert min(found) >= FIRST_PSEUDO_TOKEN
    assert max(found) < 2**32


def test_tokens_of_an_image_are_the_same_whatever_their_number(family: ImageFamily) -> None:
    image = digest(b"file", family, Detail.AUTO)
    assert pseudo_tokens(image, 100)[:7] == pseudo_tokens(image, 7)
    assert pseudo_tokens(image, 0) == array("I")


def test_10_000_pairs_of_images_that_differ_in_one_bit_share_no_token_at_any_place(family: ImageFamily) -> None:
    random = np.random.default_rng(1)
    file = random.integers(0, 256, 2000, np.uint8)
    mine = np.array(pseudo_tokens(digest(file.tobytes(), family, Detail.AUTO), 64))
    for bit in random.choice(file.size * 8, 10_000, replace=False):
        other = file.copy()
        other[bit // 8] ^= 1 << (bit % 8)
        found = np.array(pseudo_tokens(digest(other.tobytes(), family, Detail.AUTO), 64))
        # One place of two in 2**31 is equal by chance: with these files, none is.
        assert not (found == mine).any()


def test_settings_are_a_part_of_the_identity() -> None:
    def of(mean: float) -> bytes:
        preprocessor = b'{"image_processor_type": "CLIPImageProcessor", "image_mean": [%f, 0.5, 0.5]}' % mean
        config = b'{"model_type": "llava", "vision_config": {"patch_size": 14}}'
        family = family_of({"config.json": config, "preprocessor_config.json": preprocessor})
        assert family is not None
        return digest(b"file", family, Detail.AUTO)

    assert of(0.5) == of(0.5)
    assert of(0.5) != of(0.25)


def test_a_family_that_reads_images_in_one_way_has_one_identity_for_all_details(family: ImageFamily) -> None:
    assert len({digest(b"file", family, detail) for detail in Detail}) == 1
