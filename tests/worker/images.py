"""Prompts with images for engines over the fake runner. The states of an image spell its pseudo tokens, so that a token
of an answer depends on each of them, and a wrong state gives a wrong answer."""

from __future__ import annotations

import hashlib
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.common.vision.identity import FIRST_PSEUDO_TOKEN, pseudo_tokens
from headrace.protos.status import Reason
from headrace.worker.request.images import ImageStates, PlacedImage
from headrace.worker.vision.job import EncodeJob, EncodeRate

HIDDEN_SIZE = 2


class Picture(NamedTuple):
    """An image of a prompt: a number that identifies it, and its number of tokens."""

    number: int
    num_tokens: int

    @property
    def data(self) -> bytes:
        return b"picture %d" % self.number

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.data).digest()

    @property
    def token_ids(self) -> array[int]:
        return pseudo_tokens(self.digest, self.num_tokens)


class Prompt(NamedTuple):
    """The tokens of a prompt, and its images."""

    token_ids: list[int]
    images: list[PlacedImage]


def prompt_of(*parts: Sequence[int] | Picture) -> Prompt:
    """A prompt of texts and pictures."""
    tokens: list[int] = []
    images: list[PlacedImage] = []
    for part in parts:
        if isinstance(part, Picture):
            places = np.arange(len(tokens), len(tokens) + part.num_tokens)
            images.append(PlacedImage(part.digest, places, part.data))
            tokens += part.token_ids
        else:
            tokens += part
    return Prompt(tokens, images)


def states_of(digest: bytes, num_tokens: int) -> ImageStates:
    """States that spell the pseudo tokens of an image."""
    tokens = np.frombuffer(pseudo_tokens(digest, num_tokens), np.uint32)
    return ImageStates(np.stack([tokens >> 16, tokens & 0xFFFF], axis=1).astype(np.float32))


def tokens_of_states(states: npt.NDArray[np.float32]) -> npt.NDArray[np.int64]:
    """The pseudo tokens that states `[n, 2]` spell."""
    tokens = states.astype(np.int64) @ np.array([1 << 16, 1])
    assert (tokens >= FIRST_PSEUDO_TOKEN).all(), "no states of an image"
    return tokens


class FakeEncoder:
    """Encodes images when it is told to."""

    def __init__(self) -> None:
        self.rate = EncodeRate()
        self.num_encoded = self.num_failed = self.num_restarts = 0
        self.encode_s = 0.0
        self.queue: deque[EncodeJob] = deque()
        self.seen: list[bytes] = []
        """The digests of all jobs so far."""
        self.is_paused = False
        self._ended: list[EncodeJob] = []

    def pause(self) -> None:
        self.is_paused = True

    def resume(self) -> None:
        self.is_paused = False

    @property
    def bytes_per_token(self) -> int:
        return 4 * HIDDEN_SIZE

    def encode(self, job: EncodeJob) -> None:
        self.seen.append(job.digest)
        self.queue.append(job)

    def drop(self, job: EncodeJob) -> None:
        if job in self.queue:
            self.queue.remove(job)

    def take_ended(self) -> list[EncodeJob]:
        ended, self._ended = self._ended, []
        return ended

    def states(self, job: EncodeJob) -> ImageStates:
        """What an image is encoded to."""
        return states_of(job.digest, job.num_tokens)

    def work(self, count: int = 1 << 30) -> None:
        """Encode the next images."""
        while self.queue and count:
            job = self.queue.popleft()
            job.states = self.states(job)
            self.num_encoded += 1
            self._ended.append(job)
            count -= 1

    def fail(self, problem: str = "is broken", reason: Reason = Reason.INVALID_FIELD) -> None:
        """Let the next image fail."""
        job = self.queue.popleft()
        job.fail(reason, problem)
        self.num_failed += 1
        self._ended.append(job)


def ready(prompt: Prompt, *, is_whole: bool = False) -> Prompt:
    """The prompt with new images that have their states."""
    images = [replace(image, is_whole=is_whole, states=None) for image in prompt.images]
    for image in images:
        image.states = states_of(image.digest, len(image.places))
    return Prompt(prompt.token_ids, images)
