"""The engine of a model that encodes: it queues texts, and begins and ends batches.

    add --> Batcher --> begin_batches --> runner, several batches at a time --> end --> a RequestOutput for each text

Unlike a generating engine it has no steps: a batch begins as soon as the runner has a place. One thread calls it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace.protos.load_report import LoadReport
from headrace.protos.status import Reason, StatusError
from headrace.worker.encoder.batcher import Batcher
from headrace.worker.encoder.pooling import Floats
from headrace.worker.engine.forecast import has_waited_too_long, too_long_a_wait
from headrace.worker.engine.mailbox import EngineReport
from headrace.worker.engine.step_cost import PAUSE
from headrace.worker.request.request import FinishReason, Request, RequestState, StepNote
from headrace.worker.request.step import RequestOutput

if TYPE_CHECKING:
    from headrace.worker.encoder.runner import EncoderRunner

log = logging.getLogger(__name__)

# Half-life of the learned rate, in seconds of work.
_HALF_LIFE_S = 10.0
# If work takes more than this many seconds and more than PAUSE times the predicted time, only that limit counts.
_LEAST_PAUSE_S = 2.0
_NOT_A_NUMBER = StatusError(Reason.INTERNAL, "the model's output for this text is not numbers")
_FAILED = StatusError(Reason.INTERNAL, "the model failed on the texts of this batch; the worker's log has the reason")


class Rate:
    """Texts and tokens per second, learned while there is work. Old observations fade."""

    def __init__(self) -> None:
        self._num_tokens = self._num_texts = self._seconds = 0.0

    def observe(self, num_texts: int, num_tokens: int, seconds: float) -> None:
        """Learn from `num_texts` texts with `num_tokens` tokens that were encoded in `seconds` of work."""
        if self._num_tokens:
            seconds = min(seconds, max(PAUSE * num_tokens / self.tokens_per_s, _LEAST_PAUSE_S))
        keep = 0.5 ** (seconds / _HALF_LIFE_S)
        self._num_tokens = self._num_tokens * keep + num_tokens
        self._num_texts = self._num_texts * keep + num_texts
        self._seconds = self._seconds * keep + seconds

    @property
    def tokens_per_s(self) -> float:
        """Tokens that are encoded in a second; 0 before the first batch."""
        return self._num_tokens / self._seconds if self._seconds else 0.0

    @property
    def texts_per_s(self) -> float:
        """Texts that are encoded in a second; 0 before the first batch."""
        return self._num_texts / self._seconds if self._seconds else 0.0


@dataclass(slots=True)
class EncoderStats:
    """Totals since the start, under the names of the message Counters."""

    requests_admitted: int = 0
    requests_finished: int = 0
    requests_cancelled: int = 0
    requests_failed: int = 0
    prompt_tokens_computed: int = 0
    steps: int = 0
    infer_us: int = 0
    padding_tokens: int = 0


@dataclass(slots=True)
class _Batch:
    requests: Sequence[Request]
    begun_s: float
    cancelled: set[Request] = field(default_factory=set)

    @property
    def num_tokens(self) -> int:
        """Number of tokens without padding."""
        return sum(request.num_tokens for request in self.requests)

    @property
    def size(self) -> int:
        """Number of tokens with padding."""
        return len(self.requests) * max(request.num_tokens for request in self.requests)


class Encoder:
    """Texts in, vectors out. No text waits longer than `max_wait_s` for others."""

    def __init__(
        self,
        runner: EncoderRunner,
        batcher: Batcher,
        max_wait_s: float = math.inf,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rate = Rate()
        self.stats = EncoderStats()
        self.longest_batch_s = 0.0
        """The longest time of a batch in seconds. It fades."""
        self._runner = runner
        self._batcher = batcher
        self._max_wait_s = max_wait_s
        self._clock = clock
        self._free = list(range(runner.num_places))
        self._running: dict[int, _Batch] = {}
        self._observed_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether a text waits or is being encoded."""
        return bool(self._running) or len(self._batcher) > 0

    @property
    def num_waiting(self) -> int:
        """Number of waiting texts."""
        return len(self._batcher)

    def add(self, request: Request) -> RequestOutput | None:
        """Add a text. Returns an output with the refusal if the text would wait too long."""
        error = self._refusal(request)
        if error is not None:
            return _failed(request, error)
        self._batcher.add(request)
        self.stats.requests_admitted += 1
        return None

    def cancel(self, request: Request) -> None:
        """Cancel a text. Does nothing if it has already ended."""
        if self._batcher.remove(request):
            self._end(request)
            self.stats.requests_cancelled += 1
            return
        for batch in self._running.values():
            if request in batch.requests and request.state is not RequestState.FINISHED:
                batch.cancelled.add(request)

    def overdue(self) -> list[RequestOutput]:
        """Fail texts that have waited too long. Returns their outputs."""
        now_s = self._clock()
        late = [
            request
            for request in self._batcher.requests()
            if now_s - request.arrival_s >= min(self._max_wait_s, request.max_wait_s)
        ]
        outputs = []
        for request in late:
            self._batcher.remove(request)
            self._end(request)
            self.stats.requests_failed += 1
            outputs.append(_failed(request, has_waited_too_long(now_s - request.arrival_s)))
        return outputs

    def begin_batches(self) -> None:
        """Begin batches as long as there are texts and places."""
        while self._free and len(self._batcher):
            requests = self._batcher.take(len(self._free))
            now_s = self._clock()
            if not self._running:
                self._observed_s = now_s
            place = self._free.pop()
            self._running[place] = batch = _Batch(requests, now_s)
            for request in requests:
                request.state = RequestState.RUNNING
                request.scheduled_s = now_s
            self.stats.steps += 1
            self.stats.padding_tokens += batch.size - batch.num_tokens
            self._runner.begin(place, requests)

    def end(self, place: int) -> list[RequestOutput]:
        """Take the vectors of the batch that the runner has computed in slot `place`. Returns an output for each of
        its texts that was not cancelled."""
        batch = self._running.pop(place)
        try:
            vectors: Floats | None = self._runner.result(place)
        except RuntimeError:
            log.exception("a batch of %d texts failed", len(batch.requests))
            vectors = None
        self._free.append(place)
        self._observe(batch)
        return list(self._outputs(batch, vectors))

    def report(self, num_taken: int) -> EngineReport:
        """The current load, after `num_taken` requests were received. Texts in the window count as running, because
        routers send texts until it is full."""
        num_running = sum(len(batch.requests) for batch in self._running.values())
        window = max(self._batcher.limits.window - num_running, 0)
        in_window = min(len(self._batcher), window)
        texts_per_s = self.rate.texts_per_s
        load = LoadReport(
            num_running=num_running + in_window,
            num_waiting=len(self._batcher) - in_window,
            num_uncached_tokens=self._batcher.num_tokens + self._tokens_running(),
            prefill_tokens_per_s=self.rate.tokens_per_s,
            decode_step_ms=1000 * self._batcher.limits.window / texts_per_s if texts_per_s else 0.0,
        )
        return EngineReport(
            load=load,
            counters={name: getattr(self.stats, name) for name in EncoderStats.__slots__},
            num_taken=num_taken,
        )

    def check(self) -> None:
        """Assert the invariants. For tests."""
        self._batcher.check()
        assert sorted([*self._free, *self._running]) == list(range(self._runner.num_places))
        assert all(batch.cancelled <= set(batch.requests) for batch in self._running.values())

    def _tokens_running(self) -> int:
        return sum(batch.num_tokens for batch in self._running.values())

    def _refusal(self, request: Request) -> StatusError | None:
        """The error for a text that would wait too long; None if it would not, or if the rate is not known yet."""
        rate = self.rate.tokens_per_s
        if not rate:
            return None
        wait_s = (self._batcher.tokens_ahead(request) + self._tokens_running()) / rate
        left_s = request.deadline_s - self._clock() - request.num_tokens / rate
        bound_s = min(self._max_wait_s, request.max_wait_s, max(left_s, 0.0))
        missed_s = wait_s - bound_s
        if missed_s <= 0 or not wait_s:
            return None
        return too_long_a_wait(wait_s, missed_s)

    def _observe(self, batch: _Batch) -> None:
        now_s = self._clock()
        took_s = now_s - batch.begun_s
        self.longest_batch_s = max(took_s, 0.9 * self.longest_batch_s)
        self.rate.observe(len(batch.requests), batch.num_tokens, now_s - self._observed_s)
        self.stats.infer_us += round(1e6 * (now_s - self._observed_s))
        self._observed_s = now_s
        self.stats.prompt_tokens_computed += batch.num_tokens
        for request in batch.requests:
            if request.steps is not None:
                note = StepNote(batch.begun_s, took_s, request.num_tokens, batch.size, len(batch.requests))
                request.steps.append(note)

    def _outputs(self, batch: _Batch, vectors: Floats | None) -> Iterator[RequestOutput]:
        for i, request in enumerate(batch.requests):
            self._end(request)
            if request in batch.cancelled:
                self.stats.requests_cancelled += 1
                continue
            vector = None if vectors is None else vectors[i]
            # The sum is finite only if all numbers are.
            if vector is None or not math.isfinite(float(vector.sum())):
                self.stats.requests_failed += 1
                yield _failed(request, _FAILED if vector is None else _NOT_A_NUMBER)
                continue
            request.num_computed_tokens = request.num_tokens
            request.first_token_s = request.ended_s
            self.stats.requests_finished += 1
            encoded = vector.astype("<f4", copy=False).tobytes()
            yield RequestOutput(request, 0, (), finish=FinishReason.ENCODED, vector=encoded)

    def _end(self, request: Request) -> None:
        request.state = RequestState.FINISHED
        request.ended_s = self._clock()


def _failed(request: Request, error: StatusError) -> RequestOutput:
    return RequestOutput(request, 0, (), error=error)
