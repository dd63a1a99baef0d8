"""The worker's side of the process that encodes images: a queue, and a thread that starts the process and feeds it.

    engine thread   encode, drop   -->  [ queue ]  -->  thread  <-- frames -->  process (child.py)
    engine thread   take_ended     <--  [ ended ]  <--
    engine thread   pause, resume  -->  signals    ----------------------->  process

An image that ends the process is tried once more, alone, because somebody else may have ended it. If it ends it again,
the image fails, and the others continue in a new process. So does an image at which the process hangs, without a second
try, which would take as long. For a while such an image is refused at once: chats send their images again in each turn.
"""

from __future__ import annotations

import logging
import math
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import msgspec

from headrace.common.launch import with_parent
from headrace.protos.status import Reason
from headrace.worker.config import ConfigurationError
from headrace.worker.request.images import ImageStates
from headrace.worker.vision.encoder import NOT_ENCODED, Setting, UnsupportedModelError
from headrace.worker.vision.frames import (
    BrokenFrameError,
    Encode,
    Encoded,
    Opened,
    Result,
    Wanted,
    receive,
    receive_floats,
    send,
)
from headrace.worker.vision.job import EncodeJob, EncodeRate

log = logging.getLogger(__name__)

CHILD = "headrace.worker.vision.child"
# Small images are encoded together: up to so many tokens and images. Larger ones keep all threads busy alone.
_BATCH_TOKENS, _BATCH_IMAGES = 256, 16
# A process that takes so many times as long as expected, and longer than the configured limit, hangs. Expectations may
# be wrong, so at most so many times the limit.
_PATIENCE, _MOST_LIMITS = 20.0, 10.0
# Reading and compiling a tower takes at most this long.
_OPEN_S = 600.0
# Wait before a process is started again that could not be started.
_RETRY_S = 2.0
# How long an image that has ended the process is refused, and how many of them are remembered.
_REFUSED_S, _MOST_REFUSED = 600.0, 1000
_STOP_S = 2.0

ENDED_TWICE = (
    "the image ended the process that reads images twice; save it again in another format, make it smaller, or ask for "
    "a lower detail"
)
HANGS = (
    "the image was given up, because it took far longer to encode than others; the worker's log has more. Make it "
    "smaller, or ask for a lower detail"
)
NOT_STARTED = (
    "the image cannot be encoded now, because the worker's process that encodes images does not start; try again later"
)


class _Refused(NamedTuple):
    """An image that has ended the process: until when it is refused, and why."""

    until_s: float
    reason: Reason
    problem: str


