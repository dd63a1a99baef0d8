"""A fleet that serves a vision-language model: its answers about drawn pictures are those of the reference, whatever
happens to workers and to the processes that encode images."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from headrace.common.transport.channels import PLAIN
from headrace.common.vision.families.known import family_of
from headrace.common.vision.family import Detail
from headrace.common.vision.files import FILES
from headrace.common.vision.header import read_header
from headrace.common.vision.identity import digest, pseudo_tokens
from headrace.protos import inference_pb2_grpc
from headrace.protos.inference_pb2 import GenerateRequest, GenerateResponse
from headrace.protos.worker_pb2 import Load
from tests.e2e.fleet import Fleet, fleet
from tests.e2e.serving import until
from tests.e2e.shapes import MODEL, Question, questions, swapped
from tests.memory import resident_bytes
from tests.patience import patience

SENTENCE = "what is in the picture first second ? a and colour shape"
THINGS = "red green blue yellow black purple circle square triangle"
WORDS = ("<pad>", "<s>", "</s>", "<image>", *SENTENCE.split(" "), *THINGS.split(" "))
FAMILY = family_of({name: (MODEL / name).read_bytes() for name in FILES if (MODEL / name).is_file()})
assert FAMILY is not None
FLAGS = ["--execution-mode", "accuracy", "--kv-precision", "f32", "--log-level", "info"]
WIDTH = 16
SEED = int(os.environ.get("HEADRACE_SEED", "3"))
NUM_DEATHS, NUM_CANCELLED = (20, 2000) if os.environ.get("HEADRACE_SOAK") else (1, 60)
"""How often each worker loses its process that encodes, and how many requests are cancelled."""
MOST_FILES, MOST_GROWTH_BYTES = 16, 256 << 20
"""What a worker may have more of after all of this."""


def tokens_of(picture: bytes) -> list[int]:
    """The pseudo tokens of a picture."""
    assert FAMILY is not None
    header = read_header(picture)
    count = FAMILY.layout(header.width, header.height, Detail.AUTO).num_image_tokens
    return pseudo_tokens(digest(picture, FAMILY, Detail.AUTO), count).tolist()


def asked(question: Question, name: str, *, max_tokens: int = 8, ignore_eos: bool = False) -> GenerateRequest:
    """The request for an answer."""
    tokens = [WORDS.index("<s>")]
    for picture in question.pictures:
        tokens += tokens_of(picture)
    tokens += [WORDS.index(word) for word in question.text.split(" ")]
    request = GenerateRequest(request_id=name, token_ids=tokens)
    request.sampling.temperature = 0.0
    request.sampling.max_tokens = max_tokens
    request.sampling.ignore_eos = ignore_eos
    for picture in question.pictures:
        request.images.add(data=picture)
    return request


class Client:
    """Asks the router of a fleet."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

    async def stream(self, request: GenerateRequest) -> AsyncIterator[GenerateResponse]:
        async for response in self._stub.Generate(request, timeout=patience(120)):
            yield response

    async def words(self, request: GenerateRequest) -> str:
        """The answer in words."""
        tokens = [token async for response in self.stream(request) for token in response.token_ids]
        return " ".join(WORDS[token] for token in tokens if WORDS[token] != "</s>")

    async def answers(self, asked_for: Sequence[GenerateRequest]) -> list[str]:
        """The answers to many, so many at a time."""
        room = asyncio.Semaphore(WIDTH)

        async def one(request: GenerateRequest) -> str:
            async with room:
                return await self.words(request)

        return list(await asyncio.gather(*map(one, asked_for)))


@asynccontextmanager
async def client(fleet: Fleet) -> AsyncIterator[Client]:
    async with PLAIN.channel(fleet.router_addresses[0]) as channel:
        yield Client(channel)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = tmp_path_factory.mktemp("served")
    with fleet(directory, num_workers=2, model=MODEL, worker_flags=[*FLAGS, "--kv-cache-gb", "0.1"]) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_held(served: Fleet) -> Iterator[None]:
    """After each test, every block is free, and no request waits."""
    served.until_whole()
    yield
    served.until_whole()
    served.until_idle()


def loads(fleet: Fleet) -> list[Load]:
    return [worker.load for worker in fleet.list_workers()]


def total(fleet: Fleet, counter: str) -> int:
    return sum(getattr(load.counters, counter) for load in loads(fleet))


