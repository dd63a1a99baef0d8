"""Requests that wait for the states of their images before they are scheduled.

A request needs the states of an image if some of the image's tokens are not in the KV cache. It waits here until it has
all states that it needs, and holds no blocks while it waits. So a cached prefix needs no encoding, and after a
preemption only images whose blocks were lost are encoded again.

    arrived --> waits for room in the store --> waits for its images to be encoded --> scheduled
                 in order of rank                equal images are encoded once

Images are handed to the encoder in the requests' order of rank, few at a time, so that a request of higher rank waits
for little, however many images others have. States stay in the store while a request has to compute with them, and
longer if there is room.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from typing import NamedTuple

import msgspec

from headrace.protos.status import Reason, StatusError
from headrace.worker.engine.forecast import has_waited_too_long
from headrace.worker.engine.mailbox import EngineReport
from headrace.worker.engine.scheduler import Scheduler, rank
from headrace.worker.request.images import PlacedImage
from headrace.worker.request.request import Request, RequestState
from headrace.worker.request.step import RequestOutput
from headrace.worker.vision.job import EncodeJob, Encoder
from headrace.worker.vision.states import StateStore

# The encoder has so many images, or images with so many tokens, of which it may encode several together. A request asks
# for its images when fewer have to be encoded before them.
_MOST_AHEAD, _TOKENS_AHEAD = 4, 256
RETRY_AFTER_S = 2.0
# Image tokens that an encoder which was never timed is taken to encode in a second: those of LLaVA, on one core.
_GUESSED_TOKENS_PER_S = 100.0


@dataclass(slots=True)
class _Held:
    """A request that waits for the states of these images: since `since_s`, and until `bound_s` at most while images of
    other requests are encoded first. `is_asking`: the store has promised the states."""

    images: list[PlacedImage]
    since_s: float
    bound_s: float
    is_asking: bool = False


class _Asked(NamedTuple):
    """An image that the encoder was asked for, and the requests that asked for it. Some of them may not wait any
    more."""

    job: EncodeJob
    requests: list[Request]


class _Unsent(NamedTuple):
    """A job that the encoder does not have yet: the rank of the request that has asked for it, and its turn."""

    rank: tuple[int, bool, float]
    number: int
    job: EncodeJob


class _Use(NamedTuple):
    """The states that one request holds in the store, for all places of one image in its prompt."""

    digest: bytes
    images: list[PlacedImage]

    @property
    def end(self) -> int:
        """The position after the last token that needs them."""
        return max(image.end for image in self.images)


class Encoding:
    """The requests with images of one scheduler: a `Stage`. Used by the engine thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        encoder: Encoder,
        store: StateStore,
        max_wait_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """No request waits longer than `max_wait_s` for others' images."""
        self._scheduler = scheduler
        self._encoder = encoder
        self._store = store
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._held: dict[Request, _Held] = {}
        self._num_of_priority: Counter[int] = Counter()
        """The number of held requests."""
        self._queue: list[Request] = []
        """Those held requests that are not asking yet, in order of rank. Their images are announced to the store."""
        self._bounds: list[tuple[float, int, weakref.ref[Request]]] = []
        """A heap of the held requests that may wait too long, by the end of their wait. They may be held no longer."""
        self._numbers = itertools.count()
        self._jobs: dict[bytes, _Asked] = {}
        """By digest."""
        self._unsent: list[_Unsent] = []
        """Those of them that the encoder does not have yet, in order of rank."""
        self._sent: set[EncodeJob] = set()
        """The others."""
        self._complete: list[Request] = []
        """Requests whose states are all there. They may be held no longer."""
        self._using: dict[Request, list[_Use]] = {}
        """What is held in the store for requests that wait for it, or compute with it."""
        self._computing: dict[Request, None] = {}
        """Those that have been given their states."""
        self._failed: list[RequestOutput] = []

    @property
    def num_held(self) -> int:
        """Requests that wait for states."""
        return len(self._held)

    def num_sharing(self, priority: int) -> int:
        """See `Stage`: the requests that wait while images are encoded."""
        if not self._jobs:
            return 0
        return sum(count for each, count in self._num_of_priority.items() if each >= priority)

    def pause(self) -> None:
        """See `Stage`."""
        self._encoder.pause()

    def resume(self) -> None:
        """See `Stage`."""
        self._encoder.resume()

    @property
    def num_waiting_tokens(self) -> int:
        """Image tokens of held requests that are not encoded yet, equal images counted once."""
        return self._store.num_missing_tokens + sum(asked.job.num_tokens for asked in self._jobs.values())

    def begin(self, request: Request) -> bool:
        """See `Stage`."""
        lacking = _lacking(request, self._scheduler.kv_cache.num_computed_by_now(request)) if request.images else []
        if not lacking or self._take(request, lacking):
            return False
        self._wait(request, lacking)
        return True

    def begin_late(self, request: Request, num_free: int) -> bool:
        """See `Stage`. A request that arrived with cached image tokens may have lost them since."""
        del num_free
        lacking = _lacking(request, request.num_computed_tokens) if request.images else []
        if not lacking or self._take(request, lacking):
            return False
        # It must not hold states while it waits for others, or two requests might wait for each other.
        self._let_go(request)
        lacking = _lacking(request, request.num_computed_tokens)
        self._scheduler.kv_cache.free(request)
        self._scheduler.waiting.remove(request)
        self._wait(request, lacking)
        return True

    def cancel(self, request: Request) -> bool:
        """See `Stage`."""
        is_held = request in self._held
        if is_held:
            self._remove(request)
        self._let_go(request)
        if not is_held:
            return False
        self._scheduler.add(request)
        self._scheduler.cancel(request)
        return True

    def take_ready(self) -> list[Request]:
        """See `Stage`. Also lets go of states that requests have computed with, and asks for others. Looks at no
        request that goes on waiting."""
        for request in list(self._computing):
            self._let_go_computed(request)
        for job in self._encoder.take_ended():
            self._end(job)
        self._give_back_overdue()
        self._ask()
        self._send()
        complete, self._complete = self._complete, []
        ready = [request for request in complete if request in self._held]
        for request in ready:
            self._give(request)
            request.images_ready_s = self._clock()
            request.image_wait_s += request.images_ready_s - self._remove(request).since_s
        return ready

    def take_outputs(self) -> list[RequestOutput]:
        """See `Stage`: the last outputs of requests whose images could not be encoded, or that waited too long."""
        outputs, self._failed = self._failed, []
        return outputs

    def take_news(self) -> bool:
        """See `Stage`."""
        return False

    def wait_s(self, request: Request) -> tuple[float, float]:
        """The expected times in seconds: how long a new request would wait for the images of other requests, and how
        long the encoder would need for its own. Both are 0 while the rate is unknown."""
        rate = self._encoder.rate
        if not request.images or not rate.tokens_per_s:
            return 0.0, 0.0
        lacking = _lacking(request, self._scheduler.kv_cache.num_computed_by_now(request))
        if all(self._is_here(image.digest) for image in lacking):
            return 0.0, 0.0
        own = {image.digest: len(image.places) for image in lacking if image.digest not in self._store}
        return rate.seconds(self.num_waiting_tokens), rate.seconds(sum(own.values()))

    def spared_s(self, request: Request, begin: int, end: int) -> float:
        """How many seconds the encoder saves if the request continues at token `end` instead of token `begin`: the time
        for images that only the earlier tokens need. A guess until the first image was timed."""
        needed = [image for image in request.images if image.end > begin and not self._is_here(image.digest)]
        later = {image.digest for image in needed if image.end > end}
        spared = {image.digest: len(image.places) for image in needed if image.digest not in later}
        return self._encoder.rate.seconds(sum(spared.values()), _GUESSED_TOKENS_PER_S)

    def report(self, report: EngineReport) -> EngineReport:
        """See `Stage`."""
        load = replace(
            report.load,
            num_waiting=report.load.num_waiting + self.num_held,
            num_encoding=self.num_held,
            encoding_tokens=self.num_waiting_tokens,
            image_tokens_per_s=self._encoder.rate.tokens_per_s,
            image_cache_bytes=self._store.num_bytes,
            num_cached_images=len(self._store) - len(self._jobs),
        )
        counters = {
            "images_encoded": self._encoder.num_encoded,
            "images_failed": self._encoder.num_failed,
            "image_cache_hits": self._store.num_hits,
            "image_cache_misses": self._store.num_misses,
            "image_cache_evictions": self._store.num_evictions,
            "image_encoder_restarts": self._encoder.num_restarts,
            "image_encode_us": int(1e6 * self._encoder.encode_s),
        }
        return msgspec.structs.replace(report, load=load, counters={**report.counters, **counters})

    def check(self) -> None:
        """Assert that every state has an owner. For tests."""
        self._store.check()
        uses = [use for uses in self._using.values() for use in uses]
        assert self._store.num_holders == len(uses), "states are held for nobody"
        assert self._unsent == sorted(self._unsent)
        unsent = {unsent.job for unsent in self._unsent}
        assert unsent | self._sent == {asked.job for asked in self._jobs.values()}
        assert not unsent & self._sent
        assert set(self._jobs) <= {use.digest for use in uses}, "an image is encoded for nobody"
        assert all(request.state is RequestState.WAITING and not request.block_table for request in self._held)
        assert self._queue == sorted((one for one, held in self._held.items() if not held.is_asking), key=rank)
        assert self._num_of_priority == Counter(request.priority for request in self._held)
        queued = {image.digest: len(image.places) for request in self._queue for image in self._held[request].images}
        missing = sum(count for digest, count in queued.items() if digest not in self._store)
        assert self._store.num_missing_tokens == missing
        assert self._computing.keys() == self._using.keys() - self._held.keys()
        lacking = {one for one, held in self._held.items() if held.is_asking and not self._has_all(one)}
        assert lacking == {one for asked in self._jobs.values() for one in asked.requests} & self._held.keys()

    def _is_here(self, digest: bytes) -> bool:
        return digest in self._store and self._store.states_of(digest) is not None

    def _take(self, request: Request, images: Sequence[PlacedImage]) -> bool:
        """Give a request the states of all its images, if the store has all of them. Returns whether it does."""
        if not all(self._is_here(image.digest) for image in images) or self._hold(request, images) is None:
            return False
        self._give(request)
        return True

    def _wait(self, request: Request, images: list[PlacedImage]) -> None:
        now_s = self._clock()
        is_patient = request.scheduled_s or request.is_resumed
        bound_s = math.inf if is_patient else now_s + min(self._max_wait_s, request.max_wait_s)
        if bound_s < math.inf:
            heappush(self._bounds, (bound_s, next(self._numbers), weakref.ref(request)))
        self._held[request] = _Held(images, now_s, bound_s)
        self._num_of_priority[request.priority] += 1
        insort(self._queue, request, key=rank)
        for image in images:
            self._store.announce(image.digest, len(image.places))
        self._ask()
        self._send()

    def _remove(self, request: Request) -> _Held:
        """Stop holding a request."""
        held = self._held.pop(request)
        self._num_of_priority -= Counter([request.priority])
        if not held.is_asking:
            first_of_rank = bisect_left(self._queue, rank(request), key=rank)
            self._unqueue(self._queue.index(request, first_of_rank), held)
        return held

    def _unqueue(self, number: int, held: _Held) -> None:
        """Take a request out of the queue, which is held so."""
        del self._queue[number]
        for image in held.images:
            self._store.withdraw(image.digest)

    def _ask(self) -> None:
        """Ask for images, for requests in order of rank, while the store has room for all images of a request and few
        others are encoded before them."""
        while self._queue:
            request = self._queue[0]
            held = self._held[request]
            num_before = len(self._sent) + bisect_left(self._unsent, (rank(request),))
            if num_before >= _MOST_AHEAD and any(image.digest not in self._store for image in held.images):
                return
            new = self._hold(request, held.images)
            if new is None:
                return
            held.is_asking = True
            self._unqueue(0, held)
            for image in new:
                job = EncodeJob(image.digest, image.data, image.detail, len(image.places))
                self._jobs[image.digest] = _Asked(job, [])
                insort(self._unsent, _Unsent(rank(request), next(self._numbers), job))
            lacking = {image.digest for image in held.images if not self._is_here(image.digest)}
            for digest in lacking:
                self._jobs[digest].requests.append(request)
                self._hurry(self._jobs[digest].job, request)
            if not lacking:
                self._complete.append(request)

    def _send(self) -> None:
        """Hand the next images to the encoder, if it has few."""
        num_tokens = sum(job.num_tokens for job in self._sent)
        while self._unsent and (len(self._sent) < _MOST_AHEAD or num_tokens < _TOKENS_AHEAD):
            job = self._unsent.pop(0).job
            num_tokens += job.num_tokens
            self._sent.add(job)
            self._encoder.encode(job)

    def _drop(self, job: EncodeJob) -> None:
        """Have an image no longer encoded that nobody waits for."""
        if job in self._sent:
            self._sent.remove(job)
            self._encoder.drop(job)
        else:
            self._unsent.remove(self._unsent_of(job))

    def _unsent_of(self, job: EncodeJob) -> _Unsent:
        return next(unsent for unsent in self._unsent if unsent.job is job)

    def _hurry(self, job: EncodeJob, request: Request) -> None:
        """Send an image in the turn of this request, if that is earlier."""
        if job not in self._sent and rank(request) < (unsent := self._unsent_of(job)).rank:
            self._unsent.remove(unsent)
            insort(self._unsent, unsent._replace(rank=rank(request)))

    def _hold(self, request: Request, images: Sequence[PlacedImage]) -> list[PlacedImage] | None:
        """Hold the states of images in the store for a request. Returns the images that still have to be encoded, or
        None if the store has no room; then nothing is held."""
        by_digest: dict[bytes, list[PlacedImage]] = {}
        for image in images:
            by_digest.setdefault(image.digest, []).append(image)
        size = self._encoder.bytes_per_token
        new = self._store.hold({digest: len(same[0].places) * size for digest, same in by_digest.items()})
        if new is None:
            return None
        self._using.setdefault(request, []).extend(itertools.starmap(_Use, by_digest.items()))
        return [by_digest[digest][0] for digest in new]

    def _has_all(self, request: Request) -> bool:
        return all(self._is_here(use.digest) for use in self._using[request])

    def _give(self, request: Request) -> None:
        """Give a request the states of all its images, which are in the store."""
        self._computing[request] = None
        for use in self._using[request]:
            for image in use.images:
                image.states = self._store.states_of(use.digest)

    def _end(self, job: EncodeJob) -> None:
        """Handle the end of an encoding. If it failed, the requests that wait for the image end."""
        self._sent.discard(job)
        asked = self._jobs.get(job.digest)
        if job.states is None and (asked is None or asked.job is not job):
            return
        self._jobs.pop(job.digest, None)
        requests = [] if asked is None else [request for request in asked.requests if request in self._held]
        if job.states is None:
            for request in requests:
                self._fail(request, job)
            return
        # Whoever asked for it may be gone, and somebody else may have asked again.
        self._store.put(job.digest, job.states)
        if asked is not None and asked.job is not job:
            self._drop(asked.job)
        self._complete += filter(self._has_all, requests)

    def _fail(self, request: Request, job: EncodeJob) -> None:
        number = next(number for number, image in enumerate(request.images) if image.digest == job.digest)
        self._remove(request)
        self._let_go(request)
        retry_after_s = RETRY_AFTER_S if job.reason is Reason.NO_CAPACITY else None
        error = StatusError(
            job.reason, f"images[{number}]: {job.problem}", field=f"images[{number}]", retry_after_s=retry_after_s
        )
        self._scheduler.add(request)
        self._failed += self._scheduler.fail([request], error)

    def _give_back_overdue(self) -> None:
        """End requests whose images have waited too long for those of others."""
        now_s = self._clock()
        while self._bounds and self._bounds[0][0] <= now_s:
            request = heappop(self._bounds)[2]()
            held = None if request is None else self._held.get(request)
            if request is None or held is None or held.bound_s > now_s:
                continue
            if held.is_asking and all(self._has_begun(image.digest) for image in held.images):
                continue
            self._remove(request)
            self._let_go(request)
            self._scheduler.add(request)
            self._failed.append(self._scheduler.give_back(request, has_waited_too_long(now_s - held.since_s)))

    def _has_begun(self, digest: bytes) -> bool:
        asked = self._jobs.get(digest)
        return asked is None or asked.job.begun_s > 0.0

    def _let_go_computed(self, request: Request) -> None:
        """Let go of the states of images whose tokens a request has computed, and of all if it has ended."""
        if request.state is RequestState.FINISHED:
            self._let_go(request)
            return
        left = []
        for use in self._using[request]:
            if use.end > request.num_computed_tokens:
                left.append(use)
            else:
                self._release(use)
        self._using[request] = left
        if not left:
            self._let_go(request)

    def _let_go(self, request: Request) -> None:
        self._computing.pop(request, None)
        for use in self._using.pop(request, ()):
            self._release(use)

    def _release(self, use: _Use) -> None:
        for image in use.images:
            image.states = None
        if self._store.release(use.digest):
            asked = self._jobs.pop(use.digest, None)
            if asked is not None:
                self._drop(asked.job)


def _lacking(request: Request, num_computed: int) -> list[PlacedImage]:
    """The images of the request that still need states: some of their tokens are not computed, and the states are
    missing."""
    return [image for image in request.images if image.states is None and image.end > num_computed]
