"""Requests wait for the states of their images: cached tokens need none, equal images are encoded once, and whatever
ends a request frees what it held."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import pytest

from headrace.protos.status import Reason
from headrace.worker.engine.encoding import Encoding
from headrace.worker.engine.mailbox import EngineReport
from headrace.worker.request.params import SamplingParams
from headrace.worker.request.request import Request, RequestState
from headrace.worker.vision.states import StateStore
from tests.worker.conftest import BLOCK_SIZE, VOCAB_SIZE, make_engine
from tests.worker.fake_runner import expected_tokens
from tests.worker.images import FakeEncoder, Picture, Prompt, prompt_of

MAX_WAIT_S = 10.0
CAT, DOG = Picture(1, 12), Picture(2, 9)


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Setup:
    """An engine with an encoding stage, checked after every turn."""

    def __init__(
        self, num_blocks: int = 64, budget_tokens: int = 1000, encoder: FakeEncoder | None = None, **options: int
    ) -> None:
        self.under_test = make_engine(num_blocks=num_blocks, **options)  # type: ignore[arg-type]
        self.encoder = encoder or FakeEncoder()
        self.store = StateStore(budget_tokens * self.encoder.bytes_per_token)
        self.clock = Clock()
        self.encoding = Encoding(self.under_test.scheduler, self.encoder, self.store, MAX_WAIT_S, self.clock)
        self.under_test.fetch_first = self.encoding.begin_late
        self.errors: dict[Request, tuple[Reason, str]] = {}
        self.num_arrived = 0

    def request(self, prompt: Prompt, max_tokens: int = 4, **fields: object) -> Request:
        """A request that arrives now."""
        sampling = SamplingParams(max_tokens=max_tokens, seed=0, temperature=0.0)
        fields = {"arrival_s": self.clock.now_s + self.num_arrived * 1e-6, **fields}
        self.num_arrived += 1
        return self.add(Request("r", prompt.token_ids, sampling, 1, images=prompt.images, **fields))  # type: ignore[arg-type]

    def add(self, request: Request) -> Request:
        """A request that arrives as it is."""
        self.under_test.tokens[request] = list(request.resume_token_ids)
        if not self.encoding.begin(request):
            self.under_test.scheduler.add(request)
        return request

    def turn(self) -> None:
        """What the engine's thread does once."""
        for request in self.encoding.take_ready():
            self.under_test.scheduler.add(request)
        self.under_test.step()
        for output in self.encoding.take_outputs():
            assert output.error is not None
            assert output.request not in self.errors
            self.errors[output.request] = (output.error.reason, output.error.message)
        if self.under_test.is_checked:
            self.encoding.check()

    def run(self, *, works: bool = True) -> None:
        """Turns until nothing can go on."""
        for _ in range(1000):
            if works:
                self.encoder.work()
            self.turn()
            if not (self.under_test.scheduler.has_requests or self.under_test.engine.has_outputs):
                if self.encoding.num_held and works:
                    continue
                break
        else:
            raise AssertionError("no end in sight")
        self.turn()  # lets go of what ended

    def answers(self, *requests: Request) -> None:
        """Assert that these ended with the right tokens, and that nothing is held for anybody."""
        for request in requests:
            count = request.sampling.max_tokens
            expected = expected_tokens(request.token_ids[: request.num_prompt_tokens], count, VOCAB_SIZE)
            assert self.under_test.tokens[request] == expected
        self.is_clean()

    def is_clean(self) -> None:
        assert self.store.num_holders == 0
        assert self.encoding.num_held == 0
        pool = self.under_test.scheduler.kv_cache.pool
        assert pool.num_free_blocks == pool.num_blocks
        self.encoding.check()


@pytest.fixture
def setup() -> Setup:
    return Setup()


def test_a_request_is_scheduled_when_its_images_are_encoded(setup: Setup) -> None:
    request = setup.request(prompt_of([1, 2, 3], CAT, [4], DOG, [5, 6]))
    setup.run(works=False)
    assert setup.encoding.num_held == 1
    assert request.state is RequestState.WAITING
    setup.encoder.work(1)
    setup.run(works=False)
    assert setup.encoding.num_held == 1, "one image is missing"
    setup.run()
    setup.answers(request)
    assert request.images[0].states is None, "nobody needs them any more"
    assert request.image_wait_s == pytest.approx(0.0)


