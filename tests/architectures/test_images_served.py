"""Workers give transformers' answers to prompts with images, from files to tokens: at once, from hits, and after a
kill."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

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


@pytest.mark.parametrize("name", NAMES)
async def test_answers_are_those_of_the_reference(name: str, tmp_path: Path) -> None:
    directory = exported([name])[name]
    family = family_in(directory, DEFAULT_MAX_IMAGE_PIXELS)
    assert family is not None
    prompts = prompts_in(directory)
    requests = [request_of(family, prompt) for prompt in prompts]
    expected = [list(prompt.greedy) for prompt in prompts]
    # Requests wait until the only worker has started again.
    waits = ["--capacity-wait", str(patience(60))]
    with fleet(tmp_path, num_workers=1, model=directory, worker_flags=FLAGS, router_flags=waits) as served:
        first = await answers(served, requests)
        assert [tokens for tokens, _ in first] == expected
        again = await answers(served, requests)
        assert [tokens for tokens, _ in again] == expected
        for prompt, (_, num_cached) in zip(prompts, again, strict=True):
            assert num_cached > np.flatnonzero(np.array(prompt.token_ids) == prompt.image_token_id)[0]
        (worker,) = served.workers
        worker.kill()
        asked = asyncio.create_task(answers(served, requests))
        await asyncio.to_thread(worker.gone)
        worker.start()
        assert [tokens for tokens, _ in await asked] == expected
