"""An image to be encoded, what came of it, and who encodes it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from headrace.protos.status import Reason
from headrace.worker.request.images import ImageStates
from headrace.worker.vision.cost import EncodeRate


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

    def encode(self, job: EncodeJob) -> None:
        """Queue an image. It is among `take_ended` later, unless it is dropped."""
        ...

    def drop(self, job: EncodeJob) -> None:
        """Forget a queued image. One that is being encoded goes on, and ends."""
        ...

    def take_ended(self) -> list[EncodeJob]:
        """The images that have ended since the last call."""
        ...
