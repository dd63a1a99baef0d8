"""How fast images are encoded: image tokens per second, learned. Within a model, time is nearly proportional to tokens:
most have a fixed number for each tile. Pure."""

from __future__ import annotations

import math

# Half-life of observations, in seconds of encoding.
_HALF_LIFE_S = 60.0


class EncodeRate:
    """Old observations fade."""

    def __init__(self) -> None:
        self._num_tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """0 while unknown."""
        return self._num_tokens / self._seconds if self._seconds else 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from images with so many tokens, which took so long."""
        keep = 0.5 ** (seconds / _HALF_LIFE_S)
        self._num_tokens = self._num_tokens * keep + num_tokens
        self._seconds = self._seconds * keep + max(seconds, 1e-6)

    def seconds(self, num_tokens: int, guess: float = math.inf) -> float:
        """Expected time of images with so many tokens. While the rate is unknown, `guess` tokens a second."""
        return num_tokens / (self.tokens_per_s or guess)
