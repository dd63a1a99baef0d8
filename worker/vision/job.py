"""Image encoding jobs, their results, the interface of encoders, and the learned rate of encoding. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from headrace.protos.status import Reason
from headrace.worker.request.images import ImageStates

# Half-life of observations, in seconds of encoding.
_HALF_LIFE_S = 60.0


@dataclass(slots=True, eq=False)
class EncodeJob:
    """An image of `num_tokens` tokens to be encoded. When it has ended, either `states` or `problem` is set, with the
    `reason` for the caller."""

    digest: bytes
    data: bytes
    detail: str
    num_tokens: int
    begun_s: float = 0.0
    """When the process got it first, on the monotonic clock; 0 before."""
    seconds: float = 0.0
    """Its share of the time that encoding took."""
    states: ImageStates | None = None
    problem: str = ""
    reason: Reason = Reason.INTERNAL
    num_tries: int = 0

    def fail(self, reason: Reason, problem: str) -> None:
        """End it without states."""
        self.reason, self.problem = reason, problem


class EncodeRate:
    """How fast images are encoded: image tokens per second, learned. Old observations fade. Within a model, time is
    nearly proportional to tokens: most have a fixed number for each tile."""

    def __init__(self) -> None:
        self._num_tokens = self._seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        """Image tokens that are encoded per second; 0 while unknown."""
        return self._num_tokens / self._seconds if self._seconds else 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from images with `num_tokens` tokens in all that took `seconds`."""
        keep = 0.5 ** (seconds / _HALF_LIFE_S)
        self._num_tokens = self._num_tokens * keep + num_tokens
        self._seconds = self._seconds * keep + max(seconds, 1e-6)

    def seconds(self, num_tokens: int, guess: float = math.inf) -> float:
        """Expected seconds for images with `num_tokens` tokens. Assumes `guess` tokens per second while the rate is
        unknown."""
        return num_tokens / (self.tokens_per_s or guess)


class Encoder(Protocol):
    """Encodes images in the background: a process, or a simulation."""

    rate: EncodeRate
    num_encoded: int
    num_failed: int
    num_restarts: int
    encode_s: float
    """Seconds that encoding took in all."""

    @property
    def bytes_per_token(self) -> int:
        """Memory of the states of an image token."""
        ...

    def pause(self) -> None:
        """Use no core from now on, until `resume`."""
        ...

    def resume(self) -> None:
        """Go on, if it is paused."""
        ...

    def encode(self, job: EncodeJob) -> None:
        """Queue an image. It is among `take_ended` later, unless it is dropped."""
        ...

    def drop(self, job: EncodeJob) -> None:
        """Remove an image from the queue. If it is already being encoded, it continues to its end."""
        ...

    def take_ended(self) -> list[EncodeJob]:
        """The images that have ended since the last call."""
        ...