def test_text_beside_images_does_not_wait(setup: Setup) -> None:
    setup.request(prompt_of([1, 2, 3], CAT, [4, 5]))
    text = setup.request(prompt_of([7, 8, 9]))
    setup.run(works=False)
    assert setup.under_test.tokens[text] == expected_tokens([7, 8, 9], 4, VOCAB_SIZE)
    assert setup.encoding.num_held == 1


def test_equal_images_are_encoded_once_and_near_ones_never_shared(setup: Setup) -> None:
    other = Picture(3, CAT.num_tokens)
    pictures = [(picture, number) for number in range(8) for picture in (CAT, other)]
    requests = [setup.request(prompt_of([1, 2, 3], picture, [number, 5])) for picture, number in pictures]
    setup.run()
    setup.answers(*requests)
    assert sorted(setup.encoder.seen) == sorted([CAT.digest, other.digest])
    assert (setup.store.num_misses, setup.store.num_hits) == (2, 14)


def test_one_image_at_several_places_is_encoded_once(setup: Setup) -> None:
    request = setup.request(prompt_of([1], CAT, [2], CAT, [3], DOG, CAT, [4]))
    setup.run()
    setup.answers(request)
    assert len(setup.encoder.seen) == 2


def test_a_later_turn_whose_images_are_cached_needs_no_encoding(setup: Setup) -> None:
    first = prompt_of([1, 2, 3], CAT, [4, 5, 6, 7, 8])
    setup.request(first)
    setup.run()
    setup.store._evict(0)
    assert CAT.digest not in setup.store
    later = setup.request(Prompt([*first.token_ids, 9, 10, 11], prompt_of([1, 2, 3], CAT).images))
    assert setup.encoding.num_held == 0
    setup.run(works=False)
    setup.answers(later)
    assert later.num_cached_tokens >= 15
    assert len(setup.encoder.seen) == 1


def test_kept_states_serve_a_request_whose_blocks_are_gone(setup: Setup) -> None:
    setup.request(prompt_of([1, 2, 3], CAT, [4, 5]))
    setup.run()
    later = setup.request(prompt_of([8, 2, 3], CAT, [4, 5]))
    assert setup.encoding.num_held == 0, "the states are there"
    setup.run(works=False)
    setup.answers(later)


def test_blocks_that_are_lost_before_the_first_step_are_computed_with_states(setup: Setup) -> None:
    prompt = prompt_of([1, 2, 3], CAT, [4, 5, 6, 7, 8])
    setup.request(prompt)
    setup.run()
    setup.store._evict(0)
    again = prompt_of([1, 2, 3], CAT, [4, 5, 6, 7, 9])
    request = setup.request(again)
    assert setup.encoding.num_held == 0
    setup.under_test.scheduler.kv_cache.forget_all()
    setup.turn()
    assert setup.encoding.num_held == 1
    setup.run()
    setup.answers(request)


def test_a_preempted_request_whose_blocks_stayed_asks_for_nothing(setup: Setup) -> None:
    request = setup.request(prompt_of([1, 2, 3], CAT, [4] * 40, DOG, [5, 6]), max_tokens=12)
    other = setup.request(prompt_of([9] * 5), max_tokens=40)
    setup.encoder.work()
    setup.turn()
    setup.turn()
    while request.num_generated_tokens < 3:
        setup.turn()
    setup.turn()
    assert request.images[0].states is None
    scheduler = setup.under_test.scheduler
    scheduler.running.sort(key=lambda running: running is request)
    scheduler._preempt(request)
    setup.run()
    setup.answers(request, other)
    assert len(setup.encoder.seen) == 2, "its blocks were still there"


