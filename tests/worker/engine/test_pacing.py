"""Steps and the encoder of images take turns: how long a pause is, for whom, what ends it, and who runs meanwhile."""

from __future__ import annotations

import pytest

from headrace.worker.engine.encoding import Encoding
from headrace.worker.engine.pacing import Pacing
from headrace.worker.engine.stages import Stages
from headrace.worker.engine.step_budget import LEAST_IMAGE_SHARE, STREAMS_PER_IMAGE
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request
from headrace.worker.vision.states import StateStore
from tests.worker.conftest import make_engine
from tests.worker.images import FakeEncoder, Picture, Prompt, prompt_of

STEP_S = 0.01


class Setup:
    """An engine whose steps take `step_s`, with streams and waiting images."""

    def __init__(self, step_s: float = STEP_S, target_step_ms: float | None = None) -> None:
        self.now_s = 100.0
        self.step_s = step_s
        self.under_test = make_engine(num_blocks=256, max_num_seqs=40, max_num_batched_tokens=64)
        self.scheduler = self.under_test.scheduler
        self.scheduler.target_step_ms = target_step_ms
        self.encoder = FakeEncoder()
        self.encoding = Encoding(self.scheduler, self.encoder, StateStore(1 << 20), 60.0, self.clock)
        self.pacing = Pacing(self.scheduler, Stages([self.encoding]), self.clock)
        self.num_requests = 0
        self.was_beside = False
        """Whether the encoder ran beside the last step."""
        self.share = 1.0
        """The scheduler's `step_share` in the last step."""

    def clock(self) -> float:
        return self.now_s

    def add(self, prompt: Prompt, priority: int = 0) -> Request:
        self.num_requests += 1
        request = Request(
            str(self.num_requests),
            prompt.token_ids,
            SamplingParams(max_tokens=50, seed=0, temperature=0.0),
            1,
            images=prompt.images,
            arrival_s=self.now_s + 1e-6 * self.num_requests,
            priority=priority,
        )
        self.under_test.tokens[request] = []
        if not self.encoding.begin(request):
            self.scheduler.add(request)
        return request

    def streams(self, num: int, priority: int = 0) -> list[Request]:
        """So many streams whose prompts are computed."""
        found = [self.add(prompt_of([1, 2, 3, number]), priority) for number in range(num)]
        while not self.scheduler.is_decoding:
            self.under_test.step()
        return found

    def images(self, num: int, priority: int = 0) -> list[Request]:
        """So many requests that wait for an image."""
        return [self.add(prompt_of([1], Picture(number, 6), [2, 3]), priority) for number in range(num)]

    def step(self) -> float:
        """Compute a step. Returns the milliseconds of the pause after it."""
        self.pacing.begin()
        self.was_beside = not self.encoder.is_paused
        self.share = self.scheduler.step_share
        self.under_test.step()
        self.now_s += self.step_s
        self.pacing.end()
        assert not self.encoder.is_paused
        return 1000 * self.pacing.left_s


@pytest.mark.parametrize(("streams", "images"), [(32, 4), (8, 1), (4, 2), (8, 12)])
def test_a_pause_gives_each_image_the_time_of_some_streams(streams: int, images: int) -> None:
    setup = Setup()
    setup.streams(streams)
    setup.images(images)
    assert setup.step() == pytest.approx(1000 * STEP_S * STREAMS_PER_IMAGE * images / streams)


@pytest.mark.parametrize("images", [1, 2])
def test_few_images_beside_many_streams_still_get_a_share(images: int) -> None:
    setup = Setup()
    setup.streams(32)
    setup.images(images)
    assert setup.step() == pytest.approx(1000 * STEP_S * LEAST_IMAGE_SHARE)


def test_the_encoder_stops_during_steps_only() -> None:
    setup = Setup()
    setup.streams(2)
    setup.step()
    assert setup.was_beside, "nobody waits for an image"
    setup.images(1)
    setup.step()
    assert not setup.was_beside
    assert setup.pacing.left_s > 0
    assert not setup.encoder.is_paused


@pytest.mark.parametrize(
    ("step_s", "target_ms", "most_ms"),
    [
        (0.01, None, 200.0),  # as with prompts
        (0.15, None, 1.9 * 150.0),
        (0.01, 50.0, 50.0),
        (0.01, 1000.0, 1000.0),
        (0.1, 50.0, 125.0),
    ],
)
def test_a_step_and_its_pause_take_no_longer_than_a_step_with_prompts(
    step_s: float, target_ms: float | None, most_ms: float
) -> None:
    setup = Setup(step_s, target_ms)
    setup.streams(1)
    setup.images(30)
    assert setup.step() + 1000 * step_s == pytest.approx(most_ms)


