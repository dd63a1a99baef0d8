"""Images in simulated requests, and the processes that encode them, in virtual time.

The real `Encoding` decides which images are encoded, when, and for whom, and keeps their states in a real `StateStore`.
Only the encoder is simulated: beside the engine of each worker (`BesideEngine`), on hosts that do nothing else
(`OnHosts`), or wherever an image is expected to be done first (`WhereFirst`). Beside the engine, it has all cores while
the engine waits, and a quarter of its share of them while steps are computed, which then take longer:

    encoder     |--- image ---|------ image, more slowly ------|--- image ---|
    engine                    |-- step --|-- step --|-- step --|

Pure: the caller passes the time.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np

from headrace.worker.request.images import ImageStates, PlacedImage
from headrace.worker.vision.job import EncodeJob, EncodeRate

# Ids of image tokens begin here, one for each picture. Ids of texts and of answers are smaller.
IMAGE_TOKENS = 3 << 30
# Where engine and encoder compete for a core, the encoder's nice value of 5 gives it about a quarter. Where they take
# turns, it gets about as much beside many streams.
ENCODER_SHARE = 0.25


class Family(NamedTuple):
    """Image tokens of a photo of 4000 x 3000 pixels, and core-seconds to encode it, as docs/how-to/sizing.md has them.
    `hidden_size` is that of the states."""

    num_tokens: int
    core_s: float
    hidden_size: int


FAMILIES = {
    "llava": Family(576, 5.0, 4096),
    "llava-next": Family(2340, 26.0, 4096),
    "gemma3": Family(256, 78.0, 2560),
    "qwen2-vl": Family(1230, 145.0, 3584),
    "qwen2-vl:low": Family(234, 19.0, 3584),
    "qwen2.5-vl": Family(1230, 96.0, 3584),
    "qwen3-vl": Family(972, 55.0, 2560),
    "qwen3-vl:low": Family(234, 9.0, 2560),
    "smolvlm": Family(832, 39.0, 960),
    "smolvlm:low": Family(64, 3.0, 960),
    "mistral3": Family(1302, 98.0, 5120),
    "pixtral": Family(3072, 49.0, 5120),
}


@dataclass(frozen=True, slots=True)
class ImageSettings:
    """How workers encode images. `cores` are those of each worker, which steps and encoder share, and of each host that
    only encodes. States take `hidden_size` floats for each token, and `cache_bytes` of them are kept."""

    family: Family
    cores: int = 2
    cache_bytes: int = 1 << 30
    num_hosts: int = 0
    """Hosts that only encode; 0: each worker encodes beside its engine."""
    bytes_per_s: float = 1.25e9
    """Speed at which states travel from such a host to a worker."""
    workers_encode: bool = False
    """Whether workers encode an image themselves if the hosts would have it done later."""

    @property
    def bytes_per_token(self) -> int:
        """Memory of the states of an image token."""
        return 4 * self.family.hidden_size

    def core_s(self, num_tokens: int) -> float:
        """Core-seconds to encode an image of so many tokens."""
        return self.family.core_s * num_tokens / self.family.num_tokens

    def states(self, num_tokens: int) -> ImageStates:
        """States of the right size. They take no memory here."""
        return ImageStates(np.broadcast_to(np.float32(0.0), (num_tokens, self.family.hidden_size)))


def placed_images(segments: Sequence[tuple[int, int]]) -> list[PlacedImage]:
    """The images of a prompt of these segments."""
    found, place = [], 0
    for token_id, length in segments:
        if token_id >= IMAGE_TOKENS:
            digest = token_id.to_bytes(4, "little")
            found.append(PlacedImage(digest, np.arange(place, place + length, dtype=np.int64), b""))
        place += length
    return found


class Events(NamedTuple):
    """The clock and the events that encoders need: `at` calls back at a time, and `on_ended` tells the worker that an
    image is encoded."""

    clock: Callable[[], float]
    at: Callable[[float, Callable[[], None]], None]
    on_ended: Callable[[], None]


class _Encoder:
    """The common part of all simulated encoders."""

    def __init__(self, settings: ImageSettings, events: Events) -> None:
        self.rate = EncodeRate()
        self.num_encoded = self.num_failed = self.num_restarts = 0
        self.encode_s = 0.0
        self._settings = settings
        self._events = events
        self._ended: list[EncodeJob] = []

    @property
    def bytes_per_token(self) -> int:
        """See `worker.vision.job.Encoder`."""
        return self._settings.bytes_per_token

    def take_ended(self) -> list[EncodeJob]:
        """See `worker.vision.job.Encoder`."""
        ended, self._ended = self._ended, []
        return ended

    def _end(self, job: EncodeJob, seconds: float) -> None:
        job.seconds = seconds
        job.states = self._settings.states(job.num_tokens)
        self.num_encoded += 1
        self.encode_s += seconds
        self.rate.observe(job.num_tokens, seconds)
        self._ended.append(job)
        self._events.on_ended()


class BesideEngine(_Encoder):
    """A worker's own encoder: one image after the other, on the worker's cores."""

    def __init__(self, settings: ImageSettings, events: Events) -> None:
        super().__init__(settings, events)
        self._queue: deque[EncodeJob] = deque()
        self._left_core_s = 0.0
        self._progress_s = 0.0
        self._is_engine_busy = self._is_paused = False
        self._number = 0

    @property
    def shares_cores(self) -> bool:
        """Whether images that the worker waits for are encoded on its cores."""
        return True

    @property
    def step_factor(self) -> float:
        """How many times as long a step takes that begins now: unless it is paused, the encoder takes its share of the
        cores."""
        return 1.0 / (1.0 - ENCODER_SHARE) if self._queue and not self._is_paused else 1.0

    def engine_is(self, *, busy: bool) -> None:
        """Record whether the engine computes steps."""
        self._become(is_engine_busy=busy, is_paused=self._is_paused)

    def pause(self) -> None:
        """See `worker.vision.job.Encoder`."""
        self._become(is_engine_busy=self._is_engine_busy, is_paused=True)

    def resume(self) -> None:
        """See `worker.vision.job.Encoder`."""
        self._become(is_engine_busy=self._is_engine_busy, is_paused=False)

    def encode(self, job: EncodeJob) -> None:
        """See `worker.vision.job.Encoder`."""
        self._queue.append(job)
        if len(self._queue) == 1:
            self._begin()

    def drop(self, job: EncodeJob) -> None:
        """See `worker.vision.job.Encoder`."""
        if job in self._queue and job is not self._queue[0]:
            self._queue.remove(job)

    def expected_s(self, job: EncodeJob) -> float:
        """The time in seconds at which an image that arrives now would be encoded, if the engine's load does not
        change."""
        left = self._left_core_s - (self._events.clock() - self._progress_s) * self._cores if self._queue else 0.0
        others = sum(self._settings.core_s(other.num_tokens) for other in list(self._queue)[1:])
        cores = self._cores or ENCODER_SHARE * self._settings.cores
        return self._events.clock() + (max(left, 0.0) + others + self._settings.core_s(job.num_tokens)) / cores

    @property
    def _cores(self) -> float:
        if self._is_paused:
            return 0.0
        return self._settings.cores * (ENCODER_SHARE if self._is_engine_busy else 1.0)

    def _become(self, *, is_engine_busy: bool, is_paused: bool) -> None:
        """Change what the engine and the encoder do from now on."""
        if (is_engine_busy, is_paused) != (self._is_engine_busy, self._is_paused):
            self._progress()
            self._is_engine_busy, self._is_paused = is_engine_busy, is_paused
            self._expect()

    def _begin(self) -> None:
        job = self._queue[0]
        job.begun_s = self._progress_s = self._events.clock()
        self._left_core_s = self._settings.core_s(job.num_tokens)
        self._expect()

    def _progress(self) -> None:
        """Account for the time since the last change."""
        now_s = self._events.clock()
        self._left_core_s -= (now_s - self._progress_s) * self._cores
        self._progress_s = now_s

    def _expect(self) -> None:
        """Schedule the end of the current image as it is expected now."""
        self._number += 1
        if self._queue and self._cores:
            number, left_s = self._number, max(self._left_core_s, 0.0) / self._cores
            self._events.at(self._events.clock() + left_s, lambda: self._finish(number))

    def _finish(self, number: int) -> None:
        if number != self._number:
            return  # the engine has begun or ended meanwhile
        job = self._queue.popleft()
        if self._queue:
            self._begin()
        self._end(job, self._events.clock() - job.begun_s)


class EncodeHosts:
    """Hosts that only encode. An image goes to the host that has it, or to the one that has it done first."""

    def __init__(self, settings: ImageSettings) -> None:
        self._settings = settings
        self._free_s = [0.0] * settings.num_hosts
        self._kept: list[OrderedDict[bytes, tuple[float, int]]] = [OrderedDict() for _ in range(settings.num_hosts)]
        """For each host, when the states of each image are done, and their bytes."""
        self._num_bytes = [0] * settings.num_hosts
        self.busy_s = 0.0
        """Seconds of all hosts together."""

    def expected_s(self, job: EncodeJob, now_s: float) -> float:
        """The time at which the states of an image would arrive at the worker."""
        size = job.num_tokens * self._settings.bytes_per_token
        ready = [kept[job.digest][0] for kept in self._kept if job.digest in kept]
        encoded_s = min(self._free_s) if not ready else 0.0
        seconds = 0.0 if ready else self._settings.core_s(job.num_tokens) / self._settings.cores
        return max(*ready, encoded_s, now_s) + seconds + size / self._settings.bytes_per_s

    def done_s(self, job: EncodeJob, now_s: float) -> float:
        """Have an image encoded. Returns when its states are at the worker."""
        size = job.num_tokens * self._settings.bytes_per_token
        travel_s = size / self._settings.bytes_per_s
        for kept in self._kept:
            if job.digest in kept:
                kept.move_to_end(job.digest)
                return max(kept[job.digest][0], now_s) + travel_s
        host = min(range(len(self._free_s)), key=self._free_s.__getitem__)
        seconds = self._settings.core_s(job.num_tokens) / self._settings.cores
        self.busy_s += seconds
        self._free_s[host] = max(self._free_s[host], now_s) + seconds
        kept = self._kept[host]
        kept[job.digest] = (self._free_s[host], size)
        self._num_bytes[host] += size
        while self._num_bytes[host] > self._settings.cache_bytes and len(kept) > 1:
            self._num_bytes[host] -= kept.popitem(last=False)[1][1]
        return self._free_s[host] + travel_s


class OnHosts(_Encoder):
    """A worker whose images are encoded on other hosts."""

    shares_cores = False
    step_factor = 1.0

    def __init__(self, settings: ImageSettings, events: Events, hosts: EncodeHosts) -> None:
        super().__init__(settings, events)
        self._hosts = hosts

    def engine_is(self, *, busy: bool) -> None:
        """Do nothing: the engine's steps take no time from the hosts."""

    def pause(self) -> None:
        """See `worker.vision.job.Encoder`: hosts go on."""

    def resume(self) -> None:
        """See `worker.vision.job.Encoder`."""

    def encode(self, job: EncodeJob) -> None:
        """See `worker.vision.job.Encoder`."""
        job.begun_s = self._events.clock()
        done_s = self._hosts.done_s(job, job.begun_s)
        self._events.at(done_s, lambda: self._end(job, done_s - job.begun_s))

    def drop(self, job: EncodeJob) -> None:
        """See `worker.vision.job.Encoder`. Hosts encode what they have begun."""


class WhereFirst(BesideEngine):
    """A worker that gives its images to hosts, but encodes itself what it would have done first."""

    def __init__(self, settings: ImageSettings, events: Events, hosts: EncodeHosts) -> None:
        super().__init__(settings, events)
        self._hosts = hosts

    @property
    def shares_cores(self) -> bool:
        """Whether it encodes an image itself now."""
        return bool(self._queue)

    def encode(self, job: EncodeJob) -> None:
        """See `worker.vision.job.Encoder`."""
        now_s = self._events.clock()
        if self.expected_s(job) < self._hosts.expected_s(job, now_s):
            super().encode(job)
            return
        job.begun_s = now_s
        done_s = self._hosts.done_s(job, now_s)
        self._events.at(done_s, lambda: self._end(job, done_s - now_s))


Encoder: TypeAlias = BesideEngine | OnHosts


def encoder_of(settings: ImageSettings, events: Events, hosts: EncodeHosts | None) -> Encoder:
    """A worker's encoder: on `hosts`, if there are any."""
    if hosts is None:
        return BesideEngine(settings, events)
    return WhereFirst(settings, events, hosts) if settings.workers_encode else OnHosts(settings, events, hosts)