def test_preemptions_for_lack_of_blocks_end_well() -> None:
    setup = Setup(num_blocks=16, max_num_seqs=4)
    prompts = [prompt_of([number] * 3, Picture(number, 8), [7, 8]) for number in range(4)]
    requests = [setup.request(prompt, max_tokens=30) for prompt in prompts]
    setup.run()
    setup.answers(*requests)
    assert setup.under_test.scheduler.stats.preemptions > 0


def test_images_wait_for_room_in_the_store_by_rank() -> None:
    setup = Setup(budget_tokens=12)
    low = setup.request(prompt_of([1], Picture(1, 8), [2, 3]))
    lower = setup.request(prompt_of([1], Picture(2, 8), [2, 3]))
    high = setup.request(prompt_of([1], Picture(3, 8), [2, 3]), priority=1)
    assert setup.encoder.seen == [Picture(1, 8).digest]
    setup.run()
    setup.answers(low, lower, high)
    assert setup.encoder.seen == [Picture(number, 8).digest for number in (1, 3, 2)]


def test_images_are_encoded_in_order_of_rank_whatever_the_order_of_arrivals_and_cancellations() -> None:
    setup = Setup(budget_tokens=8)
    rng = random.Random(7)
    first = setup.request(prompt_of([1], Picture(0, 8), [2, 3]))
    waiting: dict[Request, Picture] = {}
    for number in range(1, 40):
        picture = Picture(number, 8)
        resumed = {"resume_token_ids": [4]} if rng.random() < 0.3 else {}
        arrival_s = setup.clock.now_s + rng.randrange(3)  # equal ranks are served in order of `request`
        request = setup.request(
            prompt_of([1], picture, [2, 3]), priority=rng.randrange(-1, 2), arrival_s=arrival_s, **resumed
        )
        waiting[request] = picture
        if rng.random() < 0.3:
            victim = rng.choice(list(waiting))
            assert setup.encoding.cancel(victim)
            del waiting[victim]
        setup.encoding.check()
    setup.run()
    setup.answers(first, *(request for request in waiting if not request.is_resumed))
    in_order = sorted(waiting, key=lambda one: (-one.priority, not one.is_resumed, one.arrival_s))
    assert setup.encoder.seen[1:] == [waiting[request].digest for request in in_order]


def test_a_request_of_higher_rank_waits_for_few_images_of_a_request_that_has_many() -> None:
    setup = Setup(num_blocks=512, budget_tokens=2000)
    many = [Picture(number, 100) for number in range(10, 20)]
    low = setup.request(prompt_of([1], *many, [2, 3]), max_tokens=1)
    high = setup.request(prompt_of([1], DOG, many[8], [2, 3]), priority=1)
    last = setup.request(prompt_of([1], CAT, [2, 3]))
    setup.encoding.check()
    assert setup.encoder.seen == [picture.digest for picture in many[:4]]
    while len(setup.encoder.seen) < len(many) + 2:
        setup.encoder.work(1)
        setup.turn()
        setup.encoding.check()
    others = [picture for picture in many[4:] if picture is not many[8]]
    expected = [*many[:4], many[8], DOG, *others, CAT]
    assert setup.encoder.seen == [picture.digest for picture in expected], "also an image that both have"
    setup.run()
    setup.answers(low, high, last)


def test_small_images_are_handed_to_the_encoder_together() -> None:
    setup = Setup(num_blocks=128)
    pictures = [Picture(number, 16) for number in range(20)]
    request = setup.request(prompt_of([1], *pictures, [2, 3]))
    assert len(setup.encoder.seen) == 16
    setup.encoding.cancel(request)
    assert not setup.encoder.queue
    setup.run()
    setup.is_clean()


def test_an_image_larger_than_the_store_is_served_alone() -> None:
    setup = Setup(budget_tokens=4)
    requests = [
        setup.request(prompt_of([1], Picture(number, 8), Picture(number + 9, 8), [2, 3])) for number in range(3)
    ]
    setup.run()
    setup.answers(*requests)