async def test_two_hundred_pictures_are_answered_as_by_the_reference_sixteen_at_a_time(served: Fleet) -> None:
    async with client(served) as asking:
        found = await asking.answers([asked(question, f"q{n}") for n, question in enumerate(questions())])
        assert found == [question.reference for question in questions()]
        found = await asking.answers([asked(question, f"s{n}") for n, question in enumerate(swapped())])
        assert found == [question.reference for question in swapped()]


async def test_sixteen_chats_over_one_image_encode_it_once_and_a_second_turn_hits_all_of_it(
    served: Fleet,
) -> None:
    picture = questions()[0].pictures[0] + b"a tail that decoders ignore"
    question = Question((picture,), questions()[0].text, "")
    async with client(served) as asking:
        before = total(served, "images_encoded")
        await asking.answers([asked(question, f"c{number}", max_tokens=1 + number) for number in range(16)])
        until(lambda: total(served, "images_encoded") > before, "the image is encoded")
        # Each of the two workers may have encoded it.
        assert 1 <= total(served, "images_encoded") - before <= 2
        first = [response async for response in asking.stream(asked(question, "again"))]
        assert first[0].num_cached_tokens >= 17


async def test_near_equal_images_at_once_share_nothing_behind_the_text_before_them(served: Fleet) -> None:
    """Two pictures, each with twenty tails that decoders ignore. All are asked about at once."""
    other = next(question for question in questions() if question.reference != questions()[0].reference)
    near = [
        replace(question, pictures=tuple(picture + bytes([number]) for picture in question.pictures))
        for number in range(20)
        for question in (questions()[0], other)
    ]
    before = total(served, "images_encoded")
    async with client(served) as asking:

        async def ask(number: int, question: Question) -> None:
            responses = [response async for response in asking.stream(asked(question, f"n{number}"))]
            assert responses[0].num_cached_tokens <= 1
            words = [WORDS[token] for response in responses for token in response.token_ids]
            assert " ".join(word for word in words if word != "</s>") == question.reference

        await asyncio.gather(*map(ask, range(len(near)), near))
    num_pictures = sum(len(question.pictures) for question in near)
    until(lambda: total(served, "images_encoded") == before + num_pictures, "each is encoded")


async def test_an_image_that_is_none_is_refused_by_name(served: Fleet) -> None:
    request = asked(questions()[0], "broken")
    whole = request.images[0].data
    async with client(served) as asking:
        for data, problem in (
            (b"GIF89a", "images[0]: the image is a GIF file that ends in its header"),
            (whole[:200], "token_ids has other tokens than those of images[0]"),
        ):
            request.images[0].data = data
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await asking.words(request)
            assert problem in (caught.value.details() or "")
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        broken = Question((whole[:200],), questions()[0].text, "")
        with pytest.raises(grpc.aio.AioRpcError, match="truncated or broken PNG"):
            await asking.words(asked(broken, "cut"))
        assert await asking.words(asked(questions()[0], "whole")) == questions()[0].reference


async def test_answers_survive_the_deaths_of_the_processes_that_encode(served: Fleet) -> None:
    found = questions()[100:140] if NUM_DEATHS == 1 else questions()[100:108]
    before, held = total(served, "image_encoder_restarts"), held_by(served)
    async with client(served) as asking:
        for death in range(NUM_DEATHS):
            fresh = [with_tails(question, death) for question in found]
            asking_all = asyncio.create_task(
                asking.answers([asked(question, f"d{death}-{number}") for number, question in enumerate(fresh)])
            )
            await asyncio.sleep(0)
            for worker in served.workers:
                for child in encoders_of(worker.pid):
                    os.kill(child, signal.SIGKILL)
            assert await asking_all == [question.reference for question in fresh]
    assert total(served, "image_encoder_restarts") >= before + NUM_DEATHS
    assert_little_more_is_held(served, held)


