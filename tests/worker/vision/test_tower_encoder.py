"""The image encoder of a small model."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.worker.multimodal.towers.network import Network
from headrace.worker.multimodal.towers.tower import TowerError
from headrace.worker.request.images import ImageStates
from headrace.worker.vision.encoder import BadImageError, ImageFile, Setting
from headrace.worker.vision.tower_encoder import TowerEncoder
from tests.e2e.shapes import MODEL, TOKENS_PER_PICTURE, questions

PICTURE = questions()[0].pictures[0]


def encoder(hidden_size: int, num_layers: int = 0) -> TowerEncoder:
    return TowerEncoder(Setting(str(MODEL), 1 << 20, 1, "accuracy", 1 << 30, hidden_size, num_layers))


def test_images_are_encoded_and_a_broken_file_ends_alone() -> None:
    good, broken, again = encoder(96).encode([ImageFile(data, "auto") for data in (PICTURE, PICTURE[:99], PICTURE)])
    assert isinstance(broken, BadImageError)
    assert isinstance(good, ImageStates)
    assert isinstance(again, ImageStates)
    assert good.states.shape == (TOKENS_PER_PICTURE, 96)
    assert (good.states == again.states).all()


def test_warming_up_encodes_one_image_and_changes_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, ...]] = []
    plain = Network.__call__

    def counted(network: Network, **inputs: np.ndarray) -> list[np.ndarray]:
        calls.append(inputs["pixel_values"].shape)
        return plain(network, **inputs)

    monkeypatch.setattr(Network, "__call__", counted)
    warm, cold = encoder(96), encoder(96)
    warm.warm_up()
    assert calls == [(1, 3, 56, 56)]
    (first,), (other,) = (found.encode([ImageFile(PICTURE, "auto")]) for found in (warm, cold))
    assert isinstance(first, ImageStates)
    assert isinstance(other, ImageStates)
    assert (first.states == other.states).all()


@pytest.mark.parametrize(("hidden_size", "num_layers"), [(64, 0), (192, 0), (96, 2)])
def test_states_that_the_language_model_does_not_take_are_not_given(hidden_size: int, num_layers: int) -> None:
    """As of a directory with the networks of two models."""
    with pytest.raises(TowerError, match="are not those of an image with 16 tokens"):
        encoder(hidden_size, num_layers).encode([ImageFile(PICTURE, "auto")])