def test_a_broken_image_ends_its_requests_alone(setup: Setup) -> None:
    broken = [setup.request(prompt_of([number], DOG, CAT, [2, 3])) for number in (1, 2)]
    setup.encoder.work(1)
    whole = setup.request(prompt_of([1], DOG, [2, 3]))
    setup.encoder.fail("the image is no picture")
    setup.run()
    error = (Reason.INVALID_FIELD, "images[1]: the image is no picture")
    assert setup.errors == dict.fromkeys(broken, error)
    setup.answers(whole)
    assert setup.under_test.scheduler.stats.requests_failed == 2
    again = setup.request(prompt_of([4], CAT, [5, 6]))
    setup.run()
    setup.answers(again)


def test_cancelling_frees_everything_at_any_time(setup: Setup) -> None:
    alone = setup.request(prompt_of([1], CAT, [2, 3]))
    assert setup.encoding.cancel(alone)
    assert not setup.encoder.queue, "nobody waits for it"
    setup.run()
    setup.is_clean()
    first, second = (setup.request(prompt_of([number], CAT, [2, 3])) for number in (1, 2))
    assert setup.encoding.cancel(first)
    setup.run()
    setup.answers(second)
    running = setup.request(prompt_of([5], DOG, [2, 3]), max_tokens=50)
    setup.encoder.work()
    setup.turn()
    assert not setup.encoding.cancel(running)
    setup.under_test.scheduler.cancel(running)
    setup.run()
    setup.is_clean()
    assert setup.under_test.scheduler.stats.requests_cancelled == 3


def test_cancelling_frees_everything_while_a_part_of_an_image_is_computed() -> None:
    setup = Setup(max_num_batched_tokens=16)
    request = setup.request(prompt_of([1], Picture(1, 40), [2, 3]))
    setup.encoder.work()
    setup.turn()
    setup.turn()
    assert 1 < request.num_computed_tokens < 41
    assert setup.store.num_holders == 1
    setup.under_test.scheduler.cancel(request)
    setup.run()
    setup.is_clean()
    assert request.images[0].states is None


def test_an_image_that_is_asked_for_again_while_it_is_encoded_for_nobody_is_encoded_once(setup: Setup) -> None:
    gone = setup.request(prompt_of([1], CAT, [2, 3]))
    job = setup.encoder.queue.popleft()  # it has begun
    setup.encoding.cancel(gone)
    again = setup.request(prompt_of([1], CAT, [2, 3]))
    setup.encoder.queue.appendleft(job)
    setup.encoder.work(1)
    setup.turn()
    assert not setup.encoder.queue, "the second is not needed"
    setup.run(works=False)
    setup.answers(again)


def test_a_request_that_waits_too_long_for_the_images_of_others_is_given_back(setup: Setup) -> None:
    for number in range(4):
        setup.request(prompt_of([number], Picture(number, 8), [1, 2]), max_wait_s=1000.0)
    first = setup.encoder.queue[0]
    first.begun_s = setup.clock.now_s
    late = setup.request(prompt_of([1], DOG, [2, 3]))
    resumed = setup.request(prompt_of([1], Picture(77, 8), [2, 3]), resume_token_ids=[4])
    setup.turn()
    assert not setup.errors
    setup.clock.now_s += MAX_WAIT_S
    setup.turn()
    assert setup.errors[late][0] is Reason.QUEUE_FULL
    assert resumed not in setup.errors
    assert len(setup.errors) == 1 + 3, "the first has begun, and the resumed one is never refused"


def test_a_turn_costs_what_is_ready_however_many_requests_wait() -> None:
    def cost(count: int) -> int:
        setup = Setup(budget_tokens=CAT.num_tokens)
        for number in range(count):
            setup.request(prompt_of([1], CAT, [2, 3]))
            setup.request(prompt_of([1], Picture(9 + number, 8), [2, 3]))
        assert setup.encoding.num_held == 2 * count
        return num_instructions(lambda: (setup.encoding.take_ready(), setup.encoding.num_sharing(0)))

    assert cost(2) == cost(100)


