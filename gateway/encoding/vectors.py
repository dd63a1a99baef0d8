"""Formats of vectors in answers (pure)."""

from __future__ import annotations

import base64
from collections.abc import Sequence

import numpy as np

from headrace.gateway.checks import invalid


def check_dimensions(dimensions: int | None, most: int) -> None:
    """Raise `StatusError` unless a model's vectors of length `most` can be shortened to this many dimensions."""
    if dimensions is not None and not 1 <= dimensions <= most:
        raise invalid("dimensions", f"dimensions must be 1 to {most}, the length of this model's vectors")


def shortened(vector: bytes, dimensions: int | None) -> bytes:
    """The first dimensions of a vector of float32, scaled to length 1. A whole vector is not scaled again."""
    if dimensions is None or 4 * dimensions == len(vector):
        return vector
    kept = np.frombuffer(vector, "<f4")[:dimensions]
    length = float(np.linalg.norm(kept))
    return (kept / length).astype("<f4").tobytes() if length else kept.tobytes()


def floats_of(vector: bytes) -> list[float]:
    """The numbers of a vector of float32."""
    return list(np.frombuffer(vector, "<f4").tolist())


def best_first(scores: Sequence[float], top_n: int | None) -> list[int]:
    """The indices of the `top_n` best scores, best first. Of equal scores, the earlier one comes first."""
    return sorted(range(len(scores)), key=lambda number: -scores[number])[:top_n]


def base64_of(vector: bytes) -> str:
    """A vector of float32 in base64, as OpenAI's clients decode it."""
    return base64.b64encode(vector).decode()
