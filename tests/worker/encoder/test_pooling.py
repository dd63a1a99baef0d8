"""One vector for each text."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.worker.encoder.pooling import Activation, Pooling, activated, normalized, pooled

HIDDEN = np.arange(2 * 4 * 3, dtype=np.float32).reshape(2, 4, 3)
LENGTHS = np.array([4, 2])


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        (Pooling.CLS, [[0, 1, 2], [12, 13, 14]]),
        (Pooling.LAST, [[9, 10, 11], [15, 16, 17]]),
        (Pooling.MEAN, [[4.5, 5.5, 6.5], [13.5, 14.5, 15.5]]),
    ],
)
def test_padding_is_no_part_of_a_vector(pooling: Pooling, expected: list[list[float]]) -> None:
    spoiled = HIDDEN.copy()
    spoiled[1, 2:] = np.nan
    assert pooled(spoiled, LENGTHS, pooling).tolist() == expected


def test_normalized_vectors_have_length_one_and_zeros_stay() -> None:
    vectors = normalized(np.array([[3, 4], [0, 0]], np.float32))
    assert vectors.tolist() == [pytest.approx([0.6, 0.8]), [0, 0]]


def test_scores_go_through_the_activation() -> None:
    scores = np.array([[-200.0], [0.0], [2.0]], np.float32)
    assert activated(scores, Activation.SIGMOID)[:, 0].tolist() == pytest.approx([0, 0.5, 0.880797], abs=1e-6)
    assert activated(scores, Activation.IDENTITY) is scores