class EncoderProcess:
    """Encodes images in another process. `on_ended` is called by its thread when jobs have ended."""

    def __init__(
        self,
        setting: Setting,
        on_ended: Callable[[], None],
        *,
        stuck_after_s: float = 60.0,
        module: str = CHILD,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the process. UnsupportedModelError if the model's images cannot be encoded; ConfigurationError if the
        process cannot be started."""
        self.rate = EncodeRate()
        self.num_encoded = self.num_failed = self.num_restarts = 0
        self.encode_s = 0.0
        """Seconds that encoding took in all."""
        self._setting, self._module = setting, module
        self._on_ended, self._stuck_after_s, self._clock = on_ended, stuck_after_s, clock
        self._process: subprocess.Popen[bytes] | None = None
        self._ending = threading.Lock()
        """Held to send a signal, and to give up the process: its pid is free once it was waited for."""
        self._paused: subprocess.Popen[bytes] | None = None
        self._link: socket.socket | None = None
        self._changed = threading.Condition()
        self._queue: deque[EncodeJob] = deque()
        self._ended: deque[EncodeJob] = deque()
        self._refused: dict[bytes, _Refused] = {}
        """By digest."""
        self._is_closed = False
        opened: Future[None] = Future()
        self._thread = threading.Thread(target=self._run, args=[opened], name="images", daemon=True)
        self._thread.start()
        try:
            opened.result()
        except OSError as error:
            raise ConfigurationError(
                "the process that encodes images did not start; the log has the reason. Is there enough memory for the "
                "model's vision tower?"
            ) from error

    @property
    def pid(self) -> int:
        """Id of the process; 0 while it is being started again."""
        process = self._process
        return 0 if process is None else process.pid

    @property
    def bytes_per_token(self) -> int:
        """Memory of the states of an image token."""
        return 4 * self._setting.hidden_size * (1 + self._setting.num_layers)

    def encode(self, job: EncodeJob) -> None:
        """Queue an image. It is among `take_ended` later, unless it is dropped."""
        with self._changed:
            refused = self._refused.get(job.digest)
            if refused is None or refused.until_s <= self._clock():
                self._queue.append(job)
                self._changed.notify()
                return
        job.fail(refused.reason, refused.problem)
        self._end([job])

    def drop(self, job: EncodeJob) -> None:
        """Remove an image from the queue. If it is already being encoded, it continues to its end."""
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)

    def take_ended(self) -> list[EncodeJob]:
        """The images that have ended since the last call."""
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def pause(self) -> None:
        """Stop the process, wherever it is, until `resume`, so that it uses no core. A process that is started
        meanwhile runs."""
        with self._ending:
            if self._process is not None:
                self._process.send_signal(signal.SIGSTOP)
                self._paused = self._process

    def resume(self) -> None:
        """Let the process continue, if it is paused."""
        with self._ending:
            paused, self._paused = self._paused, None
            if paused is not None and paused is self._process:
                paused.send_signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process and the thread. Queued images are forgotten."""
        with self._changed:
            self._is_closed = True
            self._queue.clear()
            self._changed.notify()
        link = self._link
        if link is not None:
            try:
                link.shutdown(socket.SHUT_RDWR)  # the process ends, and the thread reads no more
            except OSError:
                log.debug("the process that encodes images has ended already")
        self._thread.join(_STOP_S)
        self._end_process()

    def _run(self, opened: Future[None]) -> None:
        """Start the process, and feed it. The process would end with the thread that starts it."""
        try:
            self._open(warms_up=True)
        except BaseException as error:
            self._end_process()
            opened.set_exception(error)
            return
        opened.set_result(None)
        while (batch := self._next_batch()) is not None:
            for job in batch:
                job.begun_s = job.begun_s or self._clock()
            self._encode(batch)
            self._end(batch)

    def _next_batch(self) -> list[EncodeJob] | None:
        """Wait for images, and return those to encode together. An image whose encoding has failed before is alone.
        None means stop."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            if self._is_closed:
                return None
            batch = [self._queue.popleft()]
            num_tokens = batch[0].num_tokens
            while self._queue and not batch[0].num_tries and len(batch) < _BATCH_IMAGES:
                num_tokens += self._queue[0].num_tokens
                if num_tokens > _BATCH_TOKENS or self._queue[0].num_tries:
                    break
                batch.append(self._queue.popleft())
            return batch

    def _encode(self, batch: list[EncodeJob]) -> None:
        """Have the process encode a batch. Images that are to be tried again leave the batch for the queue."""
        try:
            if self._link is None:
                self._open(warms_up=False)  # an image waits
        except (OSError, UnsupportedModelError):
            log.exception("the process that encodes images could not be started")
            self._end_process()
            for job in batch:
                job.fail(Reason.NO_CAPACITY, NOT_STARTED)
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed, _RETRY_S)
            return
        try:
            self._ask(batch)
        except TimeoutError:
            num_tokens = sum(job.num_tokens for job in batch)
            log.error(
                "the process %d for images hangs: %d images of %d tokens took over %.0f s; it is started again",
                self.pid,
                len(batch),
                num_tokens,
                self._limit_s(num_tokens),
            )
            self._restart()
            # The image may be at fault, or this host: the caller gets what other faults inside give, without a time to
            # try again.
            self._try_again(batch, Reason.INTERNAL, HANGS)
        except OSError as error:
            if not self._is_closed:
                log.error("the process %d for images has ended (%s); it is started again", self.pid, error)
                self._restart()
            self._try_again(batch, Reason.INVALID_FIELD, ENDED_TWICE)
        except Exception:  # without this thread, no image would be encoded any more
            log.exception("the states of %d images could not be taken", len(batch))
            self._restart()
            for job in batch:
                if job.states is None:
                    job.fail(Reason.INTERNAL, NOT_ENCODED)

    def _try_again(self, batch: list[EncodeJob], reason: Reason, problem: str) -> None:
        """After a failure: queue images again, each alone, before all others. An image fails for good if it hung while
        it was alone, or if this was its second try."""
        is_last = len(batch) == 1 and (reason is Reason.INTERNAL or batch[0].num_tries > 0)
        for job in batch:
            job.num_tries += 1
        if is_last:
            batch[0].fail(reason, problem)
            with self._changed:
                if len(self._refused) >= _MOST_REFUSED:
                    del self._refused[next(iter(self._refused))]
                self._refused[batch[0].digest] = _Refused(self._clock() + _REFUSED_S, reason, problem)
            return
        with self._changed:
            if not self._is_closed:
                self._queue.extendleft(reversed(batch))
        batch.clear()

    def _ask(self, batch: Sequence[EncodeJob]) -> None:
        link = self._link
        assert link is not None
        num_tokens = sum(job.num_tokens for job in batch)
        link.settimeout(self._limit_s(num_tokens))
        send(link, Encode([Wanted(job.detail, len(job.data)) for job in batch]), [job.data for job in batch])
        answer = receive(link, Encoded)
        if len(answer.results) != len(batch):
            raise BrokenFrameError("it answered for other images")
        if not 0.0 <= answer.seconds < math.inf:
            raise BrokenFrameError("it took no time that there is")
        if all(not result.problem for result in answer.results):
            self.rate.observe(num_tokens, answer.seconds)
        self.encode_s += answer.seconds
        for job, result in zip(batch, answer.results, strict=True):
            job.seconds = answer.seconds * job.num_tokens / max(1, num_tokens)
            self._take(job, result, link)

    def _take(self, job: EncodeJob, result: Result, link: socket.socket) -> None:
        if result.problem:
            job.fail(Reason.INVALID_FIELD if result.is_invalid else Reason.INTERNAL, result.problem)
            return
        if result.num_tokens != job.num_tokens:
            raise BrokenFrameError(f"it made {result.num_tokens} states of an image with {job.num_tokens} tokens")
        size, layers = self._setting.hidden_size, self._setting.num_layers
        states = receive_floats(link, (job.num_tokens, size))
        deepstack = receive_floats(link, (layers, job.num_tokens, size)) if layers else None
        job.states = ImageStates(states, deepstack)

    def _limit_s(self, num_tokens: int) -> float:
        """The timeout of an answer for images with `num_tokens` tokens, in seconds."""
        if not self.rate.tokens_per_s:
            return _MOST_LIMITS * self._stuck_after_s
        expected_s = _PATIENCE * num_tokens / self.rate.tokens_per_s
        return min(max(self._stuck_after_s, expected_s), _MOST_LIMITS * self._stuck_after_s)

    def _end(self, batch: Sequence[EncodeJob]) -> None:
        if not batch:
            return
        failed = sum(not job.states for job in batch)
        with self._changed:
            self.num_failed += failed
            self.num_encoded += len(batch) - failed
        self._ended.extend(batch)
        if not self._is_closed:
            self._on_ended()

    def _open(self, *, warms_up: bool) -> None:
        """Start the process, and wait until it is ready. OSError; UnsupportedModelError."""
        ours, theirs = socket.socketpair()
        self._link = ours
        with theirs:
            command = [sys.executable, "-m", self._module, str(theirs.fileno())]
            # A process that is paused cannot notice that its worker has ended.
            self._process = subprocess.Popen(with_parent(command), pass_fds=[theirs.fileno()])
        ours.settimeout(_OPEN_S)
        send(ours, msgspec.structs.replace(self._setting, warms_up=warms_up))
        problem = receive(ours, Opened).problem
        if problem:
            raise UnsupportedModelError(problem)

    def _restart(self) -> None:
        self._end_process()
        self.num_restarts += 1

    def _end_process(self) -> None:
        link, self._link = self._link, None
        with self._ending:
            process, self._process = self._process, None
        if link is not None:
            link.close()
        if process is not None:
            process.kill()
            process.wait()
