"""The engine of an encoder in virtual time: each text has exactly one end, whatever happens."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

import numpy as np
import pytest

from headrace.protos.status import Reason
from headrace.worker.encoder.batcher import Batcher, BatchLimits
from headrace.worker.encoder.encoder import Encoder, Rate
from headrace.worker.encoder.pooling import Floats
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import FinishReason, Request
from headrace.worker.request.step import RequestOutput

FAILS, NOT_A_NUMBER = 13, 14
MS_PER_TOKEN = 0.05


class VirtualRunner:
    """A batch takes as long as its tokens with padding. One with the token `FAILS` fails."""

    num_places = 3

    def __init__(self) -> None:
        self.now_s = 0.0
        self.batches: dict[int, Sequence[Request]] = {}
        self._ends: list[tuple[float, int]] = []

    def begin(self, place: int, batch: Sequence[Request]) -> None:
        assert place not in self.batches, "the place is taken"
        self.batches[place] = batch
        size = len(batch) * max(request.num_tokens for request in batch)
        heapq.heappush(self._ends, (self.now_s + size * MS_PER_TOKEN / 1000, place))

    def result(self, place: int) -> Floats:
        batch = self.batches.pop(place)
        if any(FAILS in request.token_ids for request in batch):
            raise RuntimeError("kernels failed")
        vectors = np.array([[request.num_tokens, request.token_ids[0]] for request in batch], np.float32)
        vectors[[NOT_A_NUMBER in request.token_ids for request in batch]] = np.nan
        return vectors

    def next_end(self) -> int | None:
        """The place whose batch ends next; it is that time then."""
        if not self._ends:
            return None
        self.now_s, place = heapq.heappop(self._ends)
        return place

    @property
    def next_end_s(self) -> float:
        return self._ends[0][0] if self._ends else float("inf")


class UnderTest:
    """An encoder and what its texts got."""

    def __init__(self, max_wait_s: float = float("inf"), **limits: int) -> None:
        self.runner = VirtualRunner()
        self.encoder = Encoder(self.runner, Batcher(BatchLimits(**limits)), max_wait_s, lambda: self.runner.now_s)
        self.outputs: dict[Request, RequestOutput] = {}
        self.requests: list[Request] = []

    def add(self, token_ids: list[int], **fields: object) -> Request:
        sampling = SamplingParams(max_tokens=0, seed=0)
        request = Request("r", token_ids, sampling, 0, arrival_s=self.runner.now_s, **fields)  # type: ignore[arg-type]
        self.requests.append(request)
        refused = self.encoder.add(request)
        self.take([] if refused is None else [refused])
        return request

    def take(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            assert output.request not in self.outputs, "two ends"
            assert output.is_last
            self.outputs[output.request] = output

    def step(self) -> bool:
        self.encoder.begin_batches()
        self.encoder.check()
        place = self.runner.next_end()
        if place is not None:
            self.take(self.encoder.end(place))
            self.encoder.check()
        return place is not None

    def run(self) -> None:
        while self.step():
            pass
        assert not self.encoder.has_work


def values_of(output: RequestOutput) -> list[float]:
    return np.frombuffer(output.vector, "<f4").tolist()


def test_each_text_gets_its_own_vector() -> None:
    under_test = UnderTest()
    requests = [under_test.add([20 + n] * (1 + n % 7)) for n in range(50)]
    under_test.run()
    for n, request in enumerate(requests):
        output = under_test.outputs[request]
        assert output.finish is FinishReason.ENCODED
        assert values_of(output) == [1 + n % 7, 20 + n]
    assert under_test.encoder.stats.requests_finished == 50
    assert under_test.encoder.stats.prompt_tokens_computed == sum(r.num_tokens for r in requests)


@pytest.mark.parametrize("seed", range(20))
def test_under_random_loads_each_text_has_exactly_one_end(seed: int) -> None:
    rng = random.Random(seed)
    under_test = UnderTest(max_wait_s=rng.choice([0.02, 0.3, float("inf")]), window=rng.choice([4, 128]))
    cancelled: set[Request] = set()
    at_s = 0.0
    for _ in range(600):
        at_s += rng.expovariate(200 * rng.choice([0.2, 1, 5]))
        while under_test.runner.next_end_s <= at_s:
            under_test.step()
        under_test.runner.now_s = at_s
        token = rng.choice([FAILS, NOT_A_NUMBER, *[20] * 40])
        options = {"tenant": rng.choice("abc"), "priority": rng.choice([0, 0, 0, 5])}
        under_test.add([20] * rng.randint(0, 199) + [token], **options)
        under_test.take(under_test.encoder.overdue())
        if rng.random() < 0.2:
            one = rng.choice(under_test.requests)
            if one not in under_test.outputs and one not in cancelled:
                under_test.encoder.cancel(one)
                cancelled.add(one)
        under_test.encoder.begin_batches()
    under_test.run()
    for request in under_test.requests:
        assert (request in under_test.outputs) != (request in cancelled)
    stats = under_test.encoder.stats
    ended = stats.requests_finished + stats.requests_failed + stats.requests_cancelled
    assert ended == stats.requests_admitted
    assert stats.requests_cancelled == len(cancelled)


def test_a_batch_that_fails_ends_its_texts_and_no_others() -> None:
    under_test = UnderTest()
    bad, neighbour, other = under_test.add([FAILS] * 9), under_test.add([20] * 9), under_test.add([20] * 200)
    under_test.run()
    for request in (bad, neighbour):
        error = under_test.outputs[request].error
        assert error is not None
        assert error.reason is Reason.INTERNAL
    assert under_test.outputs[other].finish is FinishReason.ENCODED


def test_a_vector_that_is_not_numbers_ends_its_text_alone() -> None:
    under_test = UnderTest()
    bad, neighbour = under_test.add([NOT_A_NUMBER] * 9), under_test.add([20] * 9)
    under_test.run()
    assert under_test.outputs[bad].error is not None
    assert values_of(under_test.outputs[neighbour]) == [9, 20]


def test_a_text_that_would_wait_too_long_is_refused_at_once_with_a_time() -> None:
    under_test = UnderTest(max_wait_s=1.0, max_tokens=256)
    under_test.add([20] * 200)
    under_test.run()
    while (last := under_test.add([20] * 200)) not in under_test.outputs:
        under_test.encoder.begin_batches()
    error = under_test.outputs[last].error
    assert error is not None
    assert error.reason is Reason.QUEUE_FULL
    assert error.retry_after_s is not None
    assert 80 < len(under_test.requests) < 140, "a second is about a hundred texts of 200 tokens"
    under_test.run()
    late = max(request.scheduled_s - request.arrival_s for request in under_test.requests if request.scheduled_s)
    assert late < 1.3


def test_a_text_that_waited_too_long_ends_even_if_that_was_not_foreseen() -> None:
    under_test = UnderTest(max_wait_s=1.0)
    under_test.add([20] * 100)
    under_test.runner.now_s = 1.5
    (output,) = under_test.encoder.overdue()
    assert output.error is not None
    assert output.error.reason is Reason.QUEUE_FULL
    assert not under_test.encoder.has_work


def test_the_report_shows_the_window_as_running_and_the_rest_as_waiting() -> None:
    under_test = UnderTest(window=10)
    for _ in range(25):
        under_test.add([20] * 400)
    under_test.encoder.begin_batches()
    report = under_test.encoder.report(num_taken=25)
    assert (report.load.num_running, report.load.num_waiting, report.num_taken) == (10, 15, 25)
    assert report.load.num_uncached_tokens == 25 * 400
    assert report.load.prefill_tokens_per_s == 0
    under_test.run()
    report = under_test.encoder.report(25)
    assert report.load.prefill_tokens_per_s == pytest.approx(3 * 1000 / MS_PER_TOKEN, rel=0.2)
    assert report.load.num_running == report.load.num_waiting == report.load.num_uncached_tokens == 0


def test_a_process_that_was_stopped_for_an_hour_is_soon_as_fast_as_before() -> None:
    rate = Rate()
    for _ in range(1000):
        rate.observe(8, 1000, 0.05)
    rate.observe(8, 1000, 3600.0)
    for _ in range(200):
        rate.observe(8, 1000, 0.05)
    assert rate.tokens_per_s == pytest.approx(20_000, rel=0.15)
