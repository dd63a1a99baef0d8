"""Workers give transformers' answers to prompts with images, from files to tokens: at once, from hits, and after a
kill. A stream whose worker is killed in the middle of it goes on as if nothing had happened."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from headrace.common.transport.channels import PLAIN
from headrace.common.vision.bounds import DEFAULT_MAX_IMAGE_PIXELS
from headrace.common.vision.families.known import family_in
from headrace.common.vision.family import Detail, ImageFamily
from headrace.common.vision.header import read_header
from headrace.common.vision.identity import digest, pseudo_tokens
from headrace.protos import inference_pb2_grpc
from headrace.protos.inference_pb2 import GenerateRequest
from headrace.protos.worker_pb2 import Counters
from tests.architectures.exports import PYTHON, exported
from tests.architectures.families import FAMILIES
from tests.architectures.image_processing import PROCESSING
from tests.architectures.image_references import ImagePrompt, prompts_in
from tests.e2e.fleet import Fleet, fleet
from tests.patience import patience

ALL = os.environ.get("HEADRACE_ARCHITECTURES") == "1"
NAMES = [name for name in PROCESSING if ALL or FAMILIES[name].is_short]
# Steps are shorter than prompts, so that images are computed in several, unless the family keeps them whole.
FLAGS = ["--execution-mode", "accuracy", "--kv-precision", "f32", "--max-num-batched-tokens", "64"]
# A worker is killed when so many tokens of an answer have come: the block with the end of the last image is full.
NUM_TOKENS, KILLED_AFTER = 300, 48
pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="make .make/architectures/.done makes what exports models"),
]


def request_of(family: ImageFamily, prompt: ImagePrompt) -> GenerateRequest:
    """The request for the answer, as a gateway sends it."""
    tokens = np.array(prompt.token_ids, np.uint32)
    places = np.flatnonzero(tokens == prompt.image_token_id)
    request = GenerateRequest()
    for data in prompt.images:
        header = read_header(data)
        count = family.layout(header.width, header.height, Detail.AUTO).num_image_tokens
        tokens[places[:count]] = pseudo_tokens(digest(data, family, Detail.AUTO), count)
        places = places[count:]
        request.images.add(data=data)
    assert not len(places), "the prompt has more image tokens than its images"
    request.token_ids.extend(tokens.tolist())
    request.sampling.temperature = 0.0
    request.sampling.max_tokens = len(prompt.greedy)
    request.sampling.ignore_eos = True
    return request


async def answers(served: Fleet, requests: list[GenerateRequest]) -> list[tuple[list[int], int]]:
    """The tokens of each answer, and how many of its prompt's tokens were cached. All are asked for at once."""
    async with PLAIN.channel(served.router_addresses[0]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]

        async def ask(request: GenerateRequest) -> tuple[list[int], int]:
            responses = [response async for response in stub.Generate(request, timeout=patience(120))]
            return [token for response in responses for token in response.token_ids], responses[0].num_cached_tokens

        return list(await asyncio.gather(*map(ask, requests)))


def streamed(request: GenerateRequest, seed: int) -> GenerateRequest:
    """The request for a long answer that is drawn, so that each token depends on all probabilities before it."""
    long = GenerateRequest()
    long.CopyFrom(request)
    long.sampling.temperature, long.sampling.seed, long.sampling.max_tokens = 1.0, seed, NUM_TOKENS
    return long


async def answer_of_a_killed_worker(served: Fleet, request: GenerateRequest) -> list[int]:
    """The tokens of an answer. When the first have come, the only worker is killed and started again."""
    (worker,) = served.workers
    process = worker.pid
    tokens: list[int] = []
    async with PLAIN.channel(served.router_addresses[0]) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)  # type: ignore[no-untyped-call]
        async for response in stub.Generate(request, timeout=patience(120)):
            tokens += response.token_ids
            if len(tokens) >= KILLED_AFTER and worker.pid == process:
                worker.kill()
                await asyncio.to_thread(worker.gone)
                worker.start()
    return tokens


@contextmanager
def one_worker(directory: Path, model: Path) -> Iterator[Fleet]:
    """A worker whose KV cache outlives it, and a router that waits for it."""
    with TemporaryDirectory(dir="/dev/shm") as memory:
        flags = {
            "worker_flags": [*FLAGS, "--kv-memory", memory],
            "router_flags": ["--capacity-wait", str(patience(60))],
        }
        with fleet(directory, num_workers=1, num_gateways=0, model=model, **flags) as served:
            yield served


def counters(served: Fleet) -> Counters:
    """What the worker's process has counted, once it has nothing to do."""
    served.until_whole()
    served.until_idle()
    (worker,) = served.list_workers()
    return worker.load.counters


@pytest.mark.parametrize("name", NAMES)
async def test_answers_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    directory = exported([name])[name]
    family = family_in(directory, DEFAULT_MAX_IMAGE_PIXELS)
    assert family is not None
    prompts = prompts_in(directory)
    requests = [request_of(family, prompt) for prompt in prompts]
    expected = [list(prompt.greedy) for prompt in prompts]
    longest = max(range(len(prompts)), key=lambda number: len(prompts[number].token_ids))
    with one_worker(tmp_path, directory) as served:
        first = await answers(served, requests)
        assert [tokens for tokens, _ in first] == expected
        again = await answers(served, requests)
        assert [tokens for tokens, _ in again] == expected
        for prompt, (_, num_cached) in zip(prompts, again, strict=True):
            assert num_cached > np.flatnonzero(np.array(prompt.token_ids) == prompt.image_token_id)[0]
        for seed in range(5):
            request = streamed(requests[longest], seed)
            ((whole, _),) = await answers(served, [request])
            assert await answer_of_a_killed_worker(served, request) == whole
            counted = counters(served)
            if counted.requests_finished:
                break  # the new process has finished it
        else:
            raise AssertionError("in five rounds the worker had finished its answer before it was killed")
        # Blocks outlive the worker. States of images and of recurrent layers do not.
        num_lost = len(set(prompts[longest].images)) if FAMILIES[name].is_recurrent else 0
        assert counted.images_encoded == num_lost
        assert [tokens for tokens, _ in await answers(served, requests)] == expected