async def test_requests_that_are_cancelled_at_any_moment_leave_nothing(served: Fleet) -> None:
    """While they wait for their images, while these are encoded, and while prompts and answers are computed."""
    draw = random.Random(SEED)
    room = asyncio.Semaphore(WIDTH)
    failed, restarts = total(served, "requests_failed"), total(served, "image_encoder_restarts")
    async with client(served) as asking:

        async def leave(number: int) -> None:
            question = with_tails(questions()[number % len(questions())], 1000 + number)
            request = asked(question, f"left{number}", max_tokens=500, ignore_eos=True)
            async with room:
                with suppress(TimeoutError):
                    async with asyncio.timeout(draw.choice((0.0, 0.02, 0.1, 0.5)) * draw.random()):
                        async for _ in asking.stream(request):
                            pass

        held = held_by(served)
        await asyncio.gather(*(leave(number) for number in range(NUM_CANCELLED)))
        served.until_idle()
        assert await asking.words(asked(questions()[0], "stayed")) == questions()[0].reference
    until(lambda: all(load.num_encoding == load.encoding_tokens == 0 for load in loads(served)), "no image waits")
    assert (total(served, "requests_failed"), total(served, "image_encoder_restarts")) == (failed, restarts)
    assert [len(encoders_of(worker.pid)) for worker in served.workers] == [1] * len(served.workers)
    assert_little_more_is_held(served, held)


def with_tails(question: Question, number: int) -> Question:
    """The question about files that nobody has asked about, with the same pictures."""
    tail = b"tail %d" % number
    return replace(question, pictures=tuple(picture + tail for picture in question.pictures))


def held_by(fleet: Fleet) -> list[tuple[int, int]]:
    """The open files and the bytes of memory of each worker."""
    return [(len(os.listdir(f"/proc/{worker.pid}/fd")), resident_bytes(worker.pid)) for worker in fleet.workers]


def assert_little_more_is_held(fleet: Fleet, before: Sequence[tuple[int, int]]) -> None:
    for (files, num_bytes), (files_before, bytes_before) in zip(held_by(fleet), before, strict=True):
        assert files < files_before + MOST_FILES
        assert num_bytes < bytes_before + MOST_GROWTH_BYTES


async def test_a_stream_goes_on_when_its_worker_is_killed_and_leaves_no_process(served: Fleet) -> None:
    question = questions()[1]
    async with client(served) as asking:
        for attempt in range(5):
            request = asked(question, f"whole{attempt}", max_tokens=1500, ignore_eos=True)
            before = finished(served)
            expected = [token async for response in asking.stream(request) for token in response.token_ids]
            until(lambda before=before: finished(served) != before, "the worker has reported it")  # type: ignore[misc]
            # The prefix is in the cache of one, so the same request comes to it again.
            busy, other = sorted((0, 1), key=lambda index: before[index] - finished(served)[index])
            others = finished(served)[other]
            request.request_id = f"killed{attempt}"
            children = encoders_of(served.workers[busy].pid)
            tokens: list[int] = []
            async for response in asking.stream(request):
                tokens += response.token_ids
                if len(tokens) > 20 and served.workers[busy].is_alive:
                    served.workers[busy].kill()
            served.workers[busy].gone()
            served.workers[busy].start()
            assert tokens == expected
            assert children
            for child in children:
                until(lambda path=Path(f"/proc/{child}"): not path.exists(), "its process has ended")  # type: ignore[misc]
            served.until_whole()
            if finished(served)[other] > others:
                return  # the other one has finished it: it was in flight
    raise AssertionError("in five rounds the worker had finished its stream before it was killed")


def finished(fleet: Fleet) -> list[int]:
    """How many requests each worker has finished, in the fleet's order."""
    return [load.counters.requests_finished for load in by_name(fleet)]


def by_name(fleet: Fleet) -> list[Load]:
    """The loads of workers, in the fleet's order."""
    found = {worker.worker_id: worker.load for worker in fleet.list_workers()}
    return [found[worker.name] for worker in fleet.workers]


def encoders_of(pid: int) -> list[int]:
    """The processes for images of a worker."""
    children = [
        int(child) for path in Path(f"/proc/{pid}/task").iterdir() for child in _read(path / "children").split()
    ]
    return [child for child in children if b"headrace.worker.vision.child" in _read(Path(f"/proc/{child}/cmdline"))]


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""  # it has ended


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two ranks need two CPUs")
async def test_a_model_that_is_divided_among_ranks_sees_the_same(tmp_path: Path) -> None:
    some = questions()[:60]
    with fleet(tmp_path, num_workers=1, model=MODEL, worker_flags=[*FLAGS, "--tensor-parallel", "2"]) as divided:
        async with client(divided) as asking:
            found = await asking.answers([asked(question, f"q{n}") for n, question in enumerate(some)])
            again = await asking.answers([asked(question, f"r{n}") for n, question in enumerate(some)])
        divided.until_whole()
    assert found == again == [question.reference for question in some]