def test_without_images_there_is_no_pause() -> None:
    setup = Setup()
    setup.streams(2)
    assert setup.step() == 0
    setup.images(1)
    assert setup.step() > 0
    setup.encoder.work()
    for request in setup.encoding.take_ready():
        setup.scheduler.add(request)
    assert [setup.step() for _ in range(3)] == [0, 0, 0]


def test_images_do_not_delay_streams_of_higher_priority() -> None:
    setup = Setup()
    setup.streams(4, priority=1)
    setup.images(4, priority=0)
    assert setup.step() == 0
    assert setup.was_beside, "the encoder would not run at all"
    setup.images(2, priority=1)
    assert setup.step() == pytest.approx(1000 * STEP_S * STREAMS_PER_IMAGE * 2 / 4)


@pytest.mark.parametrize(
    ("streams", "images", "pause"),
    [(31, 1, LEAST_IMAGE_SHARE), (7, 1, STREAMS_PER_IMAGE / 8), (3, 2, 1.0), (1, 12, 1.0)],
)
def test_steps_with_prompts_leave_time_to_the_encoder(streams: int, images: int, pause: float) -> None:
    """Prompts get at least half of the time."""
    setup = Setup()
    setup.streams(streams)
    setup.images(images)
    setup.add(prompt_of(list(range(1, 200))))
    setup.under_test.step()
    assert len(setup.scheduler.running) == streams + 1, "the prompt is computed in several steps"
    assert not setup.scheduler.is_decoding
    assert setup.step() == pytest.approx(1000 * STEP_S * pause)
    assert setup.share == pytest.approx(1 / (1 + pause))
    assert not setup.was_beside
    setup.add(prompt_of([7, 8, 9]))
    assert setup.pacing.left_s > 0, "prompts that come one after the other do not take the encoder's turn"


def test_an_image_that_is_computed_takes_the_time_of_the_pause() -> None:
    setup = Setup()
    setup.streams(2)
    setup.images(2)
    setup.encoder.work(1)
    for request in setup.encoding.take_ready():
        setup.scheduler.add(request)
    assert setup.step() == 0
    assert not setup.was_beside
    assert setup.step() > 0


def test_the_first_prompt_waits_for_nothing() -> None:
    setup = Setup()
    setup.images(4)
    setup.add(prompt_of([1, 2, 3]))
    setup.pacing.begin()
    assert not setup.encoder.is_paused
    assert setup.scheduler.step_share == pytest.approx(1.0)


def test_after_the_last_image_steps_have_all_the_time_again() -> None:
    setup = Setup()
    setup.streams(2)
    waiting = setup.images(1)
    setup.step()
    assert setup.share < 1
    assert all(setup.encoding.cancel(request) for request in waiting)
    assert setup.step() == 0
    assert setup.share == pytest.approx(1.0)


@pytest.mark.parametrize("what", ["a prompt", "an image is encoded", "nobody waits", "all streams end"])
def test_a_pause_ends_when_there_is_something_else_to_do(what: str) -> None:
    setup = Setup()
    streams = setup.streams(2)
    waiting = setup.images(4)
    assert setup.step() > 0
    if what == "a prompt":
        setup.add(prompt_of([7, 8, 9]))
    elif what == "an image is encoded":
        setup.encoder.work(1)
        for request in setup.encoding.take_ready():
            setup.scheduler.add(request)
    elif what == "nobody waits":
        assert all(setup.encoding.cancel(request) for request in waiting)
    else:
        for request in streams:
            setup.scheduler.cancel(request)
    assert setup.pacing.left_s == 0


def test_a_pause_goes_on_when_another_image_comes_or_a_stream_ends() -> None:
    setup = Setup()
    first, *_ = setup.streams(3)
    setup.images(2)
    pause_ms = setup.step()
    setup.now_s += pause_ms / 2000
    setup.scheduler.cancel(first)
    setup.images(1)
    assert 1000 * setup.pacing.left_s == pytest.approx(pause_ms / 2)
    setup.now_s += pause_ms / 2000
    assert setup.pacing.left_s == pytest.approx(0, abs=1e-9)