def num_instructions(call: Callable[[], object]) -> int:
    """How many instructions of Python a call takes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def test_waits_are_forecast_and_reported(setup: Setup) -> None:
    prompt = prompt_of([1], CAT, [2], DOG, [3, 4])
    new = Request("new", prompt.token_ids, SamplingParams(max_tokens=1, seed=0), 1, images=prompt.images)
    assert setup.encoding.wait_s(new) == (0.0, 0.0), "nothing is known"
    setup.encoder.rate.observe(10, 2.0)
    assert setup.encoding.wait_s(new) == (0.0, pytest.approx(21 / 5))
    setup.request(prompt_of([1], CAT, [2, 3]))
    others_s, own_s = setup.encoding.wait_s(new)
    assert (others_s, own_s) == (pytest.approx(12 / 5), pytest.approx(9 / 5))
    load = setup.encoding.report(EngineReport()).load
    assert (load.num_waiting, load.num_encoding, load.encoding_tokens) == (1, 1, 12)
    assert load.image_tokens_per_s == pytest.approx(5.0)
    setup.run()
    report = setup.encoding.report(EngineReport())
    assert (report.load.num_encoding, report.load.num_cached_images) == (0, 1)
    assert report.counters["images_encoded"] == 1
    assert setup.encoding.wait_s(new)[1] == pytest.approx(9 / 5)


def test_what_cached_blocks_spare_the_encoder(setup: Setup) -> None:
    """The cat has tokens 1 to 13, the dog 14 to 23, and the cat again 23 to 35."""
    prompt = prompt_of([1], CAT, [2], DOG, CAT, [3, 4])
    request = Request("new", prompt.token_ids, SamplingParams(max_tokens=1, seed=0), 1, images=prompt.images)
    assert setup.encoding.spared_s(request, 0, 36) == pytest.approx(21 / 100), "a guess"
    setup.encoder.rate.observe(10, 2.0)
    assert setup.encoding.spared_s(request, 0, 36) == pytest.approx(21 / 5), "equal images are encoded once"
    assert setup.encoding.spared_s(request, 0, 34) == pytest.approx(9 / 5), "the cat is needed later"
    assert setup.encoding.spared_s(request, 13, 22) == 0.0
    assert setup.encoding.spared_s(request, 13, 23) == pytest.approx(9 / 5)
    setup.request(prompt_of([1], DOG, [2, 3]))
    setup.run()
    cat_s = 12 / setup.encoder.rate.tokens_per_s
    assert setup.encoding.spared_s(request, 0, 36) == pytest.approx(cat_s), "the dog is kept"


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events_ends_every_request_once(seed: int) -> None:
    rng = random.Random(seed)
    setup = Setup(num_blocks=24, budget_tokens=rng.choice([10, 30, 200]), max_num_seqs=3)
    requests: list[Request] = []
    cancelled: set[Request] = set()
    for _ in range(120):
        if rng.random() < 0.3 and len(requests) < 40:
            requests.append(setup.request(_random_prompt(rng), max_tokens=rng.randrange(1, 20)))
        if rng.random() < 0.3:
            setup.encoder.work(rng.randrange(1, 3))
        if rng.random() < 0.1 and setup.encoder.queue:
            setup.encoder.fail()
        if rng.random() < 0.1 and requests:
            victim = rng.choice(requests)
            if victim.state is not RequestState.FINISHED:
                cancelled.add(victim)
                if not setup.encoding.cancel(victim):
                    setup.under_test.scheduler.cancel(victim)
        setup.turn()
    setup.run()
    setup.is_clean()
    ended = cancelled | setup.errors.keys()
    _answered(setup, [request for request in requests if request not in ended])


def _random_prompt(rng: random.Random) -> Prompt:
    parts: list[Sequence[int] | Picture] = [[rng.randrange(3)] * rng.randrange(1, 6)]
    for _ in range(rng.randrange(3)):
        number = rng.randrange(5)
        parts += [Picture(number, 5 + number), [7] * rng.randrange(2, 4)]
    return prompt_of(*parts, [8, 9])


def _answered(setup: Setup, requests: Sequence[Request]) -> None:
    assert requests
    setup.answers(*requests)
    assert all(request.num_tokens <= BLOCK_SIZE * 24 for request in requests)
